#include "pool.h"

#include <chrono>

namespace kv {

namespace {

// Long enough to bridge the host's work between two operations, short enough to leave the core to others.
constexpr std::chrono::microseconds kSpin{60};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool& Pool::instance() {
    static Pool pool;
    return pool;
}

Pool::~Pool() { resize(1); }

void Pool::resize(int num_threads) {
    std::lock_guard<std::mutex> lock(callers_);
    if (num_threads < 1) num_threads = 1;
    if (int(workers_.size()) + 1 == num_threads) return;
    stops_ = true;
    calls_.fetch_add(1);
    calls_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stops_ = false;
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this] { work(); });
}

void Pool::share(int64_t count, Call call, const void* context) {
    std::lock_guard<std::mutex> lock(callers_);
    call_ = call;
    context_ = context;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t number = (tickets_.load(std::memory_order_relaxed) >> 32) + 1;
    tickets_.store(number << 32 | uint64_t(count), std::memory_order_release);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
    while (take_one()) {
    }
    for (int turn = 0; done_.load(std::memory_order_acquire) < count; turn++) {
        if (turn < 20000) relax();
        else std::this_thread::yield();  // a worker lost its core in mid-task
    }
}

bool Pool::take_one() {
    uint64_t ticket = tickets_.load(std::memory_order_acquire);
    do {
        if (uint32_t(ticket) == 0) return false;
    } while (!tickets_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel));
    // Holding a ticket keeps the call open, so its fields stay as they are.
    call_(context_, count_ - int64_t(uint32_t(ticket)));
    done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
}

void Pool::work() {
    for (;;) {
        const uint32_t calls = calls_.load(std::memory_order_acquire);
        if (stops_.load(std::memory_order_acquire)) return;  // read after calls_: else its last change is missed
        if (take_one()) continue;
        const auto until = std::chrono::steady_clock::now() + kSpin;
        bool is_idle = true;
        while (is_idle && std::chrono::steady_clock::now() < until) {
            for (int i = 0; i < 16 && is_idle; i++) {
                relax();
                is_idle = calls_.load(std::memory_order_acquire) == calls;
            }
        }
        if (is_idle) calls_.wait(calls, std::memory_order_acquire);
    }
}

}  // namespace kv

extern "C" {

void kv_set_threads(int num_threads) { kv::Pool::instance().resize(num_threads); }
int kv_num_threads() { return kv::Pool::instance().num_threads(); }
}
