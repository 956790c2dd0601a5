// wgmma, the asynchronous tensor-core instructions of sm_90: 64-row MMAs with operands in shared
// memory. Shapes, layouts and descriptors: PTX ISA, section "wgmma".
//
// Suffixes as in CUTLASS: `ss` both operands in shared memory, `rs` A in registers; `mn` B is
// stored with its N dimension contiguous (transposed), otherwise its K dimension is.
//
// Shared-memory operand: blocks of 64 columns, each [rows][8 chunks of 16 bytes] with chunk p of
// row r at position p ^ (r % 8) (the 128-byte swizzle), aligned to 1024 bytes. Accumulator d of 64
// rows: warp w of the warp group, lane 4 g + t holds columns 8 j + 2 t + {0, 1} of row 16 w + g in
// d[4 j + {0, 1}], and the same columns of row 16 w + g + 8 in d[4 j + {2, 3}].
#pragma once
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Matrix descriptor. `block`: bytes between blocks of 64 columns; only MN-major operands use it.
// `eight`: bytes between groups of 8 rows.
DEVICE u64 smem_descriptor(const void* p, u32 block, u32 eight = 1024) {
  return (u64)(shared_address(p) >> 4) | (u64)(block >> 4) << 16 | (u64)(eight >> 4) << 32 |
         (u64)1 << 62;
}

// Matrix descriptor of an operand without swizzle: blocks of 8 rows x 16 bytes, adjacent rows 16
// bytes apart. `chunk`: bytes to the next 16 bytes of K; `eight`: to the next 8 rows.
DEVICE u64 smem_descriptor_plain(const void* p, u32 chunk, u32 eight) {
  return (u64)(shared_address(p) >> 4) | (u64)(chunk >> 4) << 16 | (u64)(eight >> 4) << 32;
}

// Required before the first wgmma after registers of its A operand or accumulator were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wgmma_wait() {  // wait until at most the N newest groups are pending
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keep the compiler from moving accesses to these registers across this point (as CUTLASS's
// function of this name).
template <int N>
DEVICE void warpgroup_fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE void warpgroup_fence_operand(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define G4_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define G4_F32(d, i) G4_F8(d, i), G4_F8(d, i + 8), G4_F8(d, i + 16), G4_F8(d, i + 24)
#define G4_F128(d, i) G4_F32(d, i), G4_F32(d, i + 32), G4_F32(d, i + 64), G4_F32(d, i + 96)

// d [64 x 64] (+)= A [64 x 16] B^T, B [64 x 16]. `add` 0: d = A B^T.
DEVICE void wgmma_m64n64_ss(float (&d)[32], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : G4_F32(d, 0) : "l"(a), "l"(b), "r"(add));
}

#define G4_F16(d, i) G4_F8(d, i), G4_F8(d, i + 8)

// d [64 x N] (+)= A [64 x 16] in registers, times B^T, B [N x 16], for N = 32, 48, 64, 96 and 128.
DEVICE void wgmma_rs(float (&d)[16], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : G4_F16(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma_rs(float (&d)[24], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23}, "
      "{%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}"
      : G4_F16(d, 0), G4_F8(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma_rs(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : G4_F32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

DEVICE void wgmma_rs(float (&d)[48], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
      "{%48, %49, %50, %51}, %52, p, 1, 1, 0;\n}"
      : G4_F32(d, 0), G4_F16(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma_rs(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : G4_F32(d, 0), G4_F32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d [64 x 256] (+)= A [64 x 16] in registers, times B [16 x 256].
DEVICE void wgmma_m64n256_rs_mn(float (&d)[128], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
      : G4_F128(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d [64 x 256] (+)= A [64 x 16] B [16 x 256].
DEVICE void wgmma_m64n256_ss_mn(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 1;\n}"
      : G4_F128(d, 0) : "l"(a), "l"(b), "r"(add));
}

#endif
