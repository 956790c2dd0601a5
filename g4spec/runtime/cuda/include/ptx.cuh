// Types, and wrappers of the PTX instructions that the kernels use. A function that is one instruction
// has its name where there is no plainer one. No host headers are included, so NVRTC needs none. Two
// groups of instructions have headers of their own: mbarrier.cuh and wgmma.cuh.
#pragma once
#include "g4spec_constants.cuh"  // generated: build/constants.py

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

#define ARCH __CUDA_ARCH__
#define DEVICE __device__ __forceinline__
constexpr u32 FULL_MASK = 0xffffffffu;

// ---- half precision: f16 in a u16, f16x2 in a u32 ----

DEVICE u16 to_half(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

DEVICE float from_half(u16 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}

DEVICE u32 pack_half2(float low, float high) {
#if ARCH >= 800
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  return (u32)to_half(low) | (u32)to_half(high) << 16;
#endif
}

DEVICE u32 mul_half2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

DEVICE u32 sub_half2(u32 a, u32 b) {
  u32 d;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Both halves of a times half number `half` (0 or 1) of s, plus that of c.
DEVICE u32 fma_half2_by(u32 a, u32 s, u32 c, int half) {
  u32 d;
  if (half)
    asm("{\n.reg .b16 low, high;\n.reg .b32 by, to;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 by, {high, high};\nmov.b32 {low, high}, %3;\nmov.b32 to, {high, high};\n"
        "fma.rn.f16x2 %0, %1, by, to;\n}"
        : "=r"(d) : "r"(a), "r"(s), "r"(c));
  else
    asm("{\n.reg .b16 low, high;\n.reg .b32 by, to;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 by, {low, low};\nmov.b32 {low, high}, %3;\nmov.b32 to, {low, low};\n"
        "fma.rn.f16x2 %0, %1, by, to;\n}"
        : "=r"(d) : "r"(a), "r"(s), "r"(c));
  return d;
}

DEVICE float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }

#if ARCH >= 800
DEVICE u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
#endif

// ---- moves of bits on the FMA pipe, which leave the ALU pipe (shifts, logic) free ----

// The upper half of x, which is not NaN, in both halves: a multiplication by 1.
DEVICE u32 copy_upper_half(u32 x) {
  u32 d;
  asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %1;\n"
      "mov.b32 twice, {high, high};\nmul.rn.f16x2 %0, twice, %2;\n}"
      : "=r"(d) : "r"(x), "r"(0x3c003c00u));
  return d;
}

// x >> 16 as a dot product.
DEVICE u32 dot_upper_half(u32 x) {
  u32 d;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0x0100u), "r"(0u));
  return d;
}

// c plus the sum of the products of bytes.
DEVICE u32 dot_bytes(u32 a, u32 b, u32 c) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// ---- approximations in one instruction ----

DEVICE float exp2_approx(float x) {  // within 2 ulp; exp2(-inf) is 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float rcp_approx(float x) {  // within 1 ulp
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// ---- integers ----

template <int TABLE>
DEVICE u32 lop3(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
}

// (a & b) | c in one instruction.
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return lop3<0xea>(a, b, c); }

DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// permute() for a selector whose nibbles are all at most 7. __byte_perm masks the selector first;
// this saves that instruction.
DEVICE u32 permute_unmasked(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// permute() where a selector nibble above 7 chooses 255 if the sign bit of byte `nibble - 8` is set,
// else 0.
DEVICE u32 permute_or_sign(u32 a, u32 b, u32 selector) { return permute_unmasked(a, b, selector); }

// Maximum of a and b; NaN if either is NaN.
DEVICE float max_nan(float a, float b) {
#if ARCH >= 800
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
#else
  return a > b || a != a ? a : b;
#endif
}

// Pack four integers in -128 .. 127 as signed bytes, `a` lowest.
DEVICE u32 pack_s8x4(int a, int b, int c, int d) {
#if ARCH >= 750
  u32 x;
  asm("{\n.reg .b32 upper;\ncvt.pack.sat.s8.s32.b32 upper, %4, %3, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, %2, %1, upper;\n}"
      : "=r"(x) : "r"(a), "r"(b), "r"(c), "r"(d));
  return x;
#else
  return (u32)(a & 255) | (u32)(b & 255) << 8 | (u32)(c & 255) << 16 | (u32)d << 24;
#endif
}

// Convert an integer below 2^23 to float in two instructions: v is or-ed into the mantissa of 2^23.
DEVICE float small_uint_to_float(u32 v) { return __uint_as_float(v | 0x4b000000u) - 8388608.0f; }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// A word of shared memory that does not change while the kernel uses it.
DEVICE u32 load_shared_constant(u32 address) {
  u32 v;
  asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// ---- hints to the compiler ----

// Compute x here, not where it is used. Place it before a wait, so that the work overlaps with it.
DEVICE u32 materialize(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

DEVICE int materialize(int x) { return (int)materialize((u32)x); }
DEVICE float materialize(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

template <class T>
DEVICE const T* materialize(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// materialize() for a pointer into shared memory.
DEVICE u8* materialize_shared(const u8* p) {
  return (u8*)__cvta_shared_to_generic(materialize(shared_address(p)));
}

DEVICE u32 clock_cycles() {  // low 32 bits of the SM's cycle counter
  u32 n;
  asm volatile("mov.u32 %0, %clock;" : "=r"(n));
  return n;
}

// ---- named barriers: bar.sync over a subset of the warps of a block ----

DEVICE void named_barrier_sync(int id, int threads) {  // wait until `threads` have arrived
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int ID, int THREADS>
DEVICE void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// ---- memory ----

DEVICE uint4 load_streaming(const void* p) {  // 16 bytes that are read once: not kept in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Counter in global memory. A thread that reads the sum with `load_acquire` sees all writes that
// happened before `atomic_add_release`: those of the releasing thread, and those of its block
// before a block barrier.
DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

DEVICE void atomic_add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Acquire and release in one atomic; returns the value before the addition.
DEVICE u32 atomic_add_acq_rel(u32* p, u32 v) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v)
               : "memory");
  return before;
}

// ---- tensor cores ----

#if ARCH >= 800
// D[16 x 8] = A[16 x 16] B[16 x 8] + C. Lane 4 g + t holds A rows g and g + 8 (a0, a2 and a1, a3),
// columns 2t, 2t + 1 and 2t + 8, 2t + 9; B column g, rows 2t, 2t + 1 and 2t + 8, 2t + 9; C and D rows
// g and g + 8, columns 2t, 2t + 1 (PTX ISA, "mma").
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
        "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// D += A[16 x 32] B[32 x 8] on signed bytes with int32 sums. Lane 4 g + t holds columns of A (rows
// of B) 4t .. 4t + 3 and 4t + 16 .. 4t + 19.
DEVICE void mma_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of halves. Lane l gives the address of row l % 8 of matrix l / 8; lane 4 g + t
// gets columns 2t, 2t + 1 of row g of matrix i in r[i].
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// The same of the transposed matrices.
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
#endif

// ---- cp.async: copies from global to shared memory, of a thread ----

#if ARCH >= 800
template <int BYTES>
DEVICE void cp_async(u32 to_shared, const void* from_global) {  // BYTES: 4, 8 or 16
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from_global)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to_shared), "l"(from_global),
                 "n"(BYTES) : "memory");
}

template <int BYTES>
DEVICE void cp_async(void* to_shared, const void* from_global) {
  cp_async<BYTES>(shared_address(to_shared), from_global);
}

DEVICE void cp_async16(void* to_shared, const void* from_global) {
  cp_async<16>(to_shared, from_global);
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most the N newest groups of this thread are pending.
template <int N>
DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif

// ---- programmatic dependent launch ----

// A kernel may start while its predecessor still runs. Every thread calls `griddep_wait` before its
// first write, and before its first read of data that the predecessor writes.
// `griddep_launch_dependents` allows the next kernel to start. It orders no memory accesses.

DEVICE void griddep_wait() {
#if ARCH >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void griddep_launch_dependents() {
#if ARCH >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- setmaxnreg: a warp group releases registers, another one acquires them ----

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int N>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#endif
