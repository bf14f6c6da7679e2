// All layers of a decoder in one call: between its products there is little to do, and each call from Python costs
// as much as a small product.
//
// The same functions as the single operations, in the same order, so results are the same bits.
#include "decoder.h"
#include "operations.h"

namespace kv {
namespace {

// Activations of one step; rows are tokens.
struct Buffers {
    float *qkv, *attended, *product, *gate_up, *activated, *normed;
};

Buffers reserve(const Decoder& d, int64_t num_tokens) {
    static thread_local Scratch scratch;
    const int64_t heads = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim, attended = d.num_heads * d.head_dim;
    const int64_t sizes[] = {heads, attended, d.hidden, 2 * d.intermediate, d.intermediate, d.hidden};
    int64_t total = 0;
    for (int64_t size : sizes) total += size * num_tokens;
    float* at = static_cast<float*>(scratch.reserve(size_t(total) * sizeof(float)));
    float* parts[6];
    for (int i = 0; i < 6; i++) {
        parts[i] = at;
        at += sizes[i] * num_tokens;
    }
    return {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]};
}

int multiply(const Linear& linear, const float* x, float* y, int64_t num_tokens) {
    for (int64_t i = 0; i < linear.num_matrices; i++) {
        const Matrix& matrix = linear.matrices[i];
        const float* bias = linear.bias ? linear.bias + matrix.first : nullptr;
        const int code = kv_product(int(matrix.format), matrix.weights, bias, x, linear.in_features, y + matrix.first,
                                    linear.out_features, num_tokens, matrix.num_outputs, linear.in_features);
        if (code != 0) return code;
    }
    return 0;
}

// Norms and turns q in place, and k on its way into its slot; v goes there as it is.
void place_heads(const Decoder& d, const Layer& layer, const Step& step, int64_t number, float* qkv) {
    const int64_t dim = d.head_dim, half = dim / 2, width = (d.num_heads + 2 * d.num_kv_heads) * dim;
    each_row(step.num_tokens, width, [&](int64_t token) {
        const float *cos = step.cos + step.positions[token] * half, *sin = step.sin + step.positions[token] * half;
        float* q = qkv + token * width;
        float* k = q + d.num_heads * dim;
        const int64_t slot = int64_t(step.write_slots[token]) * d.num_kv_heads * dim;
        for (int64_t head = 0; head < d.num_heads; head++) {
            if (layer.q_norm) norm_row(q + head * dim, layer.q_norm, q + head * dim, dim, d.eps);
            turn_head(q + head * dim, cos, sin, q + head * dim, half);
        }
        for (int64_t head = 0; head < d.num_kv_heads; head++) {
            if (layer.k_norm) norm_row(k + head * dim, layer.k_norm, k + head * dim, dim, d.eps);
            turn_head(k + head * dim, cos, sin, step.keys[number] + slot + head * dim, half);
        }
        std::memcpy(step.values[number] + slot, k + d.num_kv_heads * dim, size_t(d.num_kv_heads * dim) * sizeof(float));
    });
}

int attend(const Decoder& d, const Step& step, int64_t number, const Buffers& buffers) {
    const int64_t width = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim;
    return kv_attention(buffers.qkv, width, step.keys[number], step.values[number], buffers.attended,
                        d.num_heads * d.head_dim, step.table, step.table_stride, step.rows, step.kv_lens, step.q_indptr,
                        step.positions, int(step.num_spans), int(d.num_heads), int(d.num_kv_heads), int(d.head_dim),
                        d.scale);
}

// A layer as far as its K and V.
int store_layer(const Decoder& d, const Step& step, int64_t number, const float* normed, const Buffers& b) {
    if (int code = multiply(d.layers[number].qkv, normed, b.qkv, step.num_tokens)) return code;
    place_heads(d, d.layers[number], step, number, b.qkv);
    return 0;
}

// The rest of it.
int finish_layer(const Decoder& d, const Step& step, int64_t number, const float* next_norm, float* residual,
                 float* normed, const Buffers& b) {
    const Layer& layer = d.layers[number];
    const int64_t n = step.num_tokens;
    if (int code = attend(d, step, number, b)) return code;
    if (int code = multiply(layer.output, b.attended, b.product, n)) return code;
    kv_add_rms_norm(b.product, residual, layer.mlp_norm, normed, n, d.hidden, d.eps);
    if (int code = multiply(layer.gate_up, normed, b.gate_up, n)) return code;
    kv_silu_mul(b.gate_up, 2 * d.intermediate, b.activated, n, d.intermediate);
    if (int code = multiply(layer.down, b.activated, b.product, n)) return code;
    kv_add_rms_norm(b.product, residual, next_norm, normed, n, d.hidden, d.eps);
    return 0;
}

// The rest of the last layer for some tokens: their rows come together in front, and go back into normed.
int finish_last(const Decoder& d, const Step& step, float* residual, float* normed, const Buffers& b) {
    const Step& last = *step.last;
    const int64_t heads = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim;
    for (int64_t i = 0; i < last.num_tokens; i++) {  // ascending, so none is overwritten before it is read
        const int64_t token = step.last_tokens[i];
        std::memmove(b.qkv + i * heads, b.qkv + token * heads, size_t(heads) * sizeof(float));
        std::memmove(residual + i * d.hidden, residual + token * d.hidden, size_t(d.hidden) * sizeof(float));
    }
    if (int code = finish_layer(d, last, d.num_layers - 1, d.norm, residual, b.normed, b)) return code;
    for (int64_t i = 0; i < last.num_tokens; i++)
        std::memcpy(normed + step.last_tokens[i] * d.hidden, b.normed + i * d.hidden, size_t(d.hidden) * sizeof(float));
    return 0;
}

bool is_within(const Step& step) {
    for (int64_t i = 0; i < step.num_tokens; i++) {
        if (step.write_slots[i] < 0 || step.write_slots[i] >= step.num_slots) return false;
        if (step.positions[i] < 0 || step.positions[i] >= step.num_positions) return false;
    }
    int64_t before = -1;
    for (int64_t i = 0; step.last && i < step.last->num_tokens; i++) {
        const int64_t token = step.last_tokens[i];
        if (token <= before || token >= step.num_tokens) return false;
        before = token;
    }
    return true;
}

}  // namespace
}  // namespace kv

using namespace kv;

extern "C" {

// residual [num_tokens][hidden]: rows of the embedding, overwritten; normed: the same size, hidden states after the last
// norm; with step->last of its tokens alone, rows of others are what the last layer has read. -1 when a slot or a
// position lies outside its table, or the last tokens are not ascending ones of the step: nothing was written.
int kv_decode(const Decoder* decoder, const Step* step, float* residual, float* normed) {
    const Decoder& d = *decoder;
    if (!is_within(*step)) return -1;
    const Buffers buffers = reserve(d, step->num_tokens);
    kv_rms_norm(residual, d.hidden, 0, d.layers[0].attention_norm, normed, step->num_tokens, 1, d.hidden, d.eps);
    for (int64_t number = 0; number < d.num_layers; number++) {
        const bool is_last = number + 1 == d.num_layers;
        if (int code = store_layer(d, *step, number, normed, buffers)) return code;
        if (is_last && step->last) return step->last->num_tokens ? finish_last(d, *step, residual, normed, buffers) : 0;
        const float* next_norm = is_last ? d.norm : d.layers[number + 1].attention_norm;
        if (int code = finish_layer(d, *step, number, next_norm, residual, normed, buffers)) return code;
    }
    return 0;
}
}
