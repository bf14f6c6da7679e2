// The fast half of integer_products.h: two digits.
#include "integer_products.h"

namespace kv {

#if defined(__AVX512VNNI__)
void multiply_two_digits(int format, const Product& product) { multiply_split<2>(format, product); }
#else
void multiply_two_digits(int, const Product&) {}
#endif

}  // namespace kv
