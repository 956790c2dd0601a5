// What a checked run is told by the machine; nothing in an ordinary run. Loads and stores of a
// kernel come by themselves: it is compiled for a thread sanitizer that check.cpp stands in for.
#pragma once
#include <cstddef>
#include <cstdint>

namespace check {

#ifdef CHECKED
// Loads and stores are those of a kernel. Volatile: the compiler does not know who asks.
extern volatile bool active;

// Memory that a launch may touch beside shared memory: `ranges` are pairs (address, bytes).
void start(const uint64_t* ranges, size_t n, const char* stacks, size_t bytes);
const char* finish();  // what was found, or null
// A block comes to life. What lies in [own, own_end) is the machine's, but kernels read it.
void block(unsigned id, unsigned threads, const char* base, size_t dynamic, size_t rounded,
           const void* own, const void* own_end);
void own(const void* from, const void* to);
void declared(size_t used);  // bytes of declared shared memory of the current block
void leave_block(unsigned id);
void current(unsigned block, unsigned thread);

void read(const void* p, size_t bytes);
void write(const void* p, size_t bytes);
void atomic(const void* p, size_t bytes);

// A place to meet: who has come, to an mbarrier by arriving, what those know once it opens, who goes
// on.
void come(const void* place);
void arrive(const void* place);
void open(const void* place);
void go(const void* place);
// Flags in global memory.
void release(const void* flag);
void acquire(const void* flag);

// Between accesses of threads and those of bulk copies and products.
void proxy_fence();

// Asynchronous work has a clock of its own; these return its time.
uint32_t copy(const void* to, const void* from, size_t bytes);
void copied(uint32_t until);  // seen by the current thread
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
inline void come(const void*) {}
inline void arrive(const void*) {}
inline void open(const void*) {}
inline void go(const void*) {}
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
