// Products with weights as the file stores them: y = x W^T + bias, accumulated in float.
//
// Weights are packed in tiles of 16 output features (one vector), in the order they are read. Quantised weights
// become floats in registers, exactly the floats that the format means, and are multiplied with float activations:
// the bytes read are the file's, the arithmetic is that of the dense matrix.
//
// Every output element is the same chain of operations whatever the number of rows of x: sums over kChunk
// features in order, added up in order. So a token's result does not depend on its batch, bit for bit.
#include "rows.h"

namespace kv {
namespace {

constexpr int kChunk = 128;  // features summed before their sum is added to the total
constexpr int kDirectRows = 4;  // up to here weights are unpacked on the fly for all rows at once
#if defined(__AVX512F__)
constexpr int kRows = 12, kTiles = 2;  // 24 accumulators of 32 vector registers
#else
constexpr int kRows = 6, kTiles = 1;
#endif

// Each format: bytes of a tile, and `each`, which calls visit(k, weights of NR tiles) for features k0 .. k0 + count - 1.

template <typename Element, Floats (*kLoad)(const Element*)>
struct Dense {
    static int64_t tile_bytes(int64_t k) { return k * kLanes * int64_t(sizeof(Element)); }

    template <int NR, typename Visit>
    static inline __attribute__((always_inline)) void each(
        const uint8_t* const* tiles, int64_t k0, int count, const Visit& visit) {
        for (int k = 0; k < count; k++) {
            Floats w[NR];
            for (int n = 0; n < NR; n++)
                w[n] = kLoad(reinterpret_cast<const Element*>(tiles[n]) + (k0 + k) * kLanes);
            visit(k, w);
        }
    }
};

using F32 = Dense<float, load>;
using F16 = Dense<uint16_t, load_halves>;
using BF16 = Dense<uint16_t, load_brains>;

#if !defined(__AVX512VNNI__)  // else integer_products.h has these formats; they take seconds to compile
struct Q8Block {
    uint16_t scale[kLanes];  // fp16
    int8_t q[kBlock][kLanes];
};

struct Q4Block {
    uint16_t scale[kLanes];           // fp16
    uint16_t least[kLanes];           // fp16: what is added
    uint32_t q[kBlock / 8][kLanes];   // eight features a lane, the first in the lowest bits
};

struct Q8_0 {
    static int64_t tile_bytes(int64_t k) { return k / kBlock * int64_t(sizeof(Q8Block)); }

    template <int NR, typename Visit>
    static inline __attribute__((always_inline)) void each(
        const uint8_t* const* tiles, int64_t k0, int count, const Visit& visit) {
        for (int at = 0; at < count; at += kBlock) {
            const Q8Block* block[NR];
            Floats scale[NR];
            for (int n = 0; n < NR; n++) {
                block[n] = reinterpret_cast<const Q8Block*>(tiles[n]) + (k0 + at) / kBlock;
                scale[n] = load_halves(block[n]->scale);
            }
#pragma GCC unroll 8
            for (int k = 0; k < kBlock; k++) {
                Floats w[NR];
                for (int n = 0; n < NR; n++) w[n] = load_bytes(block[n]->q[k]) * scale[n];
                visit(at + k, w);
            }
        }
    }
};

struct Q4_1 {
    static int64_t tile_bytes(int64_t k) { return k / kBlock * int64_t(sizeof(Q4Block)); }

    template <int NR, typename Visit>
    static inline __attribute__((always_inline)) void each(
        const uint8_t* const* tiles, int64_t k0, int count, const Visit& visit) {
        for (int at = 0; at < count; at += kBlock) {
            const Q4Block* block[NR];
            Floats scale[NR], least[NR];
            for (int n = 0; n < NR; n++) {
                block[n] = reinterpret_cast<const Q4Block*>(tiles[n]) + (k0 + at) / kBlock;
                scale[n] = load_halves(block[n]->scale);
                least[n] = load_halves(block[n]->least);
            }
#pragma GCC unroll 1
            for (int eight = 0; eight < kBlock / 8; eight++) {
                Bits q[NR];
                for (int n = 0; n < NR; n++) q[n] = load_bits(block[n]->q[eight]);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    Floats w[NR];
                    // scale * q is exact in float (11 + 4 bits), so fused or not makes no difference.
                    for (int n = 0; n < NR; n++) w[n] = nibble_to_float(q[n] >> (4 * i)) * scale[n] + least[n];
                    visit(at + eight * 8 + i, w);
                }
            }
        }
    }
};

#endif

// sums[MR][NR] = products of one chunk. a: [count][MR].
template <typename W, int MR, int NR>
inline __attribute__((always_inline)) void multiply(
    const float* a, const uint8_t* const* tiles, int64_t k0, int count, Floats (&sums)[MR][NR]) {
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) sums[m][n] = Floats{};
    W::template each<NR>(tiles, k0, count, [&](int k, const Floats* w) __attribute__((always_inline)) {
        const float* ak = a + k * MR;
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++) {
            const Floats am = splat(ak[m]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; n++) sums[m][n] += am * w[n];
        }
    });
}

// Adds a chunk's sums to y, or starts y with them; the bias comes last.
template <int MR, int NR>
inline __attribute__((always_inline)) void add_to(
    const Product& p, int64_t m0, int64_t tile, bool is_first, bool is_last, const Floats (&sums)[MR][NR]) {
    for (int n = 0; n < NR; n++) {
        const int64_t column = (tile + n) * kLanes;
        const int width = p.width(tile + n);
        if (width <= 0) return;
        for (int m = 0; m < MR; m++) {
            float* y = p.y + (m0 + m) * p.y_stride + column;
            Floats total = sums[m][n];
            if (!is_first) total = load_some(y, width) + total;
            if (is_last && p.bias) total += load_some(p.bias + column, width);
            store_some(y, total, width);
        }
    }
}

// All rows of x at once, weights unpacked in registers: for few rows.
template <typename W, int NR>
inline void tiles_of(const Product& p, int64_t tile, const uint8_t* (&tiles)[NR]) {
    for (int n = 0; n < NR; n++)  // past the end: computed and not stored
        tiles[n] = p.weights + std::min(tile + n, p.num_tiles() - 1) * W::tile_bytes(p.k);
}

template <typename W, int MR, int NR>
void direct_tiles(const Product& p, const float* packed, int64_t tile) {
    const uint8_t* tiles[NR];
    tiles_of<W>(p, tile, tiles);
    for (int64_t k0 = 0; k0 < p.k; k0 += kChunk) {
        const int count = int(std::min<int64_t>(kChunk, p.k - k0));
        Floats sums[MR][NR];
        multiply<W, MR, NR>(packed + k0 * MR, tiles, k0, count, sums);
        add_to<MR, NR>(p, 0, tile, k0 == 0, k0 + count == p.k, sums);
    }
}

template <typename W, int MR>
void direct(const Product& p, const float* packed) {
    constexpr int NR = MR <= 2 ? 4 : 2;
    constexpr int kGroups = 8 / NR;  // a task is 8 tiles: 128 features
    const int64_t num_groups = (p.num_tiles() + NR - 1) / NR;
    Pool::instance().run((num_groups + kGroups - 1) / kGroups, [&](int64_t task) {
        const int64_t last = std::min(num_groups, (task + 1) * kGroups);
        for (int64_t group = task * kGroups; group < last; group++) direct_tiles<W, MR, NR>(p, packed, group * NR);
    });
}

// Weights of one chunk unpacked once into a panel of floats [count][kTiles][16], then used by all rows.
struct Panel {
    template <int NR, typename Visit>
    static inline __attribute__((always_inline)) void each(
        const uint8_t* const* panel, int64_t, int count, const Visit& visit) {
        const float* at = reinterpret_cast<const float*>(*panel);
        for (int k = 0; k < count; k++, at += NR * kLanes) {
            Floats w[NR];
            for (int n = 0; n < NR; n++) w[n] = load(at + n * kLanes);
            visit(k, w);
        }
    }
};

template <int MR>
void panel_rows(const Product& p, const float* packed, const float* panel, int64_t m0, int64_t tile, int64_t k0, int count) {
    Floats sums[MR][kTiles];
    const uint8_t* at = reinterpret_cast<const uint8_t*>(panel);
    multiply<Panel, MR, kTiles>(packed + m0 * p.k + k0 * MR, &at, 0, count, sums);
    add_to<MR, kTiles>(p, m0, tile, k0 == 0, k0 + count == p.k, sums);
}

using PanelRows = void (*)(const Product&, const float*, const float*, int64_t, int64_t, int64_t, int);

template <int... MR>
PanelRows panel_rows_of(int rows, std::integer_sequence<int, MR...>) {
    static constexpr PanelRows table[] = {panel_rows<MR + 1>...};
    return table[rows - 1];
}

template <typename W>
void unpack_panel(const Product& p, int64_t tile, int64_t k0, int count, float* panel) {
    const uint8_t* tiles[kTiles];
    tiles_of<W>(p, tile, tiles);
    W::template each<kTiles>(tiles, k0, count, [&](int k, const Floats* w) __attribute__((always_inline)) {
        for (int n = 0; n < kTiles; n++) store(panel + (k * kTiles + n) * kLanes, w[n]);
    });
}

template <typename W>
void panels(const Product& p, const float* packed) {
    const int64_t num_columns = (p.num_tiles() + kTiles - 1) / kTiles;
    const int64_t num_blocks = (p.m + kRows - 1) / kRows;
    // Enough tasks for all threads: rows are split only when there are few columns, since each part of the
    // rows unpacks the weights again.
    const int64_t wanted = 4 * Pool::instance().num_threads();
    const int64_t parts = std::clamp<int64_t>(wanted / num_columns, 1, std::max<int64_t>(1, num_blocks / 4));
    Pool::instance().run(num_columns * parts, [&](int64_t task) {
        alignas(64) float panel[kChunk * kTiles * kLanes];
        const int64_t tile = task / parts * kTiles, part = task % parts;
        const int64_t first = num_blocks * part / parts, last = num_blocks * (part + 1) / parts;
        for (int64_t k0 = 0; k0 < p.k; k0 += kChunk) {
            const int count = int(std::min<int64_t>(kChunk, p.k - k0));
            unpack_panel<W>(p, tile, k0, count, panel);
            for (int64_t block = first; block < last; block++) {
                const int64_t m0 = block * kRows;
                const int rows = int(std::min<int64_t>(kRows, p.m - m0));
                panel_rows_of(rows, std::make_integer_sequence<int, kRows>())(p, packed, panel, m0, tile, k0, count);
            }
        }
    });
}

// x [m][k] → blocks of `rows` rows, each [k][rows], so that one feature of all rows lies side by side.
void pack_rows(const float* x, int64_t stride, int64_t m, int64_t k, int64_t rows, float* packed) {
    const int64_t num_blocks = (m + rows - 1) / rows;
    const auto pack_one = [&](int64_t block) {
        const int64_t m0 = block * rows, height = std::min(rows, m - m0);
        float* to = packed + m0 * k;
        for (int64_t i = 0; i < height; i++) {
            const float* from = x + (m0 + i) * stride;
            for (int64_t at = 0; at < k; at++) to[at * height + i] = from[at];
        }
    };
    if (num_blocks < 4) {
        for (int64_t block = 0; block < num_blocks; block++) pack_one(block);
    } else {
        Pool::instance().run(num_blocks, pack_one);
    }
}

template <typename W, int... MR>
void direct_of(const Product& p, const float* packed, std::integer_sequence<int, MR...>) {
    using Direct = void (*)(const Product&, const float*);
    static constexpr Direct table[] = {direct<W, MR + 1>...};
    table[p.m - 1](p, packed);
}

template <typename W>
void multiply_as(const Product& p) {
    static thread_local Scratch scratch;
    const float* packed = p.x;
    if (p.m > 1) {
        float* to = static_cast<float*>(scratch.reserve(size_t(p.m * p.k) * sizeof(float)));
        pack_rows(p.x, p.x_stride, p.m, p.k, p.m <= kDirectRows ? p.m : kRows, to);
        packed = to;
    }
    if (p.m <= kDirectRows) direct_of<W>(p, packed, std::make_integer_sequence<int, kDirectRows>());
    else panels<W>(p, packed);
}

bool is_integer(int format) { return multiplies_integers() && (format == kQ8_0 || format == kQ4_1); }

int64_t tile_bytes(int format, int64_t k) {
    if ((format == kQ8_0 || format == kQ4_1) && k % kBlock != 0) return -1;
    if (is_integer(format)) return integer_tile_bytes(format, k);
    switch (format) {
        case kF32: return F32::tile_bytes(k);
        case kF16: case kBF16: return F16::tile_bytes(k);
#if !defined(__AVX512VNNI__)
        case kQ8_0: return Q8_0::tile_bytes(k);
        case kQ4_1: return Q4_1::tile_bytes(k);
#endif
        default: return -1;
    }
}

void pack_row(int format, const uint8_t* row, int64_t k, int64_t index, uint8_t* packed) {
    const int64_t lane = index % kLanes;
    uint8_t* tile = packed + index / kLanes * tile_bytes(format, k);
    if (format == kF32) {
        for (int64_t at = 0; at < k; at++) std::memcpy(tile + (at * kLanes + lane) * 4, row + at * 4, 4);
    } else if (format == kF16 || format == kBF16) {
        for (int64_t at = 0; at < k; at++) std::memcpy(tile + (at * kLanes + lane) * 2, row + at * 2, 2);
#if !defined(__AVX512VNNI__)
    } else if (format == kQ8_0) {
        Q8Block* to = reinterpret_cast<Q8Block*>(tile);
        for (int64_t b = 0; b < k / kBlock; b++, row += 34) {  // scale, 32 bytes
            to[b].scale[lane] = read_half(row);
            for (int at = 0; at < kBlock; at++) to[b].q[at][lane] = int8_t(row[2 + at]);
        }
    } else {
        Q4Block* to = reinterpret_cast<Q4Block*>(tile);
        for (int64_t b = 0; b < k / kBlock; b++, row += 20) {  // scale, least, 16 bytes
            to[b].scale[lane] = read_half(row);
            to[b].least[lane] = read_half(row + 2);
            for (int at = 0; at < kBlock; at++) {  // byte j holds features j (low half) and j + 16 (high half)
                const uint32_t q = at < 16 ? row[4 + at] & 15u : row[4 + at - 16] >> 4;
                to[b].q[at / 8][lane] |= q << (4 * (at % 8));
            }
        }
#endif
    }
}

}  // namespace
}  // namespace kv

using namespace kv;

extern "C" {

int kv_multiplies_integers() { return multiplies_integers(); }

// Bytes of a packed matrix of n outputs and k features; -1 where the format cannot hold it.
int64_t kv_packed_bytes(int format, int64_t n, int64_t k) {
    const int64_t bytes = tile_bytes(format, k);
    return bytes < 0 ? -1 : (n + kLanes - 1) / kLanes * bytes;
}

// Rows first .. first + count - 1 of a matrix, as GGUF stores them, into `packed`, zeroed before the first call.
int kv_pack_rows(int format, const uint8_t* rows, int64_t row_bytes, int64_t count, int64_t k, int64_t first,
                 uint8_t* packed) {
    if (tile_bytes(format, k) < 0) return -1;
    // By tile: two threads must not write the same one.
    const int64_t begin = first / kLanes, end = (first + count + kLanes - 1) / kLanes;
    Pool::instance().run(end - begin, [&](int64_t task) {
        const int64_t from = std::max(first, (begin + task) * kLanes);
        const int64_t to = std::min(first + count, (begin + task + 1) * kLanes);
        for (int64_t row = from; row < to; row++) {
            const uint8_t* at = rows + (row - first) * row_bytes;
            if (is_integer(format)) pack_integer_row(format, at, k, row, packed);
            else pack_row(format, at, k, row, packed);
        }
    });
    return 0;
}

// y[m][n] = x[m][k] W^T + bias. Strides in elements; rows of x and y are contiguous.
int kv_product(int format, const uint8_t* weights, const float* bias, const float* x, int64_t x_stride, float* y,
               int64_t y_stride, int64_t m, int64_t n, int64_t k) {
    const Product p{weights, bias, x, y, x_stride, y_stride, m, n, k};
    if (tile_bytes(format, k) < 0) return -1;
    if (m <= 0 || n <= 0) return 0;
    if (is_integer(format)) multiply_integers(format, p);
    else if (format == kF32) multiply_as<F32>(p);
    else if (format == kF16) multiply_as<F16>(p);
    else if (format == kBF16) multiply_as<BF16>(p);
#if !defined(__AVX512VNNI__)
    else if (format == kQ8_0) multiply_as<Q8_0>(p);
    else if (format == kQ4_1) multiply_as<Q4_1>(p);
#endif
    return 0;
}
}
