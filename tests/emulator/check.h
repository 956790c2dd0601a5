// Interface of the race checker (check.cpp); empty functions in unchecked runs. The machine reports
// synchronization and asynchronous work here. Loads and stores of kernels are reported by
// -fsanitize=thread instrumentation (sanitizer.h).
#pragma once
#include <cstddef>
#include <cstdint>

namespace check {

#ifdef CHECKED
// True while kernel code runs, whose loads and stores are checked. Volatile: instrumentation reads
// it anywhere.
extern volatile bool active;

// Begin a launch. `ranges`: pairs (address, bytes) of global memory that it may access.
void start(const uint64_t* ranges, size_t n, const char* stacks, size_t bytes);
const char* finish();  // reports of the launch, or null
// Register a block. [own, own_end) is memory of the machine that kernels read (thread indices); it
// is not checked.
void block(unsigned id, unsigned threads, const char* base, size_t dynamic, size_t rounded,
           const void* own, const void* own_end);
void own(const void* from, const void* to);
void declared(size_t used);  // bytes of declared shared memory of the current block
void leave_block(unsigned id);
void current(unsigned block, unsigned thread);

void read(const void* p, size_t bytes);
void write(const void* p, size_t bytes);
void atomic(const void* p, size_t bytes);

// Barriers and mbarriers: a thread arrives, the barrier completes, a waiting thread passes.
void barrier_arrive(const void* place);
void mbarrier_arrive(const void* place);
void barrier_release(const void* place);
void barrier_pass(const void* place);
// Counters in global memory.
void release(const void* flag);
void acquire(const void* flag);

// fence.proxy.async: orders accesses of threads and of the async proxy (bulk copies, wgmma).
void proxy_fence();

// Asynchronous work has its own clocks; these functions return its time.
uint32_t copy(const void* to, const void* from, size_t bytes);
void copied(uint32_t until);  // completed for the current thread
uint32_t bulk(const void* to, const void* from, size_t bytes, const void* barrier);
void arrived_bulk(unsigned block, const void* barrier, uint32_t until);
void arrived_copies(unsigned block, const void* barrier, unsigned thread, uint32_t until);
void wgmma_reads(const void* p, size_t bytes);
void wgmma_commit();
void wgmma_wait(unsigned newest);

struct Quiet {  // the machine's own loads and stores
  bool was;
  Quiet() : was(active) { active = false; }
  ~Quiet() { active = was; }
};
#define UNCHECKED __attribute__((no_sanitize("thread")))
#else
struct Quiet {
  ~Quiet() {}
};
struct State {
  State& operator=(bool) { return *this; }
  operator bool() const { return false; }
};
inline State active;
inline void start(const uint64_t*, size_t, const char*, size_t) {}
inline const char* finish() { return nullptr; }
inline void block(unsigned, unsigned, const char*, size_t, size_t, const void*, const void*) {}
inline void own(const void*, const void*) {}
inline void declared(size_t) {}
inline void leave_block(unsigned) {}
inline void current(unsigned, unsigned) {}
inline void read(const void*, size_t) {}
inline void write(const void*, size_t) {}
inline void atomic(const void*, size_t) {}
inline void barrier_arrive(const void*) {}
inline void mbarrier_arrive(const void*) {}
inline void barrier_release(const void*) {}
inline void barrier_pass(const void*) {}
inline void release(const void*) {}
inline void acquire(const void*) {}
inline void proxy_fence() {}
inline uint32_t copy(const void*, const void*, size_t) { return 0; }
inline void copied(uint32_t) {}
inline uint32_t bulk(const void*, const void*, size_t, const void*) { return 0; }
inline void arrived_bulk(unsigned, const void*, uint32_t) {}
inline void arrived_copies(unsigned, const void*, unsigned, uint32_t) {}
inline void wgmma_reads(const void*, size_t) {}
inline void wgmma_commit() {}
inline void wgmma_wait(unsigned) {}
#define UNCHECKED
#endif

}  // namespace check
