// Replacement of cuda/include/ptx.cuh: the same functions, implemented on machine.h.
#pragma once
#include "cuda.h"
#include "products.h"
#include "g4spec_constants.cuh"

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = uint64_t;
using i64 = int64_t;

#define ARCH __CUDA_ARCH__
#define DEVICE inline
constexpr u32 FULL_MASK = 0xffffffffu;

inline u16 to_half(float x) { return same_bits<u16>((_Float16)x); }
using products::from_half;
inline u32 pack_half2(float low, float high) {
  return (u32)to_half(low) | (u32)to_half(high) << 16;
}
template <class Op>
u32 halves(u32 a, u32 b, u32 c, Op op) {
  u32 out = 0;
  for (int s = 0; s < 32; s += 16)
    out |= (u32)to_half(op(from_half(u16(a >> s)), from_half(u16(b >> s)), from_half(u16(c >> s)))) << s;
  return out;
}
inline u32 mul_half2(u32 a, u32 b) {
  return halves(a, b, 0, [](float x, float y, float) { return x * y; });
}
inline u32 copy_upper_half(u32 x) { return mul_half2(x >> 16 | (x & 0xffff0000u), 0x3c003c00u); }
inline u32 dot_bytes(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
inline u32 dot_upper_half(u32 x) { return x >> 16; }
inline u32 sub_half2(u32 a, u32 b) {
  return halves(a, b, 0, [](float x, float y, float) { return x - y; });
}
// The product is exact; the sum is rounded to float and then to half (twice), unlike the
// instruction.
inline u32 fma_half2(u32 a, u32 b, u32 c) {
  return halves(a, b, c, [](double x, double y, double z) { return float(x * y + z); });
}
inline u32 fma_half2_by(u32 a, u32 s, u32 c, int half) {
  const auto twice = [half](u32 x) { return (half ? x >> 16 : x & 0xffff) * 0x10001u; };
  return fma_half2(a, twice(s), twice(c));
}
inline float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }
inline u32 bf16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline float rcp_approx(float x) { return 1.0f / x; }
inline float max_nan(float a, float b) { return a > b || a != a ? a : b; }
inline u32 pack_s8x4(int a, int b, int c, int d) {
  const auto byte = [](int x) { return u32(x < -128 ? -128 : x > 127 ? 127 : x) & 255; };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

template <int TABLE>
u32 lop3(u32 a, u32 b, u32 c) {
  u32 out = 0;
  for (int i = 0; i < 8; ++i)
    if (TABLE >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return out;
}
inline u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
inline u32 permute_unmasked(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
inline u32 permute_or_sign(u32 a, u32 b, u32 selector) {
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> (4 * i) & 15;
    const u32 byte = u32(((u64)b << 32 | a) >> (nibble % 8 * 8)) & 255;
    out |= (nibble < 8 ? byte : byte & 128 ? 255u : 0u) << (8 * i);
  }
  return out;
}
inline u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
inline float small_uint_to_float(u32 v) { return (float)v; }

inline u32 materialize(u32 x) { return x; }
inline int materialize(int x) { return x; }
inline float materialize(float x) { return x; }
template <class T>
inline const T* materialize(const T* p) { return p; }
inline u8* materialize_shared(const u8* p) { return (u8*)p; }
inline u32 clock_cycles() {  // advances fast, so that pacing loops end
  static u32 n = 0;
  return n += 4096;
}
inline void named_barrier_sync(int id, int threads) { machine::named_barrier_sync(id, threads); }
template <int ID, int THREADS>
void named_barrier_sync() {
  machine::named_barrier_sync(ID, THREADS);
}

inline u32 shared_address(const void* p) { return machine::address(p); }
inline u32 load_shared_constant(u32 address) { return *(const u32*)machine::at(address); }
inline void aligned(const void* p, unsigned to) {
  if ((uintptr_t)p % to) machine::fail("an address that is not a multiple of %u", to);
}
inline uint4 load_streaming(const void* p) {
  aligned(p, 16);
  return *(const uint4*)p;
}
inline u32 load_acquire(const u32* p) {
  check::atomic(p, sizeof *p);
  check::Quiet quiet;
  const u32 v = *p;
  check::acquire(p);
  machine::yield();  // let other threads run
  return v;
}
inline void atomic_add_release(u32* p, u32 v) {
  check::atomic(p, sizeof *p);
  check::Quiet quiet;
  check::release(p);
  *p += v;
}
inline u32 atomic_add_acq_rel(u32* p, u32 v) {
  check::atomic(p, sizeof *p);
  check::Quiet quiet;
  const u32 before = *p;
  check::acquire(p);
  check::release(p);
  *p += v;
  return before;
}

inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  float sum[4];
  products::Mma mine{a, {b0, b1}, c, sum};
  machine::warp_collective("mma", mine, products::mma_f16);
  std::copy(sum, sum + 4, d);
}
inline void mma_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u32 sum[4] = {d[0], d[1], d[2], d[3]};
  products::IntegerMma mine{a, {b0, b1}, sum};
  machine::warp_collective("mma", mine, products::mma_s8);
  std::copy(sum, sum + 4, d);
}

template <int N>
void cp_async_wait_group() {
  machine::cp_async_wait_group(N);
}
template <int BYTES>
void cp_async(u32 to, const void* from) {
  char* place = machine::at(to);
  aligned(place, BYTES), aligned(from, BYTES);
  machine::copy(place, from, BYTES);
}
template <int BYTES>
void cp_async(void* to, const void* from) {
  cp_async<BYTES>(shared_address(to), from);
}
inline void cp_async16(void* to, const void* from) { cp_async<16>(to, from); }
inline void cp_async_commit() { machine::cp_async_commit(); }

struct LdmatrixLane {
  const void* row;
  u32* out;
};
inline void ldmatrix(u32 (&r)[4], const void* row, bool turned) {
  aligned(row, 16);
  machine::address(row);
  check::read(row, 16);
  LdmatrixLane mine{row, r};
  const auto read = [](LdmatrixLane** all, int m, int row, int column) {
    return (u32)((const u16*)all[m * 8 + row]->row)[column];
  };
  machine::warp_collective(turned ? "ldmatrix.trans" : "ldmatrix", mine, [=](LdmatrixLane** all) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        const int i = lane / 4, j = lane % 4 * 2;
        all[lane]->out[m] = turned ? read(all, m, j, i) | read(all, m, j + 1, i) << 16
                                   : read(all, m, i, j) | read(all, m, i, j + 1) << 16;
      }
  });
}
inline void ldmatrix_x4(u32 (&r)[4], const void* row) { ldmatrix(r, row, false); }
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row) { ldmatrix(r, row, true); }

inline void griddep_wait() {}
inline void griddep_launch_dependents() {}
template <int N>
void setmaxnreg_dec() {
  machine::release_registers(N);
}
template <int N>
void setmaxnreg_inc() {
  machine::acquire_registers(N);
}
