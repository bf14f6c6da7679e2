// Products with 4- and 8-bit weights in whole numbers (AVX-512 VNNI), as exact as float.
//
// A weight is scale * q + least with q a small whole number. Activations become whole numbers too: 23 bits with
// sign, scaled by the largest of their 32 features, split into three signed bytes (digits to the base of 256). Byte
// products of all three digits add up without rounding, so of a float product's errors only two are left: one
// rounding per activation, at 2**-23 of the block's largest, and one per block of 32 features. The sum in
// float rounds at every feature.
//
// Three multiply instructions for 64 weights where floats take four for 64 and must unpack each weight first.
// The chain of operations of an output element is the same for any number of rows: bitwise equal in any batch.
#include "rows.h"

#if defined(__AVX512VNNI__)

namespace kv {
namespace {

constexpr int kDigits = 3;
constexpr int kGroups = kBlock / 4;  // four features are multiplied and added by one instruction
constexpr int kRows = 12, kTiles = 2;  // 24 accumulators of 32 vector registers
constexpr int kDirectRows = 4;
constexpr float kLargest = 4194304.0f;  // 2**22: 15 * 32 * 2**22 is below 2**31

// Words of 32 bits per row and block: digits [kDigits][kGroups], scale, sum, then for 8-bit weights what
// takes off their offset, [kDigits].
constexpr int kWords = kDigits * kGroups + 2 + kDigits;
constexpr int kScaleWord = kDigits * kGroups, kSumWord = kScaleWord + 1, kOffsetWord = kSumWord + 1;

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

struct Digits {
    uint32_t fours[kDigits][kGroups];  // four signed bytes a word, the highest digit first
    float scale, sum;
};

Digits digits_of(const float* x) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + kLanes);
    const float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    Digits out{};
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
    for (int digit = kDigits - 1; digit >= 0; digit--)
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
template <typename W>
void pack_rows(const Product& p, int64_t m0, int height, uint32_t* words) {
    for (int64_t b = 0; b < p.k / kBlock; b++, words += kWords * height)
        for (int row = 0; row < height; row++) {
            const Digits digits = digits_of(p.x + (m0 + row) * p.x_stride + b * kBlock);
            uint32_t* to = words + row;
            for (int digit = 0; digit < kDigits; digit++) {
                for (int group = 0; group < kGroups; group++)
                    to[(digit * kGroups + group) * height] = digits.fours[digit][group];
                if (W::kHasLeast) continue;
                const int32_t offset = -128 * sum_of_bytes(digits.fours[digit]);
                std::memcpy(to + (kOffsetWord + digit) * height, &offset, 4);
            }
            std::memcpy(to + kScaleWord * height, &digits.scale, 4);
            std::memcpy(to + kSumWord * height, &digits.sum, 4);
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

// 4-bit sums of all digits fit 32 bits together; 8-bit ones do not and are put together as floats.
template <typename W>
inline __attribute__((always_inline)) __m512 whole_of(__m512i high, __m512i middle, __m512i low) {
    if constexpr (W::kHasLeast) {
        const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(high, 8), middle);
        return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), low));
    } else {
        const __m512 base = _mm512_set1_ps(256.0f);
        const __m512 upper = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), base, _mm512_cvtepi32_ps(middle));
        return _mm512_fmadd_ps(upper, base, _mm512_cvtepi32_ps(low));
    }
}

// The totals of a tile lie in memory, [MR][NR][16], and the functions below are calls of their own: they need all vector
// registers for sums, and one call in hundreds of instructions costs nothing.

// Few rows: each weight is unpacked once and multiplied with all digits of all rows.
template <typename W, int MR, int NR>
__attribute__((noinline)) void block_direct(
    const uint32_t* words, const typename W::Block* const* block, float* totals) {
    __m512i sums[kDigits][MR][NR];
    for (int d = 0; d < kDigits; d++)
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++)
                sums[d][m][n] = W::kHasLeast ? _mm512_setzero_si512() : splat_word(words[(kOffsetWord + d) * MR + m]);
#pragma GCC unroll 4
    for (int pair = 0; pair < kGroups / 2; pair++) {
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
            __m512i w[2];
            W::unpack(*block[n], pair, w);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 3
                for (int d = 0; d < kDigits; d++)
#pragma GCC unroll 4
                    for (int m = 0; m < MR; m++)
                        multiply_add(sums[d][m][n], w[half], splat_word(words[(d * kGroups + 2 * pair + half) * MR + m]));
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) {
            float* total = totals + (m * NR + n) * kLanes;
            const __m512 whole = whole_of<W>(sums[0][m][n], sums[1][m][n], sums[2][m][n]);
            _mm512_store_ps(total, add_block<W>(_mm512_load_ps(total), whole, *block[n], words[kScaleWord * MR + m],
                                                words[kSumWord * MR + m]));
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
template <int MR, int NR>
__attribute__((noinline)) void block_panel(
    const uint32_t* words, const uint8_t* panel, const Q4::Block* const* block, float* totals) {
    __m512i sums[MR][NR];
#pragma GCC unroll 12
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int n = 0; n < NR; n++) sums[m][n] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int d = 0; d < kDigits; d++) {
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
                                                 words[kScaleWord * MR + m], words[kSumWord * MR + m]));
        }
}

// The same for 8-bit weights: the digits' sums are put together as floats.
template <int MR, int NR>
__attribute__((noinline)) void block_panel(
    const uint32_t* words, const uint8_t* panel, const Q8::Block* const* block, float* totals) {
    alignas(64) float upper[MR * NR * kLanes];
    for (int d = 0; d < kDigits; d++) {
        __m512i sums[MR][NR];
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) sums[m][n] = splat_word(words[(kOffsetWord + d) * MR + m]);
        add_digit<MR, NR>(words + d * kGroups * MR, panel, sums);
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int n = 0; n < NR; n++) {
                float* at = upper + (m * NR + n) * kLanes;
                __m512 whole = _mm512_cvtepi32_ps(sums[m][n]);
                if (d > 0) whole = _mm512_fmadd_ps(_mm512_load_ps(at), _mm512_set1_ps(256.0f), whole);
                if (d < kDigits - 1) {
                    _mm512_store_ps(at, whole);
                } else {
                    float* total = totals + (m * NR + n) * kLanes;
                    _mm512_store_ps(total, add_block<Q8>(_mm512_load_ps(total), whole, *block[n],
                                                         words[kScaleWord * MR + m], 0));
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

template <typename W, int MR, int NR>
void direct_tiles(const Product& p, const uint32_t* words, int64_t tile) {
    const typename W::Block* block[NR];
    blocks_of<W, NR>(p, tile, block);
    alignas(64) float totals[MR * NR * kLanes] = {};
    for (int64_t b = 0; b < p.k / kBlock; b++) {
        block_direct<W, MR, NR>(words + b * kWords * MR, block, totals);
        for (int n = 0; n < NR; n++) block[n]++;
    }
    store_tiles<MR, NR>(p, 0, tile, totals);
}

template <typename W, int MR>
void direct(const Product& p, const uint32_t* words) {
    constexpr int NR = MR <= 2 ? 4 : 2;
    constexpr int kTilesPerTask = 4;
    const int64_t num_tasks = (p.num_tiles() + kTilesPerTask - 1) / kTilesPerTask;
    Pool::instance().run(num_tasks, [&](int64_t task) {
        const int64_t last = std::min(p.num_tiles(), (task + 1) * kTilesPerTask);
        for (int64_t tile = task * kTilesPerTask; tile < last; tile += NR) direct_tiles<W, MR, NR>(p, words, tile);
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

template <typename W, int MR>
void panel_rows(const Product& p, const uint32_t* words, const uint8_t* panel, int64_t m0, int64_t tile) {
    const typename W::Block* block[kTiles];
    blocks_of<W, kTiles>(p, tile, block);
    alignas(64) float totals[MR * kTiles * kLanes] = {};
    for (int64_t b = 0; b < p.k / kBlock; b++) {
        block_panel<MR, kTiles>(words + b * kWords * MR, panel + b * kPanelBlock, block, totals);
        for (int n = 0; n < kTiles; n++) block[n]++;
    }
    store_tiles<MR, kTiles>(p, m0, tile, totals);
}

using PanelRows = void (*)(const Product&, const uint32_t*, const uint8_t*, int64_t, int64_t);

template <typename W, int... MR>
PanelRows panel_rows_of(int rows, std::integer_sequence<int, MR...>) {
    static constexpr PanelRows table[] = {panel_rows<W, MR + 1>...};
    return table[rows - 1];
}

template <typename W>
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
            panel_rows_of<W>(rows, std::make_integer_sequence<int, kRows>())(
                p, words + m0 * num_blocks * kWords, panel, m0, tile);
        }
    });
}

template <typename W>
void multiply_as(const Product& p) {
    static thread_local Scratch scratch;
    const int64_t num_blocks = p.k / kBlock;
    uint32_t* words = static_cast<uint32_t*>(scratch.reserve(size_t(p.m * num_blocks * kWords) * 4));
    const int64_t height = p.m <= kDirectRows ? p.m : kRows, count = (p.m + height - 1) / height;
    const auto pack = [&](int64_t at) {
        const int64_t m0 = at * height;
        pack_rows<W>(p, m0, int(std::min(height, p.m - m0)), words + m0 * num_blocks * kWords);
    };
    Pool::instance().run(count, pack);
    switch (p.m) {
        case 1: return direct<W, 1>(p, words);
        case 2: return direct<W, 2>(p, words);
        case 3: return direct<W, 3>(p, words);
        case 4: return direct<W, 4>(p, words);
        default: return panels<W>(p, words);
    }
}

}  // namespace

bool multiplies_integers() { return true; }

int64_t integer_tile_bytes(int format, int64_t k) {
    return k / kBlock * int64_t(format == kQ4_1 ? sizeof(Q4::Block) : sizeof(Q8::Block));
}

void pack_integer_row(int format, const uint8_t* row, int64_t k, int64_t index, uint8_t* packed) {
    const int64_t lane = index % kLanes, num_blocks = k / kBlock;
    uint8_t* tile = packed + index / kLanes * integer_tile_bytes(format, k);
    for (int64_t b = 0; b < num_blocks; b++) {
        if (format == kQ4_1) {
            Q4::Block& to = reinterpret_cast<Q4::Block*>(tile)[b];
            const uint8_t* from = row + b * 20;  // scale, least, 16 bytes
            to.scale[lane] = read_half(from);
            to.least[lane] = read_half(from + 2);
            for (int at = 0; at < kBlock; at++) {  // byte j holds features j (low half) and j + 16 (high half)
                const uint32_t q = at < 16 ? from[4 + at] & 15u : from[4 + at - 16] >> 4;
                to.q[at / 8][lane] |= q << (8 * (at % 4) + 4 * (at / 4 % 2));
            }
        } else {
            Q8::Block& to = reinterpret_cast<Q8::Block*>(tile)[b];
            const uint8_t* from = row + b * 34;  // scale, 32 bytes
            to.scale[lane] = read_half(from);
            for (int at = 0; at < kBlock; at++)
                to.q[at / 4][lane] |= uint32_t(uint8_t(from[2 + at] + 128)) << (8 * (at % 4));
        }
    }
}

void multiply_integers(int format, const Product& p) {
    if (format == kQ4_1) multiply_as<Q4>(p);
    else multiply_as<Q8>(p);
}

}  // namespace kv

#else

namespace kv {

bool multiplies_integers() { return false; }
int64_t integer_tile_bytes(int, int64_t) { return -1; }
void pack_integer_row(int, const uint8_t*, int64_t, int64_t, uint8_t*) {}
void multiply_integers(int, const Product&) {}

}  // namespace kv

#endif
