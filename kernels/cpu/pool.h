// Threads that share the tasks of one call and sleep between calls.
//
// Own threads rather than OpenMP: torch brings its own OpenMP runtime, and two runtimes on two cores spin
// against each other. Which thread runs a task never changes a result: tasks write disjoint memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kv {

class Pool {
  public:
    static Pool& instance();

    // Threads that work on a call, the caller's included; at least 1.
    void resize(int num_threads);
    int num_threads() const { return int(workers_.size()) + 1; }

    // Calls task(0) .. task(count - 1), each once, in any order, and returns when all are done.
    template <typename Task>
    void run(int64_t count, const Task& task) {
        if (count <= 0) return;
        if (count == 1 || workers_.empty()) {
            for (int64_t i = 0; i < count; i++) task(i);
            return;
        }
        share(count, [](const void* context, int64_t i) { (*static_cast<const Task*>(context))(i); }, &task);
    }

  private:
    using Call = void (*)(const void* context, int64_t index);

    Pool() = default;
    ~Pool();
    void share(int64_t count, Call call, const void* context);
    void work();
    bool take_one();

    std::mutex callers_;
    std::vector<std::thread> workers_;
    Call call_ = nullptr;
    const void* context_ = nullptr;
    int64_t count_ = 0;
    // Upper half: number of the call; lower half: tasks nobody took yet. A worker that comes late finds
    // another number or no tasks and touches nothing.
    alignas(64) std::atomic<uint64_t> tickets_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> calls_{0};  // what sleeping workers wait on
    std::atomic<bool> stops_{false};
};

}  // namespace kv
