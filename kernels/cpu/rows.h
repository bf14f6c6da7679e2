// What both product implementations share: the request, tails of tiles, scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "pool.h"
#include "vector.h"

namespace kv {

enum Format : int { kF32 = 0, kF16 = 1, kBF16 = 2, kQ8_0 = 3, kQ4_1 = 4 };

constexpr int kBlock = 32;  // features that share a scale in quantised formats

// y[m][n] = x[m][k] W^T + bias; rows of x and y are contiguous, strides in elements.
struct Product {
    const uint8_t* weights;
    const float* bias;  // or null
    const float* x;
    float* y;
    int64_t x_stride, y_stride;
    int64_t m, n, k;

    int64_t num_tiles() const { return (n + kLanes - 1) / kLanes; }
    // Lanes of a tile that are output features; not positive past the last tile.
    int width(int64_t tile) const { return int(std::min<int64_t>(kLanes, n - tile * kLanes)); }
};

inline Floats load_some(const float* p, int count) {
    if (count >= kLanes) return load(p);
    float lanes[kLanes] = {};
    std::memcpy(lanes, p, size_t(count) * sizeof(float));
    return load(lanes);
}

inline void store_some(float* p, Floats x, int count) {
    if (count >= kLanes) return store(p, x);
    float lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, size_t(count) * sizeof(float));
}

// Memory of one thread, aligned to cache lines, grown and never given back.
class Scratch {
  public:
    void* reserve(size_t bytes) {
        if (bytes > size_) {
            size_ = (bytes + 4095) & ~size_t(4095);
            memory_.reset(std::aligned_alloc(64, size_));
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

// Products of quantised weights in whole numbers, where the processor has the instruction; see integer_products.h.
bool multiplies_integers();
int64_t integer_tile_bytes(int format, int64_t k);
void pack_integer_row(int format, const uint8_t* row, int64_t k, int64_t index, uint8_t* packed);
void multiply_integers(int format, const Product& product);
void multiply_two_digits(int format, const Product& product);

inline uint16_t read_half(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

}  // namespace kv
