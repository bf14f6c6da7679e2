// What stands between products: norms, rotary embedding, gated activation, rows of the embedding, the best logit.
//
// Each row (or head) is one chain of operations of its own, so results do not depend on the batch.
#include "operations.h"

using namespace kv;

extern "C" {

// out[row] = x[row] / rms(x[row]) * weight. Rows are [num_outer][num_inner] with strides; out is contiguous.
void kv_rms_norm(const float* x, int64_t outer_stride, int64_t inner_stride, const float* weight, float* out,
                 int64_t num_outer, int64_t num_inner, int64_t width, float eps) {
    each_row(num_outer * num_inner, width, [&](int64_t row) {
        norm_row(x + row / num_inner * outer_stride + row % num_inner * inner_stride, weight, out + row * width, width, eps);
    });
}

// residual += x; out = norm of the sum. All contiguous [num_rows][width].
void kv_add_rms_norm(const float* x, float* residual, const float* weight, float* out, int64_t num_rows, int64_t width,
                     float eps) {
    each_row(num_rows, width, [&](int64_t row) {
        add_norm_row(x + row * width, residual + row * width, weight, out + row * width, width, eps);
    });
}

// Turns element i of each head with element i + half. x may be strided by token; out is contiguous.
void kv_rotary(const float* x, int64_t x_stride, const float* cos, const float* sin, float* out, int64_t num_tokens,
               int64_t num_heads, int64_t half) {
    each_row(num_tokens, num_heads * half * 2, [&](int64_t token) {
        for (int64_t head = 0; head < num_heads; head++)
            turn_head(x + token * x_stride + head * 2 * half, cos + token * half, sin + token * half,
                      out + (token * num_heads + head) * 2 * half, half);
    });
}

// out[i] = silu(gate_up[i]) * gate_up[width + i]; out contiguous [num_rows][width].
void kv_silu_mul(const float* gate_up, int64_t stride, float* out, int64_t num_rows, int64_t width) {
    each_row(num_rows, 4 * width, [&](int64_t row) {
        const float* gate = gate_up + row * stride;
        silu_mul_row(gate, gate + width, out + row * width, width);
    });
}

// Rows of a matrix stored as Q8_0 blocks (fp16 scale, 32 bytes), as floats. -1 when an id is out of range.
int kv_embed_q8(const uint8_t* table, int64_t num_ids, int64_t width, const int32_t* ids, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= num_ids) return -1;
    each_row(count, width, [&](int64_t row) {
        const uint8_t* from = table + int64_t(ids[row]) * (width / kBlock * 34);
        for (int64_t b = 0; b < width / kBlock; b++, from += 34) {
            const Floats scale = splat(half_to_float(read_half(from)));
            float* to = out + row * width + b * kBlock;
            store(to, load_bytes(reinterpret_cast<const int8_t*>(from + 2)) * scale);
            store(to + kLanes, load_bytes(reinterpret_cast<const int8_t*>(from + 2 + kLanes)) * scale);
        }
    });
    return 0;
}

// The highest of each row and its lowest index; NaN anywhere in a row makes its highest NaN.
void kv_best(const float* x, int64_t stride, int64_t num_rows, int64_t width, float* best, int64_t* index) {
    each_row(num_rows, width, [&](int64_t row) {
        const float* from = x + row * stride;
        Floats highest = splat(-INFINITY), poison{};
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) {
            const Floats at = load(from + i);
            highest = larger(at, highest);
            poison += at - at;  // 0, or NaN for NaN and infinities
        }
        float most = largest_lane(highest);
        bool has_odd = sum_of_lanes(poison) != 0.0f;
        for (; i < width; i++) {
            most = from[i] > most ? from[i] : most;
            has_odd |= from[i] - from[i] != 0.0f;
        }
        if (has_odd)
            for (int64_t at = 0; at < width; at++)
                if (from[at] != from[at]) {
                    best[row] = NAN;
                    index[row] = at;
                    return;
                }
        int64_t at = 0;
        while (at < width && from[at] != most) at++;
        best[row] = most;
        index[row] = at < width ? at : 0;
    });
}
}
