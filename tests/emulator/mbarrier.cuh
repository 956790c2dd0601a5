// Replacement of cuda/include/mbarrier.cuh: the same functions, implemented on machine.h.
#pragma once
#include "ptx.cuh"

inline void mbarrier_init(u64* bar, u32 arrivals) {
  shared_address(bar);
  check::write(bar, sizeof *bar);
  machine::init(bar, arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(u64* bar) { machine::arrive(bar); }
inline void mbarrier_wait(u64* bar, u32 parity) { machine::wait(bar, parity); }
inline void fence_proxy_async() { check::proxy_fence(); }
inline void fence_proxy_async_shared() { check::proxy_fence(); }
inline void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) { machine::arrive(bar, bytes); }
inline void cp_async_bulk(void* to, const void* from, u32 bytes, u64* bar) {
  aligned(to, 16), aligned(from, 16);
  if (bytes % 16) machine::fail("a bulk copy of %u bytes", bytes);
  shared_address(to);
  machine::cp_async_bulk(to, from, bytes, bar);
}
inline void cp_async_bulk_evict_first(void* to, const void* from, u32 bytes, u64* bar) {
  cp_async_bulk(to, from, bytes, bar);
}
inline void cp_async_mbarrier_arrive(u64* bar) { machine::arrive_copied(bar); }
