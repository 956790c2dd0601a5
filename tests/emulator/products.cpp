#include "products.h"

namespace products {
namespace {

typedef uint32_t IntegerRow __attribute__((vector_size(32)));

// Sums of all columns of a row at once, each in the order of the loop over the inner dimension.
template <class R, class T, int K>
void add(R (&d)[16], const T (&a)[16][K], const R (&b)[K]) {
  for (int row = 0; row < 16; ++row) {
    R sum = d[row];
    for (int k = 0; k < K; ++k) sum += a[row][k] * b[k];
    d[row] = sum;
  }
}

// Place in B [K x 8] of element i of a lane, of n per register; place in D [16 x 8].
int place_in_b(int lane, int i, int n) {
  return (lane % 4 * n + i % n + i / n * 4 * n) * 8 + lane / 4;
}
int place_in_d(int lane, int i) { return (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2; }

}  // namespace

void add_product(Row (&d)[16], const double (&a)[16][16], const Row (&b)[16]) { add(d, a, b); }

void mma_f16(Mma** lanes) {
  double a[16][16];
  Row b[16], d[16];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mine = *lanes[lane];
    for (int i = 0; i < 8; ++i)
      a[row_of_a(lane, i)][column_of_a(lane, i)] = from_half(uint16_t(mine.a[i / 2] >> i % 2 * 16));
    for (int i = 0; i < 4; ++i) {
      elements(b)[place_in_b(lane, i, 2)] = from_half(uint16_t(mine.b[i / 2] >> i % 2 * 16));
      elements(d)[place_in_d(lane, i)] = mine.c[i];
    }
  }
  add(d, a, b);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = (float)elements(d)[place_in_d(lane, i)];
}

void mma_s8(IntegerMma** lanes) {
  uint32_t a[16][32];
  IntegerRow b[32], d[16];
  for (int lane = 0; lane < 32; ++lane) {
    const IntegerMma& mine = *lanes[lane];
    for (int i = 0; i < 16; ++i)
      a[lane / 4 + i / 4 % 2 * 8][4 * (lane % 4) + i % 4 + i / 8 * 16] =
          (uint32_t)int8_t(mine.a[i / 4] >> i % 4 * 8);
    for (int i = 0; i < 8; ++i)
      ((uint32_t*)b)[place_in_b(lane, i, 4)] = (uint32_t)int8_t(mine.b[i / 4] >> i % 4 * 8);
    for (int i = 0; i < 4; ++i) ((uint32_t*)d)[place_in_d(lane, i)] = mine.d[i];
  }
  add(d, a, b);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = ((uint32_t*)d)[place_in_d(lane, i)];
}

}  // namespace products
