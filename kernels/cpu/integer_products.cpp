// The exact half of integer_products.h, packing, and the choice between the halves. Two files, since each takes seconds.
#include <atomic>

#include "integer_products.h"

namespace kv {
namespace {

std::atomic<int> digits{3};  // of an activation

}  // namespace
}  // namespace kv

#if defined(__AVX512VNNI__)

namespace kv {

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
    if (digits == 3) multiply_split<3>(format, p);
    else multiply_two_digits(format, p);
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

extern "C" {

// 3: as exact as float; 2: faster. Of no effect where products run in floats.
void kv_set_digits(int count) { kv::digits = count == 2 ? 2 : 3; }
}
