// Products of matrix instructions, for a whole warp at once. They take most of the emulator's time,
// so they are compiled once, optimized (products.cpp), and not with each kernel.
#pragma once
#include <cstdint>
#include <cstring>

namespace products {

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Return a half as a float, as `(float)(_Float16)`, which is a slow function of libgcc. No branches,
// and no subnormal floats, with which processors are slow.
inline float from_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
  constexpr uint32_t NORMAL = 1 << 23, INFINITE = 31 << 23, QUIET = 1 << 22, BIAS = 112 << 23;
  const float subnormal = as_float(rest + BIAS + NORMAL) - 0x1p-14f;
  const float normal = as_float(rest + BIAS);
  const float special = as_float(rest + 2 * BIAS | (rest > INFINITE ? QUIET : 0));
  const float x = rest < NORMAL ? subnormal : rest < INFINITE ? normal : special;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return as_float(bits | sign);
}

// Element i of the halves in a lane's registers of A: its row and column.
inline int row_of_a(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
inline int column_of_a(int lane, int i) { return lane % 4 * 2 + i % 2 + i / 4 * 8; }

struct Mma {  // a lane's registers
  const uint32_t* a;
  uint32_t b[2];
  const float* c;
  float* d;
};
struct IntegerMma {
  const uint32_t* a;
  uint32_t b[2];
  uint32_t* d;
};
void mma_f16(Mma** lanes);
void mma_s8(IntegerMma** lanes);

typedef double Row __attribute__((vector_size(64)));  // of 8 columns
inline double* elements(Row* rows) { return (double*)rows; }
// Add the product of A [16 x 16] and B [16 x 8] to D [16 x 8]: exact products, added one by one.
void add_product(Row (&d)[16], const double (&a)[16][16], const Row (&b)[16]);

}  // namespace products
