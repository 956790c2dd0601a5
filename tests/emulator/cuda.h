// CUDA C++ keywords, types and built-in functions that the kernels use, implemented on machine.h.
#pragma once
#include <algorithm>
#include <cmath>
#include "machine.h"

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define threadIdx (machine::self->index)
#define blockIdx (machine::self->block->index)
#define blockDim machine::block_size
#define gridDim machine::grid_size

using std::isinf;
using std::isnan;
using std::max;
using std::min;

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(4) ushort2 { unsigned short x, y; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(4) char4 { signed char x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __expf(float a) { return expf(a); }
inline float rsqrtf(float a) { return float(1.0 / std::sqrt(double(a))); }
inline int __float2int_rz(float a) { return int(a); }
template <class To, class From>
To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return unsigned(((uint64_t)hi << 32 | lo) >> (n & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15;
    unsigned byte = both >> (8 * (s & 7)) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}
inline int dot4(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
  return c;
}
#define __dp4a dot4

namespace machine {
template <class T, class Op>
T atomic(T* p, Op op) {
  check::atomic(p, sizeof *p);
  check::Quiet quiet;
  const T old = *p;
  *p = op(old);
  return old;
}
}  // namespace machine

template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T x) { *p = x; }
template <class T> void __stcs(T* p, T x) { *p = x; }
template <class T> T atomicAdd(T* p, T x) { return machine::atomic(p, [x](T old) { return old + x; }); }
template <class T> T atomicOr(T* p, T x) { return machine::atomic(p, [x](T old) { return old | x; }); }
template <class T> T atomicMax(T* p, T x) { return machine::atomic(p, [x](T old) { return std::max(old, x); }); }
inline void __threadfence() {}

inline void __syncthreads() { machine::named_barrier_sync(0, machine::self->block->live); }
inline int __syncthreads_count(int x) {
  return machine::named_barrier_sync(0, machine::self->block->live, x != 0);
}

namespace machine {
inline void require_full_mask(unsigned mask) {
  if (mask != 0xffffffffu) fail("a part of a warp");
}
// Return the value of lane `from`.
template <class T>
T shuffle_from(const char* what, T value, int from) {
  struct Lane { T value; int from; T found; } mine{value, from, value};
  warp_collective(what, mine, [](Lane** all) {
    for (int i = 0; i < 32; ++i) all[i]->found = all[all[i]->from]->value;
  });
  return mine.found;
}
template <class T, class Op>
T warp_fold(const char* what, T value, Op op) {
  struct Lane { T value, found; } mine{value, value};
  warp_collective(what, mine, [op](Lane** all) {
    T x = all[0]->value;
    for (int i = 1; i < 32; ++i) x = op(x, all[i]->value);
    for (int i = 0; i < 32; ++i) all[i]->found = x;
  });
  return mine.found;
}
}  // namespace machine

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  machine::require_full_mask(mask);
  machine::Warp* warp = machine::self->warp;
  check::barrier_arrive(warp);
  char none = 0;
  machine::warp_collective("__syncwarp", none, [warp](char**) { check::barrier_release(warp); });
  check::barrier_pass(warp);
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  machine::require_full_mask(mask);
  return machine::shuffle_from("shfl", x, from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int flip) {
  machine::require_full_mask(mask);
  return machine::shuffle_from("shfl.xor", x, machine::self->lane ^ flip);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int by) {
  machine::require_full_mask(mask);
  return machine::shuffle_from(
      "shfl.up", x,
      std::max(0, machine::self->lane - by) + (machine::self->lane < by ? machine::self->lane : 0));
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, int by) {
  machine::require_full_mask(mask);
  const int from = machine::self->lane + by;
  return machine::shuffle_from("shfl.down", x, from < 32 ? from : machine::self->lane);
}
inline unsigned __ballot_sync(unsigned mask, int x) {
  machine::require_full_mask(mask);
  return machine::warp_fold("ballot", x ? 1u << machine::self->lane : 0u,
                            [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, x) == 0xffffffffu; }
template <class T>
T __reduce_min_sync(unsigned mask, T x) {
  machine::require_full_mask(mask);
  return machine::warp_fold("redux.min", x, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T x) {
  machine::require_full_mask(mask);
  return machine::warp_fold("redux.max", x, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_add_sync(unsigned mask, T x) {
  machine::require_full_mask(mask);
  return machine::warp_fold("redux.add", x, [](T a, T b) { return a + b; });
}
