// State of emulated blocks, and the primitives that the headers of instructions use: barriers, warp
// collectives, mbarriers, asynchronous copies, shared memory. Every CUDA thread is a fiber on one
// CPU thread; it runs until it waits. The order of warps and the arrival of asynchronous copies are
// random. Uninitialized memory is NaN.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
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

struct Failure {
  std::string text;
};

inline Thread* self;
inline Index block_size, grid_size;
inline const uint64_t* watched;  // memory of a checked launch: pairs (address, bytes)
inline size_t watched_count;
inline jmp_buf scheduler;
inline std::mt19937 random_engine;
inline const std::function<void()>* body;
inline std::string failed;

[[noreturn]] inline void fail(const std::string& text) {
  check::active = false;
  if (failed.empty())
    failed = text + " (block " + std::to_string(self->block->index.x) + ", thread " +
             std::to_string(self->index.x) + ")";
  _longjmp(scheduler, 1);
}

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
  if (w.doing != what) fail(std::string(what) + " meets " + w.doing + " in one warp");
  w.lanes[self->lane] = &mine;
  if (++w.barrier.count == 32) {
    op((T**)w.lanes);
    open(w.barrier);
  } else {
    wait_while(w.barrier.opened, w.barrier.opened, what);
  }
}

inline int named_barrier_sync(int id, int threads, int add = 0) {
  check::Quiet quiet;
  Barrier& barrier = self->block->named[id];
  barrier.sum += add;
  check::barrier_arrive(&barrier);
  if (++barrier.count == threads) {
    open(barrier);
    check::barrier_release(&barrier);
  } else {
    wait_while(barrier.opened, barrier.opened, "barrier");
  }
  check::barrier_pass(&barrier);
  return barrier.last;
}

// ---- setmaxnreg ----

// Registers per thread at the start of a kernel that uses setmaxnreg.
inline uint64_t initial_registers() {
  const uint64_t threads = block_size.x * block_size.y * block_size.z;
  return std::min<uint64_t>(65536 / threads / 8 * 8, 168);
}
inline void release_registers(uint64_t kept) {
  check::Quiet quiet;
  if (self->lane == 0) self->block->registers += initial_registers() - kept;
}
inline void acquire_registers(uint64_t wanted) {
  check::Quiet quiet;
  uint64_t& there = self->block->registers;
  if (self->lane) return;
  while (there < wanted - initial_registers()) wait_while(there, there, "registers");
  there -= wanted - initial_registers();
}

// ---- mbarriers ----

inline Mbarrier& mbarrier_at(uint64_t* bar) {
  auto& all = self->block->barriers;
  auto found = all.find(bar);
  if (found == all.end()) fail("a barrier that was not initialised");
  return found->second;
}
inline void complete_if_done(uint64_t* bar, Mbarrier& b) {
  if (b.pending < 0) b.pending = 0, failed = "more arrivals than a barrier expects";
  if (b.pending || b.bytes) return;
  ++b.phase, b.pending = b.expected;
  check::barrier_release(bar);
}
inline void arrive(uint64_t* bar, int64_t bytes = 0) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  Mbarrier& b = mbarrier_at(bar);
  b.bytes += bytes;
  --b.pending;
  check::mbarrier_arrive(bar);
  complete_if_done(bar, b);
}
// True once the phase of this parity has completed; `wait`: block until then.
inline bool mbarrier_phase_done(uint64_t* bar, unsigned parity, bool wait) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  const Mbarrier& b = mbarrier_at(bar);
  while ((b.phase & 1) == parity) {
    if (!wait) return yield(), false;  // the caller polls
    wait_while(b.phase, b.phase, "mbarrier");
  }
  check::barrier_pass(bar);
  return true;
}

// Complete one pending bulk copy or cp.async arrival, chosen at random.
inline bool deliver_one(Block& block) {
  check::current(block.id, 0);
  if (!block.bulk_copies.empty()) {
    size_t i = random_engine() % block.bulk_copies.size();
    auto [copy, bar, time] = block.bulk_copies[i];
    block.bulk_copies.erase(block.bulk_copies.begin() + i);
    copy.run();
    Mbarrier& b = block.barriers[bar];
    b.bytes -= copy.bytes;
    check::arrived_bulk(block.id, bar, time);
    complete_if_done(bar, b);
    return true;
  }
  if (!block.pending_arrivals.empty()) {
    size_t i = random_engine() % block.pending_arrivals.size();
    auto item = block.pending_arrivals[i];
    block.pending_arrivals.erase(block.pending_arrivals.begin() + i);
    // The arrival covers all earlier copies of its thread, including those of other pending
    // arrivals.
    for (size_t j = 0; j < i; ++j) {
      auto& before = block.pending_arrivals[j];
      if (before.thread != item.thread) continue;
      for (const Copy& copy : before.group.copies) copy.run();
      before.group.copies.clear();
    }
    for (const Copy& copy : item.group.copies) copy.run();
    Mbarrier& b = block.barriers[item.bar];
    --b.pending;
    check::arrived_copies(block.id, item.bar, item.thread, item.group.time);
    complete_if_done(item.bar, b);
    return true;
  }
  return false;
}

// ---- cp.async and bulk copies ----

inline void copy(void* to, const void* from, unsigned bytes) {
  check::Quiet quiet;
  CopyGroup& group = self->copies;
  group.copies.push_back({to, from, bytes});
  group.time = check::copy(to, from, bytes);
}
inline void cp_async_wait_group(size_t newest) {
  check::Quiet quiet;
  auto& groups = self->groups;
  while (groups.size() > newest) {
    for (const Copy& copy : groups.front().copies) copy.run();
    check::copied(groups.front().time);
    groups.erase(groups.begin());
  }
}
inline void cp_async_commit() {
  check::Quiet quiet;
  self->groups.push_back(self->copies);
  self->copies.copies.clear();
  // Committed copies may complete early.
  if (random_engine() % 4 == 0)
    for (const Copy& copy : self->groups.back().copies) copy.run();
}
// Arrive at the mbarrier once all copies of this thread so far are complete.
inline void arrive_copied(uint64_t* bar) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  mbarrier_at(bar);
  PendingArrival item{{{}, self->copies.time}, bar, self->number};
  auto& all = item.group.copies;
  for (auto& group : self->groups) all.insert(all.end(), group.copies.begin(), group.copies.end());
  all.insert(all.end(), self->copies.copies.begin(), self->copies.copies.end());
  self->copies.copies.clear(), self->groups.clear();
  self->block->pending_arrivals.push_back(std::move(item));
}
inline void cp_async_bulk(void* to, const void* from, unsigned bytes, uint64_t* bar) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  mbarrier_at(bar);
  const uint32_t time = check::bulk(to, from, bytes, bar);
  self->block->bulk_copies.push_back({{to, from, bytes}, bar, time});
}

// ---- shared memory ----

inline char* at(unsigned address) { return self->block->base + address; }
inline unsigned address(const void* p) {
  check::Quiet quiet;
  const char* c = (const char*)p;
  Block& b = *self->block;
  if (c < b.base || c >= b.base + STATIC + b.dynamic) fail("an address outside shared memory");
  return unsigned(c - b.base);
}
inline char* dynamic() { return self->block->base; }
template <class T>
T& declared(int place) {
  check::Quiet quiet;
  Block& b = *self->block;
  auto found = b.declared.find(place);
  if (found == b.declared.end()) {
    b.used = (b.used + 127) / 128 * 128;
    found = b.declared.emplace(place, b.used).first;
    b.used += sizeof(T);
    if (b.used > STATIC) fail("more declared shared memory than a block has");
    check::declared(b.used);
  }
  return *(T*)(b.base + b.dynamic + found->second);
}

}  // namespace machine
