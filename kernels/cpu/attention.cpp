// Paged attention over the flat slot view, and the store of new K and V.
//
// One task is some query rows of one span: those of one KV head, or of all of them for a single token, so that what lies
// side by side in memory is read by one thread. Keys are visited in chunks of kChunk positions; each
// chunk has a softmax of its own, and chunks are merged in order by their maxima. A query's arithmetic depends on its
// position alone, not on who shares its task, its step or its batch: decode, prefill and chunked prefill agree
// bit for bit. Nothing past a span's kv_len is read.
#include <cmath>
#include <vector>

#include "rows.h"

namespace kv {
namespace {

constexpr int kChunk = 256;   // positions
constexpr int kMaxRows = 96;  // query rows of a task
#if defined(__AVX512F__)
constexpr int kScoreRows = 8, kScoreTiles = 2, kMixRows = 6, kMixVectors = 4;
#else
constexpr int kScoreRows = 4, kScoreTiles = 1, kMixRows = 4, kMixVectors = 1;
#endif

struct Attention {
    const float* q;       // [num_tokens][num_heads][head_dim]
    const float* keys;    // [num_slots][num_kv_heads][head_dim]
    const float* values;
    float* out;  // [num_tokens][num_heads][head_dim]
    const int32_t* table;
    const int32_t *rows, *kv_lens, *q_indptr, *positions;
    int64_t q_stride, slot_stride, out_stride, table_stride;
    int num_spans, num_heads, num_kv_heads, head_dim;
    float scale;

    int group() const { return num_heads / num_kv_heads; }
    const int32_t* slots(int span) const { return table + int64_t(rows[span]) * table_stride; }
};

struct Task {
    int span;
    int first_kv_head, num_kv_heads;
    int first_token, num_tokens;  // of q
    int first_head, num_heads;    // within the group of each KV head
    int first_chunk, num_chunks;
    float* partials;  // of each chunk, to be merged later; null: merge at once and write the result

    int rows_each() const { return num_tokens * num_heads; }  // of each KV head
    int num_rows() const { return num_kv_heads * rows_each(); }
};

// Query rows of one task, those of one KV head after the other.
struct Rows {
    int count = 0, limit = 0;  // limit: the largest of `seen`
    const float* q[kMaxRows];
    float* out[kMaxRows];
    int seen[kMaxRows];  // keys 0 .. seen - 1
};

// Softmax of one chunk, or of several merged: what a merge needs of a row.
struct Part {
    float max, sum;
};

Rows rows_of(const Attention& a, const Task& task) {
    Rows rows;
    for (int kv_head = task.first_kv_head; kv_head < task.first_kv_head + task.num_kv_heads; kv_head++) {
        const int first = kv_head * a.group() + task.first_head;
        for (int t = task.first_token; t < task.first_token + task.num_tokens; t++)
            for (int h = first; h < first + task.num_heads; h++) {
                rows.q[rows.count] = a.q + t * a.q_stride + int64_t(h) * a.head_dim;
                rows.out[rows.count] = a.out + t * a.out_stride + int64_t(h) * a.head_dim;
                rows.seen[rows.count++] = a.positions[t] + 1;
                rows.limit = std::max(rows.limit, a.positions[t] + 1);
            }
    }
    return rows;
}

// Asks for one head of the rows of up to 16 slots: pages lie anywhere, which no hardware can guess.
inline void ask_for(const Attention& a, const float* pool, const int32_t* slots, int count, int kv_head) {
    constexpr int kLine = 16;  // floats
    for (int i = 0; i < count; i++) {
        const float* row = pool + int64_t(slots[i]) * a.slot_stride + int64_t(kv_head) * a.head_dim;
        for (int d = 0; d < a.head_dim; d += kLine) __builtin_prefetch(row + d, 0, 2);
    }
}

// Keys of one chunk, turned so that 16 positions lie side by side: [tile][head_dim][16]; zeros past `count`.
void turn_keys(const Attention& a, const int32_t* slots, int count, int kv_head, float* turned) {
    for (int tile = 0; tile * kLanes < count; tile++) {
        float* to = turned + int64_t(tile) * a.head_dim * kLanes;
        const float* from[kLanes];
        const int width = std::min(kLanes, count - tile * kLanes);
        const int next = (tile + 1) * kLanes;
        if (next < count) ask_for(a, a.keys, slots + next, std::min(kLanes, count - next), kv_head);
        ask_for(a, a.values, slots + tile * kLanes, width, kv_head);
        for (int i = 0; i < width; i++)
            from[i] = a.keys + int64_t(slots[tile * kLanes + i]) * a.slot_stride + int64_t(kv_head) * a.head_dim;
        int d = 0;
        if (width == kLanes)
            for (; d + kLanes <= a.head_dim; d += kLanes) transpose(from, d, to + d * kLanes);
        for (; d < a.head_dim; d++)
            for (int i = 0; i < kLanes; i++) to[d * kLanes + i] = i < width ? from[i][d] : 0.0f;
    }
}

// scores[row][position] of MR rows and NR tiles of keys.
template <int MR, int NR>
inline void score(const float* const* q, const float* turned, int head_dim, float scale, float* scores) {
    Floats sums[MR][NR] = {};
    for (int d = 0; d < head_dim; d++) {
        Floats key[NR];
        for (int n = 0; n < NR; n++) key[n] = load(turned + (int64_t(n) * head_dim + d) * kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            const Floats x = splat(q[m][d]);
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) sums[m][n] += x * key[n];
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) store(scores + int64_t(m) * kChunk + n * kLanes, sums[m][n] * scale);
}

template <int MR>
void score_rows(const float* const* q, const float* turned, int head_dim, int num_tiles, float scale, float* scores) {
    int tile = 0;
    for (; tile + kScoreTiles <= num_tiles; tile += kScoreTiles)
        score<MR, kScoreTiles>(q, turned + int64_t(tile) * head_dim * kLanes, head_dim, scale, scores + tile * kLanes);
    for (; tile < num_tiles; tile++)
        score<MR, 1>(q, turned + int64_t(tile) * head_dim * kLanes, head_dim, scale, scores + tile * kLanes);
}

void score_all(const float* const* q, int num_rows, const float* turned, int head_dim, int num_tiles, float scale,
               float* scores) {
    int row = 0;
    for (; row + kScoreRows <= num_rows; row += kScoreRows)
        score_rows<kScoreRows>(q + row, turned, head_dim, num_tiles, scale, scores + int64_t(row) * kChunk);
    for (; row + 3 <= num_rows; row += 3)
        score_rows<3>(q + row, turned, head_dim, num_tiles, scale, scores + int64_t(row) * kChunk);
    for (; row < num_rows; row++)
        score_rows<1>(q + row, turned, head_dim, num_tiles, scale, scores + int64_t(row) * kChunk);
}

// Scores of one row to weights e**(score - max) in place, 0 where not seen.
Part weigh(float* scores, int seen, int num_tiles) {
    if (seen <= 0) {
        for (int tile = 0; tile < num_tiles; tile++) store(scores + tile * kLanes, Floats{});
        return {-INFINITY, 0.0f};
    }
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats largest = splat(-INFINITY);
    for (int tile = 0; tile < num_tiles; tile++) {
        Floats x = load(scores + tile * kLanes);
        if ((tile + 1) * kLanes > seen) {
            x = lanes + tile * kLanes < seen ? x : splat(-INFINITY);
            store(scores + tile * kLanes, x);
        }
        largest = larger(largest, x);
    }
    const float max = largest_lane(largest);
    Floats total{};
    for (int tile = 0; tile < num_tiles; tile++) {
        const Floats weight = exp(load(scores + tile * kLanes) - splat(max));
        store(scores + tile * kLanes, weight);
        total += weight;
    }
    return {max, sum_of_lanes(total)};
}

// mixed[row][d] = sum of weights[row][position] * values[position][d], for MR rows and NR vectors of d.
template <int MR, int NR>
inline void mix(const float* const* values, int count, const float* weights, float* mixed, int head_dim, int d) {
    Floats sums[MR][NR] = {};
    for (int i = 0; i < count; i++) {
        Floats v[NR];
        for (int n = 0; n < NR; n++) v[n] = load(values[i] + d + n * kLanes);
#pragma GCC unroll 6
        for (int m = 0; m < MR; m++) {
            const Floats w = splat(weights[int64_t(m) * kChunk + i]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; n++) sums[m][n] += w * v[n];
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) store(mixed + int64_t(m) * head_dim + d + n * kLanes, sums[m][n]);
}

// The last head_dim % 16 values.
void mix_rest(const float* const* values, int count, const float* weights, float* mixed, int d, int width) {
    Floats sum{};
    for (int i = 0; i < count; i++) sum += splat(weights[i]) * load_some(values[i] + d, width);
    store_some(mixed + d, sum, width);
}

template <int MR>
void mix_rows(const float* const* values, int count, const float* weights, float* mixed, int head_dim) {
    int d = 0;
    for (; d + kMixVectors * kLanes <= head_dim; d += kMixVectors * kLanes)
        mix<MR, kMixVectors>(values, count, weights, mixed, head_dim, d);
    for (; d + kLanes <= head_dim; d += kLanes) mix<MR, 1>(values, count, weights, mixed, head_dim, d);
    if (d < head_dim)
        for (int m = 0; m < MR; m++)
            mix_rest(values, count, weights + int64_t(m) * kChunk, mixed + int64_t(m) * head_dim, d, head_dim - d);
}

void mix_all(const float* const* values, int count, const float* weights, float* mixed, int head_dim, int num_rows) {
    int row = 0;
    for (; row + kMixRows <= num_rows; row += kMixRows)
        mix_rows<kMixRows>(values, count, weights + int64_t(row) * kChunk, mixed + int64_t(row) * head_dim, head_dim);
    for (; row + 3 <= num_rows; row += 3)
        mix_rows<3>(values, count, weights + int64_t(row) * kChunk, mixed + int64_t(row) * head_dim, head_dim);
    for (; row < num_rows; row++)
        mix_rows<1>(values, count, weights + int64_t(row) * kChunk, mixed + int64_t(row) * head_dim, head_dim);
}

// One chunk of keys of one KV head for its rows: mixed [row][head_dim] and the parts of the softmax.
void attend_head(const Attention& a, const Task& task, const Rows& rows, int chunk, int kv_head, float* mixed,
                 Part* parts) {
    static thread_local Scratch turned_memory, scores_memory;
    const int first = chunk * kChunk, count = std::min(kChunk, rows.limit - first);
    const int num_tiles = (count + kLanes - 1) / kLanes;
    const int32_t* slots = a.slots(task.span) + first;
    float* turned = static_cast<float*>(turned_memory.reserve(sizeof(float) * size_t(kChunk) * a.head_dim));
    float* scores = static_cast<float*>(scores_memory.reserve(sizeof(float) * size_t(kChunk) * kMaxRows));
    const int num_rows = task.rows_each(), first_row = (kv_head - task.first_kv_head) * num_rows;
    turn_keys(a, slots, count, kv_head, turned);
    score_all(rows.q + first_row, num_rows, turned, a.head_dim, num_tiles, a.scale, scores);
    for (int row = 0; row < num_rows; row++) {
        const int seen = std::min(count, rows.seen[first_row + row] - first);
        parts[first_row + row] = weigh(scores + int64_t(row) * kChunk, seen, num_tiles);
    }
    const float* values[kChunk];
    for (int i = 0; i < count; i++)
        values[i] = a.values + int64_t(slots[i]) * a.slot_stride + int64_t(kv_head) * a.head_dim;
    mix_all(values, count, scores, mixed + int64_t(first_row) * a.head_dim, a.head_dim, num_rows);
}

void attend_chunk(const Attention& a, const Task& task, const Rows& rows, int chunk, float* mixed, Part* parts) {
    for (int kv_head = task.first_kv_head; kv_head < task.first_kv_head + task.num_kv_heads; kv_head++)
        attend_head(a, task, rows, chunk, kv_head, mixed, parts);
}

// total, out := those merged with one more chunk. A chunk of which the row sees nothing changes nothing.
void merge(Part* total, float* out, const Part& part, const float* mixed, int head_dim) {
    if (part.max == -INFINITY && part.sum == 0.0f) return;
    const float max = total->max > part.max ? total->max : part.max;
    const float old_factor = total->max == -INFINITY ? 0.0f : std::exp(total->max - max);
    const float new_factor = std::exp(part.max - max);
    for (int d = 0; d < head_dim; d++) out[d] = out[d] * old_factor + mixed[d] * new_factor;
    *total = {max, total->sum * old_factor + part.sum * new_factor};
}

void finish(const Part& total, float* out, int head_dim) {
    const float factor = 1.0f / total.sum;
    for (int d = 0; d < head_dim; d++) out[d] *= factor;
}

int64_t partial_size(const Attention& a, int rows) { return int64_t(rows) * (a.head_dim + 2); }

void run_task(const Attention& a, const Task& task) {
    static thread_local Scratch mixed_memory;
    const Rows rows = rows_of(a, task);
    if (task.partials) {
        for (int i = 0; i < task.num_chunks; i++) {
            float* at = task.partials + i * partial_size(a, rows.count);
            attend_chunk(a, task, rows, task.first_chunk + i, at + 2 * rows.count, reinterpret_cast<Part*>(at));
        }
        return;
    }
    float* mixed = static_cast<float*>(mixed_memory.reserve(sizeof(float) * size_t(kMaxRows) * a.head_dim));
    Part totals[kMaxRows], parts[kMaxRows];
    for (int row = 0; row < rows.count; row++) {
        totals[row] = {-INFINITY, 0.0f};
        std::memset(rows.out[row], 0, sizeof(float) * size_t(a.head_dim));
    }
    for (int chunk = 0; chunk * kChunk < rows.limit; chunk++) {
        attend_chunk(a, task, rows, chunk, mixed, parts);
        for (int row = 0; row < rows.count; row++)
            merge(&totals[row], rows.out[row], parts[row], mixed + int64_t(row) * a.head_dim, a.head_dim);
    }
    for (int row = 0; row < rows.count; row++) finish(totals[row], rows.out[row], a.head_dim);
}

void merge_partials(const Attention& a, const Task& whole) {
    const Rows rows = rows_of(a, whole);
    for (int row = 0; row < rows.count; row++) {
        Part total{-INFINITY, 0.0f};
        std::memset(rows.out[row], 0, sizeof(float) * size_t(a.head_dim));
        for (int chunk = 0; chunk < whole.num_chunks; chunk++) {
            const float* at = whole.partials + chunk * partial_size(a, rows.count);
            merge(&total, rows.out[row], reinterpret_cast<const Part*>(at)[row],
                  at + 2 * rows.count + int64_t(row) * a.head_dim, a.head_dim);
        }
        finish(total, rows.out[row], a.head_dim);
    }
}

// Tasks of all spans: tokens of a span in blocks of at most kMaxRows query rows, the longest context first.
std::vector<Task> tasks_of(const Attention& a) {
    std::vector<Task> tasks;
    const int group = a.group(), tokens_each = std::max(1, kMaxRows / group);
    const bool is_many = a.num_heads <= kMaxRows && a.num_spans >= 2 * Pool::instance().num_threads();
    for (int span = 0; span < a.num_spans; span++) {
        const int first_token = a.q_indptr[span];
        if (is_many && a.q_indptr[span + 1] - first_token == 1) {
            const int num_chunks = (a.positions[first_token] + kChunk) / kChunk;
            tasks.push_back({span, 0, a.num_kv_heads, first_token, 1, 0, group, 0, num_chunks, nullptr});
            continue;
        }
        for (int end = a.q_indptr[span + 1]; end > a.q_indptr[span]; end -= tokens_each) {
            const int first = std::max(a.q_indptr[span], end - tokens_each);
            for (int head = 0; head < a.num_kv_heads; head++)
                for (int at = 0; at < group; at += kMaxRows)
                    tasks.push_back({span, head, 1, first, end - first, at, std::min(group - at, kMaxRows), 0,
                                     (a.positions[end - 1] + kChunk) / kChunk, nullptr});
        }
    }
    return tasks;
}

// Few tasks over long contexts: their chunks are shared out, and merged in order afterwards.
void run_split(const Attention& a, std::vector<Task>& wholes) {
    static thread_local Scratch memory;
    int64_t size = 0;
    std::vector<Task> pieces;
    for (const Task& whole : wholes) size += whole.num_chunks * partial_size(a, whole.num_rows());
    float* at = static_cast<float*>(memory.reserve(sizeof(float) * size_t(size)));
    for (Task& whole : wholes) {
        whole.partials = at;
        for (int chunk = 0; chunk < whole.num_chunks; chunk++) {
            Task piece = whole;
            piece.first_chunk = chunk;
            piece.num_chunks = 1;
            piece.partials = at;
            at += partial_size(a, whole.num_rows());
            pieces.push_back(piece);
        }
    }
    Pool::instance().run(int64_t(pieces.size()), [&](int64_t i) { run_task(a, pieces[size_t(i)]); });
    Pool::instance().run(int64_t(wholes.size()), [&](int64_t i) { merge_partials(a, wholes[size_t(i)]); });
}

}  // namespace
}  // namespace kv

using namespace kv;

extern "C" {

// Copies row i of k and v to slot slots[i]. Strides in elements. -1 when a slot lies outside the pool: nothing is written.
int kv_store(const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* keys, float* values,
             int64_t slot_size, int64_t num_slots, const int32_t* slots, int64_t num_tokens) {
    for (int64_t i = 0; i < num_tokens; i++)
        if (slots[i] < 0 || slots[i] >= num_slots) return -1;
    const auto copy = [&](int64_t from, int64_t to) {
        const size_t bytes = size_t(slot_size) * sizeof(float);
        for (int64_t i = from; i < to; i++) {
            std::memcpy(keys + int64_t(slots[i]) * slot_size, k + i * k_stride, bytes);
            std::memcpy(values + int64_t(slots[i]) * slot_size, v + i * v_stride, bytes);
        }
    };
    constexpr int64_t kEach = 64;
    Pool::instance().run((num_tokens + kEach - 1) / kEach, [&](int64_t task) {
        copy(task * kEach, std::min(num_tokens, (task + 1) * kEach));
    });
    return 0;
}

// Attention of all spans. head_dim is a multiple of 8; rows of q and out are contiguous per token.
int kv_attention(const float* q, int64_t q_stride, const float* keys, const float* values, float* out,
                 int64_t out_stride, const int32_t* table, int64_t table_stride, const int32_t* rows,
                 const int32_t* kv_lens, const int32_t* q_indptr, const int32_t* positions, int num_spans, int num_heads,
                 int num_kv_heads, int head_dim, float scale) {
    const Attention a{q,        keys,     values,   out,
                      table,    rows,     kv_lens,  q_indptr,
                      positions, q_stride, int64_t(num_kv_heads) * head_dim, out_stride,
                      table_stride, num_spans, num_heads, num_kv_heads, head_dim, scale};
    if (head_dim % 8 != 0 || num_heads % num_kv_heads != 0) return -1;
    std::vector<Task> tasks = tasks_of(a);
    int longest = 0;
    for (const Task& task : tasks) longest = std::max(longest, task.num_chunks);
    const int threads = Pool::instance().num_threads();
    if (threads > 1 && longest > 1 && int(tasks.size()) < 4 * threads) run_split(a, tasks);
    else Pool::instance().run(int64_t(tasks.size()), [&](int64_t i) { run_task(a, tasks[size_t(i)]); });
    return 0;
}
}
