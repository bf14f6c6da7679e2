// Sixteen floats at a time, on any processor: GCC and Clang lower these vectors to AVX-512, AVX2 or less.
//
// Only what their vector extensions cannot say is written with intrinsics, with a plain twin beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace kv {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t LooseBits __attribute__((vector_size(64), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

static inline Floats load(const float* p) { return *reinterpret_cast<const LooseFloats*>(p); }
static inline void store(float* p, Floats x) { *reinterpret_cast<LooseFloats*>(p) = x; }
static inline Bits load_bits(const uint32_t* p) { return *reinterpret_cast<const LooseBits*>(p); }
static inline Floats splat(float x) { return x - Floats{}; }  // x - 0, unlike x + 0, is x for every x
static inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
static inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }  // toward zero
static inline Ints as_ints(Floats x) { return (Ints)x; }  // the same bits
static inline Floats as_floats(Ints x) { return (Floats)x; }
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    uint32_t exponent = (half >> 10) & 31, fraction = half & 1023;
    float value;
    uint32_t bits;
    if (exponent == 0) {  // zero or subnormal: fraction * 2**-24
        value = float(fraction) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    } else {
        bits = sign | (fraction << 13) | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23);
    }
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline Floats load_halves(const uint16_t* p) {  // fp16
#if defined(__AVX512F__)
    return Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    float out[kLanes];
    for (int i = 0; i < kLanes; i++) out[i] = half_to_float(p[i]);
    return load(out);
#endif
}

static inline Floats load_brains(const uint16_t* p) {  // bf16: the upper half of a float
    const Halves raw = *reinterpret_cast<const Halves*>(p);
    return as_floats(Ints(__builtin_convertvector(raw, Bits) << 16));
}

static inline Floats load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw)));
#else
    return to_floats(__builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Ints));
#endif
}

// The lowest four bits of each lane as a float; what stands above them is ignored.
static inline Floats nibble_to_float(Bits x) {
#if defined(__AVX512F__)
    // One table look-up where masking and converting would be two.
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return Floats(_mm512_permutexvar_ps(__m512i(x), table));
#else
    return to_floats(Ints(x & 15u));
#endif
}

// to[e][i] = from[i][d + e] for 16 rows of 16 floats.
static inline void transpose(const float* const* from, int d, float* to) {
#if defined(__AVX512F__)
    // Four rounds of pairwise interleaving: floats, pairs, quarters, halves.
    __m512 a[kLanes], b[kLanes];
    for (int i = 0; i < kLanes; i++) a[i] = _mm512_loadu_ps(from[i] + d);
    for (int i = 0; i < kLanes; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    const auto low = [](__m512 x, __m512 y) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    };
    const auto high = [](__m512 x, __m512 y) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    };
    for (int i = 0; i < kLanes; i += 4) {
        a[i] = low(b[i], b[i + 2]);
        a[i + 1] = high(b[i], b[i + 2]);
        a[i + 2] = low(b[i + 1], b[i + 3]);
        a[i + 3] = high(b[i + 1], b[i + 3]);
    }
    // a[4g + e] holds element e + 4 * quarter of rows 4g .. 4g + 3 in each quarter.
    for (int e = 0; e < 4; e++) {
        const __m512 even_a = _mm512_shuffle_f32x4(a[e], a[4 + e], 0x88);
        const __m512 odd_a = _mm512_shuffle_f32x4(a[e], a[4 + e], 0xdd);
        const __m512 even_b = _mm512_shuffle_f32x4(a[8 + e], a[12 + e], 0x88);
        const __m512 odd_b = _mm512_shuffle_f32x4(a[8 + e], a[12 + e], 0xdd);
        _mm512_storeu_ps(to + e * kLanes, _mm512_shuffle_f32x4(even_a, even_b, 0x88));
        _mm512_storeu_ps(to + (8 + e) * kLanes, _mm512_shuffle_f32x4(even_a, even_b, 0xdd));
        _mm512_storeu_ps(to + (4 + e) * kLanes, _mm512_shuffle_f32x4(odd_a, odd_b, 0x88));
        _mm512_storeu_ps(to + (12 + e) * kLanes, _mm512_shuffle_f32x4(odd_a, odd_b, 0xdd));
    }
#else
    for (int e = 0; e < kLanes; e++)
        for (int i = 0; i < kLanes; i++) to[e * kLanes + i] = from[i][d + e];
#endif
}

static inline float sum_of_lanes(Floats x) {
    // Always the same tree, so that a sum does not depend on who asks.
    float lanes[kLanes];
    store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

static inline float largest_lane(Floats x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

// e**x within 2 units in the last place for x <= 88; 0 below -87.3, NaN stays NaN.
static inline Floats exp(Floats x) {
    const Floats low = splat(-87.33654f);
    const Floats clamped = x < low ? low : x;
    // n = round(x / ln 2) by adding and taking off 1.5 * 2**23.
    const Floats magic = splat(12582912.0f);
    const Floats n = (clamped * 1.44269504088896341f + magic) - magic;
    const Floats r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Floats scale = as_floats((to_ints(n) + 127) << 23);
    const Floats value = p * scale;
    return x < low ? Floats{} : value;
}

}  // namespace kv
