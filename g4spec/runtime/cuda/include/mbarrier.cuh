// mbarriers in shared memory, and the asynchronous copies that complete on them: bulk copies on sm_90 and
// newer (PTX ISA, "cp.async.bulk"), cp.async of a thread from sm_80 on.
#pragma once
#include "ptx.cuh"

#if ARCH >= 800
DEVICE void mbarrier_init(u64* bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals));
}

// Make new mbarriers visible to the async proxy (bulk copies). Call it before __syncthreads().
DEVICE void mbarrier_init_fence() {
#if ARCH >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

DEVICE void mbarrier_arrive(u64* bar) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}"
               ::"r"(shared_address(bar)) : "memory");
}

// Wait until the phase of this parity has completed.
DEVICE void mbarrier_wait(u64* bar, u32 parity) {
#if ARCH >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(shared_address(bar)), "r"(parity) : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(shared_address(bar)), "r"(parity) : "memory");
#endif
}

// Arrive once the cp.async that this thread has issued are complete. The arrival is one of those that
// `mbarrier_init` counted.
DEVICE void cp_async_mbarrier_arrive(u64* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(bar))
               : "memory");
}
#endif

// Proxy fence between ordinary stores to global memory and bulk copies that read them. The storing
// thread and the copying thread both execute it.
DEVICE void fence_proxy_async() {
#if ARCH >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

#if ARCH >= 900
// Proxy fence between ordinary accesses to shared memory and later ones of the async proxy: wgmma
// that reads it, bulk copies that overwrite it.
DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrive once, and make the phase expect `bytes` more of copied data. Kernels call it after they
// have issued the copies: compute-sanitizer's racecheck attributes bulk copies to the issuing
// thread, and must see them before the arrival.
DEVICE void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}"
               ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}

// Both pointers 16-byte aligned, `bytes` a multiple of 16; completes on `bar`.
DEVICE void cp_async_bulk(void* to_shared, const void* from_global, u32 bytes, u64* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(to_shared)), "l"(from_global), "r"(bytes), "r"(shared_address(bar))
      : "memory");
}

// cp_async_bulk() with an L2 evict-first hint, for data that is read once (weights).
DEVICE void cp_async_bulk_evict_first(void* to_shared, const void* from_global, u32 bytes,
                                      u64* bar) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], policy;\n}"
      ::"r"(shared_address(to_shared)), "l"(from_global), "r"(bytes), "r"(shared_address(bar))
      : "memory");
}
#endif
