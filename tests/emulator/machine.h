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

struct Block;

struct Warp {
  Gate gate;
  const char* doing = nullptr;
  void* lanes[32];
};

struct Thread {
  jmp_buf here;
  Index index;
  int lane = 0;
  bool done = false, started = false;
  const uint64_t* wait = nullptr;  // goes on once this is no longer `seen`
  uint64_t seen = 0;
  const char* what = "";
  Block* block = nullptr;
  Warp* warp = nullptr;
  std::vector<Copy> copies;                // not yet of a group
  std::vector<std::vector<Copy>> groups;
};

struct Block {
  Index index;
  int live = 0;
  std::vector<char> memory;  // shared: dynamic, then declared
  char* base = nullptr;
  std::map<int, size_t> declared;  // by place in the source
  size_t used = 0, dynamic = 0;
  Gate named[16];
  std::map<uint64_t*, Phases> barriers;
  std::vector<std::pair<Copy, uint64_t*>> flying;  // on their way
  std::vector<std::pair<std::vector<Copy>, uint64_t*>> arriving;  // copies, then an arrival
  std::vector<Thread> threads;
  std::vector<Warp> warps;
};

struct Failure {
  std::string text;
};

inline Thread* self;
inline Index block_size, grid_size;
inline jmp_buf scheduler;
inline std::mt19937 chance;
inline const std::function<void()>* body;
inline std::string failed;

[[noreturn]] inline void fail(const std::string& text) {
  if (failed.empty())
    failed = text + " (block " + std::to_string(self->block->index.x) + ", thread " +
             std::to_string(self->index.x) + ")";
  _longjmp(scheduler, 1);
}

inline void leave() {
  if (_setjmp(self->here) == 0) _longjmp(scheduler, 1);
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

inline int meet(int id, int threads, bool stay, int add = 0) {
  Gate& gate = self->block->named[id];
  gate.sum += add;
  if (++gate.count == threads) {
    open(gate);
  } else if (stay) {
    wait_while(gate.opened, gate.opened, "barrier");
  }
  return gate.last;
}

// ---- mbarriers ----

inline Phases& phases(uint64_t* bar) {
  auto& all = self->block->barriers;
  auto found = all.find(bar);
  if (found == all.end()) fail("a barrier that was not initialised");
  return found->second;
}
inline void settle(Phases& b) {
  if (b.pending < 0) b.pending = 0, failed = "more arrivals than a barrier expects";
  if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.expected;
}
inline void arrive(uint64_t* bar, int64_t bytes = 0) {
  Phases& b = phases(bar);
  b.bytes += bytes;
  --b.pending;
  settle(b);
}

// One piece of what is on its way arrives.
inline bool deliver(Block& block) {
  if (!block.flying.empty()) {
    size_t i = chance() % block.flying.size();
    auto [copy, bar] = block.flying[i];
    block.flying.erase(block.flying.begin() + i);
    copy.run();
    Phases& b = block.barriers[bar];
    b.bytes -= copy.bytes;
    settle(b);
    return true;
  }
  if (!block.arriving.empty()) {
    size_t i = chance() % block.arriving.size();
    auto item = block.arriving[i];
    block.arriving.erase(block.arriving.begin() + i);
    for (const Copy& copy : item.first) copy.run();
    Phases& b = block.barriers[item.second];
    --b.pending;
    settle(b);
    return true;
  }
  return false;
}

// ---- copies of a thread ----

inline void wait_copies(size_t newest) {
  auto& groups = self->groups;
  while (groups.size() > newest) {
    for (const Copy& copy : groups.front()) copy.run();
    groups.erase(groups.begin());
  }
}
inline void commit_copies() {
  self->groups.push_back(std::move(self->copies));
  self->copies.clear();
  // Any of them may have arrived by now.
  if (chance() % 4 == 0) for (const Copy& copy : self->groups.back()) copy.run();
}

// ---- shared memory ----

inline char* at(unsigned address) { return self->block->base + address; }
inline unsigned address(const void* p) {
  const char* c = (const char*)p;
  Block& b = *self->block;
  if (c < b.base || c >= b.base + STATIC + b.dynamic) fail("an address outside shared memory");
  return unsigned(c - b.base);
}
inline char* dynamic() { return self->block->base; }
template <class T>
T& declared(int place) {
  Block& b = *self->block;
  auto found = b.declared.find(place);
  if (found == b.declared.end()) {
    b.used = (b.used + 127) / 128 * 128;
    found = b.declared.emplace(place, b.used).first;
    b.used += sizeof(T);
    if (b.used > STATIC) fail("more declared shared memory than a block has");
  }
  return *(T*)(b.base + b.dynamic + found->second);
}

// ---- running ----

inline void enter() {
  (*body)();
  Thread* me = self;
  me->done = true;
  Block& b = *me->block;
  --b.live;
  if (me->warp->gate.count) failed = std::string("a lane left before ") + me->warp->doing;
  if (b.named[0].count && b.named[0].count == b.live) open(b.named[0]);
  _longjmp(scheduler, 1);
}

inline void resume(Thread& t, char* stack) {
  self = &t;
  if (_setjmp(scheduler)) return;
  if (t.started) _longjmp(t.here, 1);
  t.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack = {stack, 0, STACK};
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

inline void prepare(Block& b, Index index, size_t dynamic) {
  const unsigned n = block_size.x * block_size.y * block_size.z;
  b.index = index;
  b.live = n;
  b.dynamic = (dynamic + 1023) / 1024 * 1024;
  b.memory.assign(STATIC + b.dynamic + 1024, char(0xff));
  b.base = (char*)(((uintptr_t)b.memory.data() + 1023) / 1024 * 1024);
  b.threads.resize(n);
  b.warps.resize((n + 31) / 32);
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = b.threads[i];
    t.index = {i % block_size.x, i / block_size.x % block_size.y,
               i / block_size.x / block_size.y};
    t.lane = i % 32, t.block = &b, t.warp = &b.warps[i / 32];
  }
}

// Runs blocks side by side to their end; false after a failure.
inline bool finish(std::vector<Block>& blocks, std::vector<char>& stacks) {
  const size_t n = block_size.x * block_size.y * block_size.z, warps = (n + 31) / 32;
  std::vector<size_t> order(blocks.size() * warps);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (;;) {
    std::shuffle(order.begin(), order.end(), chance);
    bool moved = false, left = false;
    for (size_t w : order) {
      Block& b = blocks[w / warps];
      for (size_t i = w % warps * 32; i < n && i < (w % warps + 1) * 32; ++i) {
        Thread& t = b.threads[i];
        if (t.done) continue;
        left = true;
        if (t.wait && *t.wait == t.seen) continue;
        moved = true;
        resume(t, stacks.data() + (w / warps * n + i) * STACK);
        if (!failed.empty()) return false;
      }
      if (chance() % 4 == 0) moved |= deliver(b);
    }
    if (!left) return true;
    if (moved) continue;
    for (Block& b : blocks) moved |= deliver(b);
    if (moved) continue;
    for (Block& b : blocks)
      for (Thread& t : b.threads)
        if (!t.done) {
          failed = std::string("nothing goes on: thread ") + std::to_string(t.index.x) +
                   " of block " + std::to_string(b.index.x) + " waits for " + t.what;
          return false;
        }
  }
}

inline const char* run(Index grid, Index block, size_t dynamic, unsigned seed,
                       const std::function<void()>& call) {
  grid_size = grid, block_size = block, body = &call;
  chance.seed(seed);
  failed.clear();
  const size_t n = block.x * block.y * block.z, all = size_t(grid.x) * grid.y * grid.z;
  static std::vector<char> stacks;
  stacks.resize(std::max(stacks.size(), n * std::min<size_t>(all, RESIDENT) * STACK));
  for (size_t from = 0; from < all; from += RESIDENT) {
    std::vector<Block> blocks(std::min<size_t>(RESIDENT, all - from));
    for (size_t i = 0; i < blocks.size(); ++i) {
      const unsigned b = unsigned(from + i);
      prepare(blocks[i], {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y}, dynamic);
    }
    if (!finish(blocks, stacks)) return failed.c_str();
  }
  return nullptr;
}

template <class... A, size_t... I>
void apply(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(A*)args[I]...);
}
template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block,
                   size_t dynamic, unsigned seed, void** args) {
  return run({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, dynamic, seed,
             [&] { apply(kernel, args, std::index_sequence_for<A...>()); });
}
template <class... A>
int sizes(void (*)(A...), int* out) {
  int i = 0;
  ((out[i++] = sizeof(A)), ...);
  return i;
}

}  // namespace machine
