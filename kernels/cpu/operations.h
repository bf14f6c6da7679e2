// Work on one row or head, shared by single operations and the whole decoder.
#pragma once

#include <cmath>

#include "rows.h"

namespace kv {

// Rows so small that waking a thread costs more than the work stay on the calling thread.
template <typename Work>
void each_row(int64_t num_rows, int64_t row_size, const Work& work) {
    const int64_t rows_each = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_size));
    Pool::instance().run((num_rows + rows_each - 1) / rows_each, [&](int64_t task) {
        const int64_t last = std::min(num_rows, (task + 1) * rows_each);
        for (int64_t row = task * rows_each; row < last; row++) work(row);
    });
}

// out may be x itself.
inline void norm_row(const float* x, const float* weight, float* out, int64_t width, float eps) {
    Floats squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
        const Floats a = load(x + i), b = load(x + i + kLanes);
        squares[0] += a * a;
        squares[1] += b * b;
    }
    for (; i < width; i += kLanes) {
        const Floats a = load_some(x + i, int(std::min<int64_t>(kLanes, width - i)));
        squares[0] += a * a;
    }
    const Floats scale = splat(1.0f / std::sqrt(sum_of_lanes(squares[0] + squares[1]) / float(width) + eps));
    for (i = 0; i < width; i += kLanes) {
        const int count = int(std::min<int64_t>(kLanes, width - i));
        store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
    }
}

inline Floats silu(Floats x) {
    // x / (1 + e**-x); e**-x past float's range would be inf, and x / inf is the 0 that is meant.
    const Floats bounded = x < -87.0f ? splat(-87.0f) : x;
    return x / (1.0f + exp(-bounded));
}

// Turns element i of a head with element i + half; out may be x itself.
inline void turn_head(const float* x, const float* cos, const float* sin, float* out, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int count = int(std::min<int64_t>(kLanes, half - i));
        const Floats first = load_some(x + i, count), second = load_some(x + half + i, count);
        const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(out + i, first * c - second * s, count);
        store_some(out + half + i, second * c + first * s, count);
    }
}

// residual += x; out = norm of the sum.
inline void add_norm_row(const float* x, float* residual, const float* weight, float* out, int64_t width, float eps) {
    for (int64_t i = 0; i < width; i += kLanes) {
        const int count = int(std::min<int64_t>(kLanes, width - i));
        store_some(residual + i, load_some(residual + i, count) + load_some(x + i, count), count);
    }
    norm_row(residual, weight, out, width, eps);
}

inline void silu_mul_row(const float* gate, const float* up, float* out, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes) {
        const int count = int(std::min<int64_t>(kLanes, width - i));
        store_some(out + i, silu(load_some(gate + i, count)) * load_some(up + i, count), count);
    }
}

}  // namespace kv
