// A decoder's parameters and one step's index tensors, as kernels/cpu/decoder.py lays them out: words of 64 bits,
// except the two floats at the end of Decoder.
#pragma once

#include <cstdint>

namespace kv {

struct Matrix {
    int64_t format;
    const uint8_t* weights;
    int64_t first, num_outputs;  // its part of the outputs
};

struct Linear {
    const Matrix* matrices;
    int64_t num_matrices;
    const float* bias;  // or null
    int64_t in_features, out_features;
};

struct Layer {
    const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm, k_norm: or null
    Linear qkv, output, gate_up, down;
};

struct Decoder {
    const Layer* layers;
    const float* norm;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float eps, scale;
};

struct Step {
    const int32_t *positions, *write_slots;  // [num_tokens]
    const int32_t *rows, *kv_lens;           // [num_spans]
    const int32_t* q_indptr;                 // [num_spans + 1]
    const int32_t* table;
    const float *cos, *sin;  // [num_positions][head_dim / 2]
    float* const* keys;      // by layer, each [num_slots][num_kv_heads][head_dim]
    float* const* values;
    // Tokens that are read behind the last layer, ascending, and the step that each of them is a span of; null: all are.
    const Step* last;
    const int32_t* last_tokens;  // [last->num_tokens]
    int64_t num_tokens, num_spans, table_stride, num_positions, num_slots;
};

}  // namespace kv

extern "C" {
int kv_product(int format, const uint8_t* weights, const float* bias, const float* x, int64_t x_stride, float* y,
               int64_t y_stride, int64_t m, int64_t n, int64_t k);
int kv_attention(const float* q, int64_t q_stride, const float* keys, const float* values, float* out,
                 int64_t out_stride, const int32_t* table, int64_t table_stride, const int32_t* rows,
                 const int32_t* kv_lens, const int32_t* q_indptr, const int32_t* positions, int num_spans, int num_heads,
                 int num_kv_heads, int head_dim, float scale);
void kv_rms_norm(const float* x, int64_t outer_stride, int64_t inner_stride, const float* weight, float* out,
                 int64_t num_outer, int64_t num_inner, int64_t width, float eps);
void kv_add_rms_norm(const float* x, float* residual, const float* weight, float* out, int64_t num_rows, int64_t width,
                     float eps);
void kv_silu_mul(const float* gate_up, int64_t stride, float* out, int64_t num_rows, int64_t width);
}
