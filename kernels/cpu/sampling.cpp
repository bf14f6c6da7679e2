// The draw of one token per row: filters over few candidates, noise as kernels/noise.py defines it; penalties.
//
// Rows are independent. A token's noise is the same whatever is filtered out.
#include <algorithm>
#include <cmath>
#include <vector>

#include "operations.h"

namespace kv {
namespace {

struct Key {
    uint32_t seed_low, seed_high, choice, position;
};

struct Words {
    Bits of[4];
};

// The products of 16 lanes with one factor, as upper and lower halves.
inline void multiply_wide(Bits x, uint32_t factor, Bits* high, Bits* low) {
#if defined(__AVX512F__)
    const __m512i v = __m512i(x), f = _mm512_set1_epi64(factor);
    const __m512i even = _mm512_mul_epu32(v, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), f);
    *low = Bits(_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_ENUM(0xa0)));
    *high = Bits(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
#else
    for (int i = 0; i < kLanes; i++) {
        const uint64_t product = uint64_t(x[i]) * factor;
        (*high)[i] = uint32_t(product >> 32);
        (*low)[i] = uint32_t(product);
    }
#endif
}

// Philox-4x32, ten rounds, on 16 counters.
inline Words philox(Bits counter, const Key& key) {
    Bits c0 = counter, c1 = Bits{} + key.position, c2 = Bits{} + key.choice, c3 = Bits{};
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; round++) {
        Bits high0, low0, high1, low1;
        multiply_wide(c0, 0xD2511F53u, &high0, &low0);
        multiply_wide(c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Natural logarithm of positive finite numbers, within 2 units in the last place.
inline Floats log(Floats x) {
    const Ints bits = as_ints(x);
    // Mantissa in [sqrt(1/2), sqrt(2)).
    Ints exponent = (bits >> 23) - 126;
    Floats m = as_floats((bits & 0x007fffff) | 0x3f000000);
    const Ints is_small = m < splat(0.707106781186547524f);
    exponent += is_small;  // minus one where true
    m = is_small ? m + m - 1.0f : m - 1.0f;
    const Floats e = to_floats(exponent), z = m * m;
    Floats p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * z;
    p = p + e * -2.12194440e-4f - z * 0.5f;
    return m + p + e * 0.693359375f;
}

// log of exponential noise: log(-log1p(-v)), v = min((word + 0.5) * 2**-32, 1 - 2**-24).
inline Floats log_noise(Bits words) {
    // Unsigned to float with one rounding, as a single conversion would: AVX2 has none.
#if defined(__AVX512F__)
    const Floats value = Floats(_mm512_cvtepu32_ps(__m512i(words)));
#else
    Floats value;
    for (int i = 0; i < kLanes; i++) value[i] = float(words[i]);
#endif
    const Floats scaled = (value + 0.5f) * 2.3283064365386963e-10f;
    const Floats most = splat(0.999999940395355224609375f);
    const Floats v = scaled < most ? scaled : most;
    // log1p(-v) = log(u) * v / (1 - u) with u = 1 - v rounded: the quotient mends what the rounding took.
    const Floats u = 1.0f - v;
    const Floats taken = 1.0f - u;
    const Floats noise = taken > 0.0f ? -log(u) * v / taken : v;
    return log(noise);
}

inline Bits lanes() { return Bits{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

struct Candidate {
    float score;  // logit / temperature
    int32_t id;
};

// Best of `score - log noise` over tokens in any order; equals go to the lower id.
struct Best {
    float value = -INFINITY;
    int32_t id = -1;

    void offer(float candidate, int32_t token) {
        if (candidate > value || (candidate == value && token < id)) {
            value = candidate;
            id = token;
        }
    }
};

// All tokens: counter c serves tokens 4c .. 4c + 3, so 16 counters serve 64 tokens.
int32_t draw_any(const float* logits, int64_t vocab_size, float temperature, const Key& key) {
    Best best;
    for (int64_t first = 0; first < vocab_size; first += 4 * kLanes) {
        const Words words = philox(lanes() + uint32_t(first / 4), key);
        float log_noises[4][kLanes];
        for (int w = 0; w < 4; w++) store(log_noises[w], log_noise(words.of[w]));
        const int64_t count = std::min<int64_t>(4 * kLanes, vocab_size - first);
        for (int64_t i = 0; i < count; i++) {
            const float value = logits[first + i] / temperature - log_noises[i % 4][i / 4];
            if (value > best.value) best.offer(value, int32_t(first + i));
        }
    }
    return best.id;
}

int32_t draw_one_of(const std::vector<Candidate>& kept, const Key& key) {
    Best best;
    for (size_t first = 0; first < kept.size(); first += kLanes) {
        const size_t count = std::min<size_t>(kLanes, kept.size() - first);
        Bits counters{}, words_of{};
        for (size_t i = 0; i < count; i++) {
            counters[i] = uint32_t(kept[first + i].id) / 4;
            words_of[i] = uint32_t(kept[first + i].id) % 4;
        }
        const Words words = philox(counters, key);
        Bits chosen = words.of[0];
        for (uint32_t w = 1; w < 4; w++) chosen = words_of == w ? words.of[w] : chosen;
        const Floats noises = log_noise(chosen);
        for (size_t i = 0; i < count; i++) best.offer(kept[first + i].score - noises[i], kept[first + i].id);
    }
    return best.id;
}

// Tokens whose score is at least `least`.
void collect(const float* logits, int64_t vocab_size, float temperature, float least, std::vector<Candidate>* found) {
    found->clear();
    int64_t i = 0;
    for (; i + kLanes <= vocab_size; i += kLanes) {
        const Floats scores = load(logits + i) / splat(temperature);
        const Ints is_kept = scores >= splat(least);
        bool any = false;
#if defined(__AVX512F__)
        any = _mm512_movepi32_mask(__m512i(is_kept)) != 0;
#else
        for (int lane = 0; lane < kLanes; lane++) any |= is_kept[lane] != 0;
#endif
        if (!any) continue;
        for (int lane = 0; lane < kLanes; lane++)
            if (is_kept[lane]) found->push_back({scores[lane], int32_t(i + lane)});
    }
    for (; i < vocab_size; i++)
        if (logits[i] / temperature >= least) found->push_back({logits[i] / temperature, int32_t(i)});
}

// Sum of e**(score - highest) over all tokens.
double mass_of_all(const float* logits, int64_t vocab_size, float temperature, float highest) {
    Floats sum{};
    int64_t i = 0;
    for (; i + kLanes <= vocab_size; i += kLanes) sum += exp(load(logits + i) / splat(temperature) - splat(highest));
    double total = sum_of_lanes(sum);
    for (; i < vocab_size; i++) total += std::exp(double(logits[i] / temperature - highest));
    return total;
}

struct Filters {
    int64_t top_k;  // 0: off
    double top_p;   // 1 or more: off
    float min_p;    // 0: off
};

// Whether the candidates hold all that the filters keep. Asked before sorting, which costs more than finding more.
bool suffices(const Filters& f, float highest, double mass, const std::vector<Candidate>& found) {
    if (f.top_k > 0) return found.size() >= size_t(f.top_k);
    if (f.top_p >= 1.0) return true;
    double sum = 0.0;
    for (const Candidate& one : found) sum += std::exp(one.score - highest);
    return sum >= f.top_p * mass * 1.000001;  // floats: not sure is no
}

// Sorts candidates, best first, and drops what the filters take.
void settle(const Filters& f, float highest, double mass, std::vector<Candidate>* found) {
    std::sort(found->begin(), found->end(), [](const Candidate& a, const Candidate& b) {
        return a.score > b.score || (a.score == b.score && a.id < b.id);
    });
    const auto past_equals = [&](size_t at) {  // the first place after `at` whose score differs
        while (at + 1 < found->size() && (*found)[at + 1].score == (*found)[at].score) at++;
        return at + 1;
    };
    size_t end = found->size();
    if (f.top_k > 0) {
        end = std::min(end, past_equals(std::min(size_t(f.top_k), found->size()) - 1));
        mass = 0.0;
        for (size_t i = 0; i < end; i++) mass += std::exp(double((*found)[i].score - highest));
    }
    if (f.top_p < 1.0) {
        double before = 0.0;
        size_t at = 0;
        for (; at < end && (at == 0 || before < f.top_p * mass); at++)
            before += std::exp(double((*found)[at].score - highest));
        end = std::min(end, past_equals(at - 1));
    }
    if (f.min_p > 0.0f) {
        const float least = highest + std::log(f.min_p);
        while (end > 1 && (*found)[end - 1].score < least) end--;
    }
    found->resize(end);
}

int32_t draw_filtered(const float* logits, int64_t vocab_size, float temperature, float highest, const Filters& f,
                      const Key& key) {
    static thread_local std::vector<Candidate> found;
    const double mass = f.top_p < 1.0 && f.top_k == 0 ? mass_of_all(logits, vocab_size, temperature, highest) : 0.0;
    // Few tokens lie within a factor e**-depth of the best. Equal scores are never split: all at or above the line.
    const bool only_min_p = f.top_k == 0 && f.top_p >= 1.0;
    for (float depth = only_min_p ? -std::log(f.min_p) : 3.0f;; depth *= 1.5f) {
        const bool is_all = depth > 256.0f;
        collect(logits, vocab_size, temperature, is_all ? -INFINITY : highest - depth, &found);
        if (!is_all && !suffices(f, highest, mass, found)) continue;
        settle(f, highest, mass, &found);
        return draw_one_of(found, key);
    }
}

}  // namespace
}  // namespace kv

using namespace kv;

extern "C" {

// One token per row of logits [num_rows][vocab_size]; best is the highest logit of each row, finite or the row is left
// alone. Columns have one entry per row.
void kv_draw(const float* logits, int64_t stride, int64_t num_rows, int64_t vocab_size, const float* best,
             const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
             const int64_t* seed_low, const int64_t* seed_high, const int64_t* choice, const int32_t* position,
             int64_t* ids) {
    Pool::instance().run(num_rows, [&](int64_t row) {
        if (!std::isfinite(best[row])) return;
        const float* from = logits + row * stride;
        const Key key{uint32_t(seed_low[row]), uint32_t(seed_high[row]), uint32_t(choice[row]), uint32_t(position[row])};
        const Filters filters{top_k[row] >= vocab_size ? 0 : top_k[row], double(top_p[row]), min_p[row]};
        if (filters.top_k == 0 && filters.top_p >= 1.0 && filters.min_p <= 0.0f)
            ids[row] = draw_any(from, vocab_size, temperature[row], key);
        else
            ids[row] = draw_filtered(from, vocab_size, temperature[row], best[row] / temperature[row], filters, key);
    });
}

// Penalties in place. counts and in_prompt are tables of lines; lines[row] says which one.
void kv_penalise(float* logits, int64_t stride, int64_t num_rows, int64_t vocab_size, const int32_t* counts,
                 const uint8_t* in_prompt, const int64_t* lines, const float* repetition, const float* frequency,
                 const float* presence) {
    Pool::instance().run(num_rows, [&](int64_t row) {
        float* at = logits + row * stride;
        const int32_t* count = counts + lines[row] * vocab_size;
        const uint8_t* prompt = in_prompt + lines[row] * vocab_size;
        for (int64_t i = 0; i < vocab_size; i++) {
            const bool is_output = count[i] > 0;
            float x = at[i];
            if (is_output || prompt[i]) x = x > 0.0f ? x / repetition[row] : x * repetition[row];
            x -= frequency[row] * float(count[i]);
            at[i] = is_output ? x - presence[row] : x;
        }
    });
}

// Takes away what a mask does not allow, in place: bit t of words[i] is token t of row rows[i].
void kv_mask(float* logits, int64_t stride, int64_t vocab_size, int64_t num_masks, const int64_t* rows,
             const uint32_t* words, int64_t num_words) {
    Pool::instance().run(num_masks, [&](int64_t i) {
        float* at = logits + rows[i] * stride;
        const uint32_t* mask = words + i * num_words;
        for (int64_t first = 0; first < vocab_size; first += 32) {
            const uint32_t bits = mask[first / 32];
            const int64_t count = std::min<int64_t>(32, vocab_size - first);
            if (bits == ~0u) continue;
            for (int64_t t = 0; t < count; t++)
                if (!(bits >> t & 1)) at[first + t] = -INFINITY;
        }
    });
}
}
