// State of emulated blocks, and the primitives that the headers of instructions use: barriers, warp
// collectives, mbarriers, asynchronous copies, shared memory. Every CUDA thread is a fiber on one
// CPU thread; it runs until it waits. The order of warps and the arrival of asynchronous copies are
// random. Uninitialized memory is NaN.
//
// Functions of this header and of those that include it use no containers, strings or random numbers
// of the standard library: the compiler would instantiate their templates again for each kernel, also
// those that it does not call. What needs them is in machine.cpp.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>
#include "check.h"

namespace machine {

constexpr int RESIDENT = 24;       // blocks that run concurrently
constexpr size_t STACK = 1 << 17;  // bytes of stack per thread
constexpr size_t STATIC =
    64 << 10;  // bytes of static shared memory of a block, after the dynamic part

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Barrier {  // reusable barrier; `count` threads are waiting
  uint64_t opened = 0;
  int count = 0, sum = 0, last = 0;
};

struct Mbarrier {  // of an mbarrier
  uint64_t phase = 0;
  int64_t bytes = 0;
  int expected = 0, pending = 0;
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  void run() const { std::memcpy(to, from, bytes); }
};

struct CopyGroup {  // a cp.async group; `time`: clock of its last copy (checked runs)
  std::vector<Copy> copies;
  uint32_t time = 0;
};

struct PendingArrival {  // cp.async.mbarrier.arrive that waits for a thread's copies
  CopyGroup group;
  uint64_t* bar;
  unsigned thread;
};

struct Block;

struct Warp {
  Barrier barrier;
  const char* doing = nullptr;
  void* lanes[32];
};

struct Thread {
  jmp_buf here;
  Index index;
  unsigned number = 0;
  int lane = 0;
  bool done = false, started = false;
  const uint64_t* wait = nullptr;  // runnable once *wait != seen
  uint64_t seen = 0;
  const char* what = "";
  Block* block = nullptr;
  Warp* warp = nullptr;
  CopyGroup copies;  // not yet committed
  std::vector<CopyGroup> groups;
};

struct Block {
  Index index;
  unsigned id = 0;
  int live = 0;
  std::vector<char> memory;  // shared memory: dynamic, then static
  char* base = nullptr;
  std::map<int, size_t> declared;  // offset of each static variable, by source location
  size_t used = 0, dynamic = 0;
  Barrier named[16];
  uint64_t registers = 0;  // released by setmaxnreg and not yet acquired, per thread
  std::map<uint64_t*, Mbarrier> barriers;
  struct BulkCopy {
    Copy copy;
    uint64_t* bar;
    uint32_t time;
  };
  std::vector<BulkCopy> bulk_copies;  // not yet arrived
  std::vector<PendingArrival> pending_arrivals;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
};

extern Thread* self;
extern Index block_size, grid_size;
extern const uint64_t* watched;  // memory of a checked launch: pairs (address, bytes)
extern size_t watched_count;
extern jmp_buf scheduler;
extern const std::function<void()>* body;

[[noreturn]] void fail(const char* text);
// Fail with the text and the number where it has %u.
[[noreturn]] void fail(const char* text, unsigned number);
[[noreturn]] void fail_in_another_collective(const char* what);

inline void yield() {
  const bool was = check::active;
  check::active = false;
  if (_setjmp(self->here) == 0) _longjmp(scheduler, 1);
  check::active = was;
}

inline void wait_while(const uint64_t& counter, uint64_t seen, const char* what) {
  Thread* me = self;
  me->wait = &counter, me->seen = seen, me->what = what;
  if (counter == seen) yield();
  me->wait = nullptr;
}

inline void open(Barrier& barrier) {
  barrier.last = barrier.sum;
  barrier.sum = barrier.count = 0;
  ++barrier.opened;
}

// Warp collective: the last lane to arrive runs `op` on the arguments of all lanes.
template <class T, class Op>
void warp_collective(const char* what, T& mine, Op op) {
  check::Quiet quiet;
  Warp& w = *self->warp;
  if (w.barrier.count == 0) w.doing = what;
  if (w.doing != what) fail_in_another_collective(what);
  w.lanes[self->lane] = &mine;
  if (++w.barrier.count == 32) {
    op((T**)w.lanes);
    open(w.barrier);
  } else {
    wait_while(w.barrier.opened, w.barrier.opened, what);
  }
}

int named_barrier_sync(int id, int threads, int add = 0);

// ---- setmaxnreg ----

void release_registers(uint64_t kept);
void acquire_registers(uint64_t wanted);

// ---- mbarriers ----

void init(uint64_t* bar, unsigned arrivals);
void arrive(uint64_t* bar, int64_t bytes = 0);
// Block until the phase of this parity has completed.
void wait(uint64_t* bar, unsigned parity);

// ---- cp.async and bulk copies ----

void copy(void* to, const void* from, unsigned bytes);
void cp_async_wait_group(size_t newest);
void cp_async_commit();
// Arrive at the mbarrier once all copies of this thread so far are complete.
void arrive_copied(uint64_t* bar);
void cp_async_bulk(void* to, const void* from, unsigned bytes, uint64_t* bar);

// ---- shared memory ----

inline char* at(unsigned address) { return self->block->base + address; }
unsigned address(const void* p);
inline char* dynamic() { return self->block->base; }
// Return the place in shared memory of the variable that is declared at `place` in the source.
char* declare(int place, size_t bytes);
template <class T>
T& declared(int place) {
  return *(T*)declare(place, sizeof(T));
}

}  // namespace machine
