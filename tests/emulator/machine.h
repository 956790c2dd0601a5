// Blocks of CUDA threads on one CPU thread: every thread is a fiber that runs until it waits for
// others. What hardware may do in any order is done in a random one: which warp goes on, and when
// an asynchronous copy arrives. Memory that nobody wrote holds NaN.
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

constexpr int RESIDENT = 24;         // blocks that run side by side
constexpr size_t STACK = 1 << 17;    // bytes of a thread
constexpr size_t STATIC = 64 << 10;  // bytes of a block's declared shared memory, behind the rest

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Gate {  // opens again and again; `count` are waiting
  uint64_t opened = 0;
  int count = 0, sum = 0, last = 0;
};

struct Phases {  // of an mbarrier
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

struct Group {  // of copies; `time` of the last in a checked run
  std::vector<Copy> copies;
  uint32_t time = 0;
};

struct Arrival {  // of a thread's copies, at a barrier
  Group group;
  uint64_t* bar;
  unsigned thread;
};

struct Block;

struct Warp {
  Gate gate;
  const char* doing = nullptr;
  void* lanes[32];
};

struct Thread {
  jmp_buf here;
  Index index;
  unsigned number = 0;
  int lane = 0;
  bool done = false, started = false;
  const uint64_t* wait = nullptr;  // goes on once this is no longer `seen`
  uint64_t seen = 0;
  const char* what = "";
  Block* block = nullptr;
  Warp* warp = nullptr;
  Group copies;  // not yet of a group
  std::vector<Group> groups;
};

struct Block {
  Index index;
  unsigned id = 0;
  int live = 0;
  std::vector<char> memory;  // shared: dynamic, then declared
  char* base = nullptr;
  std::map<int, size_t> declared;  // by place in the source
  size_t used = 0, dynamic = 0;
  Gate named[16];
  uint64_t registers = 0;  // that warps gave and none took, of each of their threads
  std::map<uint64_t*, Phases> barriers;
  struct Flying {
    Copy copy;
    uint64_t* bar;
    uint32_t time;
  };
  std::vector<Flying> flying;  // on their way
  std::vector<Arrival> arriving;
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
inline std::mt19937 chance;
inline const std::function<void()>* body;
inline std::string failed;

[[noreturn]] inline void fail(const std::string& text) {
  check::active = false;
  if (failed.empty())
    failed = text + " (block " + std::to_string(self->block->index.x) + ", thread " +
             std::to_string(self->index.x) + ")";
  _longjmp(scheduler, 1);
}

inline void leave() {
  const bool was = check::active;
  check::active = false;
  if (_setjmp(self->here) == 0) _longjmp(scheduler, 1);
  check::active = was;
}

inline void wait_while(const uint64_t& counter, uint64_t seen, const char* what) {
  Thread* me = self;
  me->wait = &counter, me->seen = seen, me->what = what;
  if (counter == seen) leave();
  me->wait = nullptr;
}

inline void open(Gate& gate) {
  gate.last = gate.sum;
  gate.sum = gate.count = 0;
  ++gate.opened;
}

// All lanes of a warp: the last to come runs `op` on what each brought.
template <class T, class Op>
void together(const char* what, T& mine, Op op) {
  check::Quiet quiet;
  Warp& w = *self->warp;
  if (w.gate.count == 0) w.doing = what;
  if (w.doing != what) fail(std::string(what) + " meets " + w.doing + " in one warp");
  w.lanes[self->lane] = &mine;
  if (++w.gate.count == 32) {
    op((T**)w.lanes);
    open(w.gate);
  } else {
    wait_while(w.gate.opened, w.gate.opened, what);
  }
}

inline int named_barrier_sync(int id, int threads, int add = 0) {
  check::Quiet quiet;
  Gate& gate = self->block->named[id];
  gate.sum += add;
  check::come(&gate);
  if (++gate.count == threads) {
    open(gate);
    check::open(&gate);
  } else {
    wait_while(gate.opened, gate.opened, "barrier");
  }
  check::go(&gate);
  return gate.last;
}

// ---- registers handed on ----

// Of a thread, at the start of a kernel that hands them on.
inline uint64_t first_registers() {
  const uint64_t threads = block_size.x * block_size.y * block_size.z;
  return std::min<uint64_t>(65536 / threads / 8 * 8, 168);
}
inline void give_registers(uint64_t kept) {
  check::Quiet quiet;
  if (self->lane == 0) self->block->registers += first_registers() - kept;
}
inline void take_registers(uint64_t wanted) {
  check::Quiet quiet;
  uint64_t& there = self->block->registers;
  if (self->lane) return;
  while (there < wanted - first_registers()) wait_while(there, there, "registers");
  there -= wanted - first_registers();
}

// ---- mbarriers ----

inline Phases& phases(uint64_t* bar) {
  auto& all = self->block->barriers;
  auto found = all.find(bar);
  if (found == all.end()) fail("a barrier that was not initialised");
  return found->second;
}
inline void settle(uint64_t* bar, Phases& b) {
  if (b.pending < 0) b.pending = 0, failed = "more arrivals than a barrier expects";
  if (b.pending || b.bytes) return;
  ++b.phase, b.pending = b.expected;
  check::open(bar);
}
inline void arrive(uint64_t* bar, int64_t bytes = 0) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  Phases& b = phases(bar);
  b.bytes += bytes;
  --b.pending;
  check::arrive(bar);
  settle(bar, b);
}
// Whether the phase of this parity has ended.
inline bool ended(uint64_t* bar, unsigned parity, bool wait) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  const Phases& b = phases(bar);
  while ((b.phase & 1) == parity) {
    if (!wait) return leave(), false;  // asked again
    wait_while(b.phase, b.phase, "mbarrier");
  }
  check::go(bar);
  return true;
}

// One piece of what is on its way arrives.
inline bool deliver(Block& block) {
  check::current(block.id, 0);
  if (!block.flying.empty()) {
    size_t i = chance() % block.flying.size();
    auto [copy, bar, time] = block.flying[i];
    block.flying.erase(block.flying.begin() + i);
    copy.run();
    Phases& b = block.barriers[bar];
    b.bytes -= copy.bytes;
    check::arrived_bulk(block.id, bar, time);
    settle(bar, b);
    return true;
  }
  if (!block.arriving.empty()) {
    size_t i = chance() % block.arriving.size();
    auto item = block.arriving[i];
    block.arriving.erase(block.arriving.begin() + i);
    // It waits for all copies that its thread began before, with which others wait as well.
    for (size_t j = 0; j < i; ++j) {
      auto& before = block.arriving[j];
      if (before.thread != item.thread) continue;
      for (const Copy& copy : before.group.copies) copy.run();
      before.group.copies.clear();
    }
    for (const Copy& copy : item.group.copies) copy.run();
    Phases& b = block.barriers[item.bar];
    --b.pending;
    check::arrived_copies(block.id, item.bar, item.thread, item.group.time);
    settle(item.bar, b);
    return true;
  }
  return false;
}

// ---- copies of a thread ----

inline void copy(void* to, const void* from, unsigned bytes) {
  check::Quiet quiet;
  Group& group = self->copies;
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
  // Any of them may have arrived by now.
  if (chance() % 4 == 0) for (const Copy& copy : self->groups.back().copies) copy.run();
}
// An arrival at a barrier once all copies so far are complete.
inline void arrive_copied(uint64_t* bar) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  phases(bar);
  Arrival item{{{}, self->copies.time}, bar, self->number};
  auto& all = item.group.copies;
  for (auto& group : self->groups) all.insert(all.end(), group.copies.begin(), group.copies.end());
  all.insert(all.end(), self->copies.copies.begin(), self->copies.copies.end());
  self->copies.copies.clear(), self->groups.clear();
  self->block->arriving.push_back(std::move(item));
}
inline void cp_async_bulk(void* to, const void* from, unsigned bytes, uint64_t* bar) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  phases(bar);
  const uint32_t time = check::bulk(to, from, bytes, bar);
  self->block->flying.push_back({{to, from, bytes}, bar, time});
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
