// Products with 4- and 8-bit weights in whole numbers (AVX-512 VNNI).
//
// A weight is scale * q + least with q a small whole number. Activations become whole numbers too, scaled by the largest
// of their 32 features and split into signed bytes, digits to the base of 256. Byte products add up without
// rounding, so of a float product's errors only two are left: one rounding per activation and one per block of 32
// features. A sum in float rounds at every feature.
//
// Three digits, 23 bits with sign, are as exact as float: activations are rounded at 2**-23 of their block's largest.
// Two digits, 16 bits, take two thirds of the time and round at 2**-16, a hundred times finer than bf16.
//
// Three instructions for 64 weights where floats take four and must unpack each weight first. The chain of
// operations of an output element is the same for any number of rows: bitwise equal in any batch.
#pragma once

#include "rows.h"

#if defined(__AVX512VNNI__)

namespace kv {
namespace {

constexpr int kGroups = kBlock / 4;  // four features are multiplied and added by one instruction
constexpr int kRows = 12, kTiles = 2;  // 24 accumulators of 32 vector registers
constexpr int kDirectRows = 4;

// Words of 32 bits per row and block: digits [kDigits][kGroups], scale, sum, then for 8-bit weights what
// takes off their offset, [kDigits].
template <int D>
struct Split {
    static constexpr int kDigits = D;
    static constexpr int kScaleWord = D * kGroups, kSumWord = kScaleWord + 1, kOffsetWord = kSumWord + 1;
    static constexpr int kWords = kOffsetWord + D;
    // Three digits: 2**22, since 15 * 32 * 2**22 is below 2**31. Two: the largest that signed bytes hold.
    static constexpr float kLargest = D == 3 ? 4194304.0f : 32512.0f;
};

// Byte i of lane n is feature 4 * group + i of output n.
struct Q4 {
    static constexpr bool kHasLeast = true;
    struct Block {
        uint16_t scale[kLanes], least[kLanes];  // fp16
        uint32_t q[kGroups / 2][kLanes];        // group 2j in the low half of each byte, 2j + 1 in the high
    };
    static inline __attribute__((always_inline)) void unpack(const Block& block, int pair, __m512i* two) {
        const __m512i both = _mm512_loadu_si512(block.q[pair]);
        const __m512i mask = _mm512_set1_epi8(15);
        two[0] = _mm512_and_si512(both, mask);
        two[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
};

struct Q8 {
    static constexpr bool kHasLeast = false;
    struct Block {
        uint16_t scale[kLanes];       // fp16
        uint32_t q[kGroups][kLanes];  // plus 128: the instruction wants one factor unsigned
    };
    static inline __attribute__((always_inline)) void unpack(const Block& block, int pair, __m512i* two) {
        two[0] = _mm512_loadu_si512(block.q[2 * pair]);
        two[1] = _mm512_loadu_si512(block.q[2 * pair + 1]);
    }
};

// -- activations --------------------------------------------------------------------------------------------

template <int D>
struct Digits {
    uint32_t fours[D][kGroups];  // four signed bytes a word, the highest digit first
    float scale, sum;
};

template <int D>
Digits<D> digits_of(const float* x) {
    constexpr float kLargest = Split<D>::kLargest;
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + kLanes);
    const float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    Digits<D> out{};
    out.scale = max / kLargest;
    // Not finite: the scale carries it into every product. Comparing finds NaN, which a maximum may pass over.
    if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0 || max > 3.4e38f) {
        out.scale = out.sum = NAN;
        return out;
    }
    if (max < 1e-30f) {  // too small to invert; as zeros nothing is lost
        out.scale = 0.0f;
        return out;
    }
    const __m512 inverse = _mm512_set1_ps(kLargest / max);
    const __m512i bias = _mm512_set1_epi32(128), mask = _mm512_set1_epi32(255);
    __m512i rest[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse))};
    out.sum = out.scale * float(_mm512_reduce_add_epi32(_mm512_add_epi32(rest[0], rest[1])));
    for (int digit = D - 1; digit >= 0; digit--)
        for (int half = 0; half < 2; half++) {
            // The low byte as a signed digit: ((rest + 128) mod 256) - 128.
            const __m512i low =
                _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(rest[half], bias), mask), bias);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out.fours[digit] + 4 * half), _mm512_cvtepi32_epi8(low));
            rest[half] = _mm512_srai_epi32(_mm512_sub_epi32(rest[half], low), 8);
        }
    return out;
}

int32_t sum_of_bytes(const uint32_t* fours) {
    int32_t total = 0;
    for (int group = 0; group < kGroups; group++)
        for (int byte = 0; byte < 4; byte++) total += int8_t(fours[group] >> (8 * byte));
    return total;
}

// Rows m0 .. m0 + height - 1 of x as words [block][kWords][height].
template <typename W, typename S>
void pack_rows(const Product& p, int64_t m0, int height, uint32_t* words) {
    for (int64_t b = 0; b < p.k / kBlock; b++, words += S::kWords * height)
        for (int row = 0; row < height; row++) {
            const auto digits = digits_of<S::kDigits>(p.x + (m0 + row) * p.x_stride + b * kBlock);
            uint32_t* to = words + row;
            for (int digit = 0; digit < S::kDigits; digit++) {
                for (int group = 0; group < kGroups; group++)
                    to[(digit * kGroups + group) * height] = digits.fours[digit][group];
                if (W::kHasLeast) continue;
                const int32_t offset = -128 * sum_of_bytes(digits.fours[digit]);
                std::memcpy(to + (S::kOffsetWord + digit) * height, &offset, 4);
            }
            std::memcpy(to + S::kScaleWord * height, &digits.scale, 4);
            std::memcpy(to + S::kSumWord * height, &digits.sum, 4);
        }
}

// -- one block of features ----------------------------------------------------------------------------------

inline __attribute__((always_inline)) __m512i splat_word(uint32_t word) { return _mm512_set1_epi32(int32_t(word)); }
inline __attribute__((always_inline)) __m512 splat_float(uint32_t word) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(word)));
}

// sum += products of four unsigned bytes of w with four signed bytes of digits, in each lane. Assembly, because GCC 12 copies
// the accumulators of the intrinsic to memory and back.
inline __attribute__((always_inline)) void multiply_add(__m512i& sum, __m512i w, __m512i digits) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(digits));
}

// total += scale of the weights * (scale of the row * whole) + least * sum of the row
template <typename W>
inline __attribute__((always_inline)) __m512 add_block(
    __m512 total, __m512 whole, const typename W::Block& block, uint32_t row_scale, uint32_t row_sum) {
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.scale)));
    total = _mm512_fmadd_ps(_mm512_mul_ps(whole, splat_float(row_scale)), scale, total);
    if constexpr (W::kHasLeast) {
        const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.least)));
        total = _mm512_fmadd_ps(splat_float(row_sum), least, total);
    }
    return total;
}

// The digits' sums as one number, the highest first: 4-bit ones fit 32 bits together, 8-bit ones need not.
template <typename W, int D, int MR, int NR>
inline __attribute__((always_inline)) __m512 whole_of(const __m512i (&sums)[D][MR][NR], int m, int n) {
    if constexpr (W::kHasLeast) {
        __m512i whole = sums[0][m][n];
        for (int d = 1; d < D; d++) whole = _mm512_add_epi32(_mm512_slli_epi32(whole, 8), sums[d][m][n]);
        return _mm512_cvtepi32_ps(whole);
    } else {
        __m512 whole = _mm512_cvtepi32_ps(sums[0][m][n]);
        for (int d = 1; d < D; d++)
            whole = _mm512_fmadd_ps(whole, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sums[d][m][n]));
        return whole;
    }
}

// The totals of a tile lie in memory, [MR][NR][16], and the functions below are calls of their own: they need all vector
// registers for sums, and one call in hundreds of instructions costs nothing.

// Few rows: each weight is unpacked once and multiplied with all digits of all rows.
template <typename W, typename S, int MR, int NR>
__attribute__((noinline)) void block_direct(
    const uint32_t* words, const typename W::Block* const* block, float* totals) {
    __m512i sums[S::kDigits][MR][NR];
    for (int d = 0; d < S::kDigits; d++)
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++)
                sums[d][m][n] = W::kHasLeast ? _mm512_setzero_si512() : splat_word(words[(S::kOffsetWord + d) * MR + m]);
#pragma GCC unroll 4
    for (int pair = 0; pair < kGroups / 2; pair++) {
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
            __m512i w[2];
            W::unpack(*block[n], pair, w);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 3
                for (int d = 0; d < S::kDigits; d++)
#pragma GCC unroll 4
                    for (int m = 0; m < MR; m++)
                        multiply_add(sums[d][m][n], w[half], splat_word(words[(d * kGroups + 2 * pair + half) * MR + m]));
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) {
            float* total = totals + (m * NR + n) * kLanes;
            const __m512 whole = whole_of<W>(sums, m, n);
            _mm512_store_ps(total, add_block<W>(_mm512_load_ps(total), whole, *block[n], words[S::kScaleWord * MR + m],
                                                words[S::kSumWord * MR + m]));
        }
}

// sums += one digit's products, [MR][NR]; weights lie unpacked, [group][NR][64 bytes].
template <int MR, int NR>
inline __attribute__((always_inline)) void add_digit(
    const uint32_t* words, const uint8_t* panel, __m512i (&sums)[MR][NR]) {
#pragma GCC unroll 1
    for (int group = 0; group < kGroups; group++, words += MR, panel += NR * 64) {
        __m512i w[NR];
#pragma GCC unroll 2
        for (int n = 0; n < NR; n++) w[n] = _mm512_load_si512(panel + n * 64);
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++) {
            const __m512i digits = splat_word(words[m]);
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) multiply_add(sums[m][n], w[n], digits);
        }
    }
}

// Many rows, 4-bit weights: one digit after the other on the same sums, so that there are registers for more rows.
template <typename S, int MR, int NR>
__attribute__((noinline)) void block_panel(
    const uint32_t* words, const uint8_t* panel, const Q4::Block* const* block, float* totals) {
    __m512i sums[MR][NR];
#pragma GCC unroll 12
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int n = 0; n < NR; n++) sums[m][n] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int d = 0; d < S::kDigits; d++) {
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) sums[m][n] = _mm512_slli_epi32(sums[m][n], 8);
        add_digit<MR, NR>(words + d * kGroups * MR, panel, sums);
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int n = 0; n < NR; n++) {
            float* total = totals + (m * NR + n) * kLanes;
            _mm512_store_ps(total, add_block<Q4>(_mm512_load_ps(total), _mm512_cvtepi32_ps(sums[m][n]), *block[n],
                                                 words[S::kScaleWord * MR + m], words[S::kSumWord * MR + m]));
        }
}

// The same for 8-bit weights: the digits' sums are put together as floats.
template <typename S, int MR, int NR>
__attribute__((noinline)) void block_panel(
    const uint32_t* words, const uint8_t* panel, const Q8::Block* const* block, float* totals) {
    alignas(64) float upper[MR * NR * kLanes];
    for (int d = 0; d < S::kDigits; d++) {
        __m512i sums[MR][NR];
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) sums[m][n] = splat_word(words[(S::kOffsetWord + d) * MR + m]);
        add_digit<MR, NR>(words + d * kGroups * MR, panel, sums);
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) {
                float* at = upper + (m * NR + n) * kLanes;
                __m512 whole = _mm512_cvtepi32_ps(sums[m][n]);
                if (d > 0) whole = _mm512_fmadd_ps(_mm512_load_ps(at), _mm512_set1_ps(256.0f), whole);
                if (d < S::kDigits - 1) {
                    _mm512_store_ps(at, whole);
                } else {
                    float* total = totals + (m * NR + n) * kLanes;
                    _mm512_store_ps(total, add_block<Q8>(_mm512_load_ps(total), whole, *block[n],
                                                         words[S::kScaleWord * MR + m], 0));
                }
            }
    }
}

// -- tiles --------------------------------------------------------------------------------------------------

template <typename W, int NR>
inline void blocks_of(const Product& p, int64_t tile, const typename W::Block* (&first)[NR]) {
    const int64_t num_blocks = p.k / kBlock;
    for (int n = 0; n < NR; n++) {
        const int64_t at = std::min(tile + n, p.num_tiles() - 1);  // past the end: computed and not stored
        first[n] = reinterpret_cast<const typename W::Block*>(p.weights) + at * num_blocks;
    }
}

template <int MR, int NR>
inline void store_tiles(const Product& p, int64_t m0, int64_t tile, const float* totals) {
    for (int n = 0; n < NR; n++) {
        const int width = p.width(tile + n);
        if (width <= 0) return;
        const int64_t column = (tile + n) * kLanes;
        for (int m = 0; m < MR; m++) {
            Floats total = load(totals + (m * NR + n) * kLanes);
            if (p.bias) total += load_some(p.bias + column, width);
            store_some(p.y + (m0 + m) * p.y_stride + column, total, width);
        }
    }
}

template <typename W, typename S, int MR, int NR>
void direct_tiles(const Product& p, const uint32_t* words, int64_t tile) {
    const typename W::Block* block[NR];
    blocks_of<W, NR>(p, tile, block);
    alignas(64) float totals[MR * NR * kLanes] = {};
    for (int64_t b = 0; b < p.k / kBlock; b++) {
        block_direct<W, S, MR, NR>(words + b * S::kWords * MR, block, totals);
        for (int n = 0; n < NR; n++) block[n]++;
    }
    store_tiles<MR, NR>(p, 0, tile, totals);
}

template <typename W, typename S, int MR>
void direct(const Product& p, const uint32_t* words) {
    constexpr int NR = MR <= 2 ? 4 : 2;
    constexpr int kTilesPerTask = 4;
    const int64_t num_tasks = (p.num_tiles() + kTilesPerTask - 1) / kTilesPerTask;
    Pool::instance().run(num_tasks, [&](int64_t task) {
        const int64_t last = std::min(p.num_tiles(), (task + 1) * kTilesPerTask);
        for (int64_t tile = task * kTilesPerTask; tile < last; tile += NR) direct_tiles<W, S, MR, NR>(p, words, tile);
    });
}

template <typename W>
inline void unpack_block(const typename W::Block* const (&block)[kTiles], uint8_t* panel) {
    for (int n = 0; n < kTiles; n++)
        for (int pair = 0; pair < kGroups / 2; pair++) {
            __m512i two[2];
            W::unpack(*block[n], pair, two);
            _mm512_store_si512(panel + ((2 * pair) * kTiles + n) * 64, two[0]);
            _mm512_store_si512(panel + ((2 * pair + 1) * kTiles + n) * 64, two[1]);
        }
}

constexpr int kBlocksPerPart = 10;
constexpr int kPanelBlock = kGroups * kTiles * 64;  // bytes of one block of features

template <typename W, typename S, int MR>
void panel_rows(const Product& p, const uint32_t* words, const uint8_t* panel, int64_t m0, int64_t tile) {
    const typename W::Block* block[kTiles];
    blocks_of<W, kTiles>(p, tile, block);
    alignas(64) float totals[MR * kTiles * kLanes] = {};
    for (int64_t b = 0; b < p.k / kBlock; b++) {
        block_panel<S, MR, kTiles>(words + b * S::kWords * MR, panel + b * kPanelBlock, block, totals);
        for (int n = 0; n < kTiles; n++) block[n]++;
    }
    store_tiles<MR, kTiles>(p, m0, tile, totals);
}

using PanelRows = void (*)(const Product&, const uint32_t*, const uint8_t*, int64_t, int64_t);

template <typename W, typename S, int... MR>
PanelRows panel_rows_of(int rows, std::integer_sequence<int, MR...>) {
    static constexpr PanelRows table[] = {panel_rows<W, S, MR + 1>...};
    return table[rows - 1];
}

template <typename W, typename S>
void panels(const Product& p, const uint32_t* words) {
    const int64_t num_columns = (p.num_tiles() + kTiles - 1) / kTiles;
    const int64_t num_row_blocks = (p.m + kRows - 1) / kRows, num_blocks = p.k / kBlock;
    // Rows in parts whose words stay in a core's cache (120 rows of 1,536 features take 0.7 MB) while column after column
    // passes them. Each part unpacks the weights again, which costs it half a percent.
    const int64_t parts = (num_row_blocks + kBlocksPerPart - 1) / kBlocksPerPart;
    Pool::instance().run(num_columns * parts, [&](int64_t task) {
        static thread_local Scratch scratch;
        uint8_t* panel = static_cast<uint8_t*>(scratch.reserve(size_t(num_blocks * kPanelBlock)));
        const int64_t tile = task % num_columns * kTiles, part = task / num_columns;
        const typename W::Block* block[kTiles];
        blocks_of<W, kTiles>(p, tile, block);
        for (int64_t b = 0; b < num_blocks; b++) {
            unpack_block<W>(block, panel + b * kPanelBlock);
            for (int n = 0; n < kTiles; n++) block[n]++;
        }
        const int64_t first = num_row_blocks * part / parts, last = num_row_blocks * (part + 1) / parts;
        for (int64_t at = first; at < last; at++) {
            const int64_t m0 = at * kRows;
            const int rows = int(std::min<int64_t>(kRows, p.m - m0));
            panel_rows_of<W, S>(rows, std::make_integer_sequence<int, kRows>())(
                p, words + m0 * num_blocks * S::kWords, panel, m0, tile);
        }
    });
}

template <typename W, typename S>
void multiply_as(const Product& p) {
    static thread_local Scratch scratch;
    const int64_t num_blocks = p.k / kBlock;
    uint32_t* words = static_cast<uint32_t*>(scratch.reserve(size_t(p.m * num_blocks * S::kWords) * 4));
    const int64_t height = p.m <= kDirectRows ? p.m : kRows, count = (p.m + height - 1) / height;
    const auto pack = [&](int64_t at) {
        const int64_t m0 = at * height;
        pack_rows<W, S>(p, m0, int(std::min(height, p.m - m0)), words + m0 * num_blocks * S::kWords);
    };
    Pool::instance().run(count, pack);
    switch (p.m) {
        case 1: return direct<W, S, 1>(p, words);
        case 2: return direct<W, S, 2>(p, words);
        case 3: return direct<W, S, 3>(p, words);
        case 4: return direct<W, S, 4>(p, words);
        default: return panels<W, S>(p, words);
    }
}

template <int D>
void multiply_split(int format, const Product& p) {
    if (format == kQ4_1) multiply_as<Q4, Split<D>>(p);
    else multiply_as<Q8, Split<D>>(p);
}

}  // namespace
}  // namespace kv

#endif
