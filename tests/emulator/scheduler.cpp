// Scheduler: runs the blocks of a launch, up to RESIDENT concurrently, resuming warps in random
// order.
#include "scheduler.h"
#include "state.h"
#include <algorithm>
#include <sys/mman.h>

namespace machine {
namespace {

void enter() {
  (*body)();
  Thread* me = self;
  me->done = true;
  Block& b = *me->block;
  --b.live;
  if (me->warp->barrier.count) failed = std::string("a lane left before ") + me->warp->doing;
  if (b.named[0].count && b.named[0].count == b.live)
    open(b.named[0]), check::barrier_release(&b.named[0]);
  _longjmp(scheduler, 1);
}

// Lanes use their stacks in step. At equal offsets, these would share a few lines of the caches: the
// stack of each next lane begins 13 lines lower.
constexpr size_t COLOR = 13 * 64;

// Run `enter` on the stack that ends at `top`; it never returns.
[[noreturn]] void begin(char* top) {
#ifdef __x86_64__  // without the system calls that contexts make
  asm volatile("mov %0, %%rsp\n\txor %%ebp, %%ebp\n\tcall *%1" ::"r"(top), "r"(&enter)
               : "memory");
  __builtin_unreachable();
#else
  ucontext_t context;
  getcontext(&context);
  context.uc_stack = {top - STACK / 2, 0, STACK / 2};
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
  std::abort();
#endif
}

void resume(Thread& t, char* stack) {
  self = &t;
  check::current(t.block->id, t.number);
  if (_setjmp(scheduler)) return;
  if (t.started) _longjmp(t.here, 1);
  t.started = true;
  begin(stack + STACK - t.number % 32 * COLOR);
}

void prepare(Block& b, unsigned id, Index index, size_t dynamic) {
  const unsigned n = block_size.x * block_size.y * block_size.z;
  b.index = index, b.id = id;
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
    t.number = i, t.lane = i % 32, t.block = &b, t.warp = &b.warps[i / 32];
  }
  check::block(id, n, b.base, dynamic, b.dynamic, b.threads.data(), b.threads.data() + n);
}

// Run blocks concurrently until all threads end; return false after a failure.
bool finish(std::vector<Block>& blocks, char* stacks) {
  const size_t n = block_size.x * block_size.y * block_size.z, warps = (n + 31) / 32;
  std::vector<size_t> order(blocks.size() * warps);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const unsigned slow = 1u << random_engine() % 16;  // mean delay of copies in this launch
  for (;;) {
    std::shuffle(order.begin(), order.end(), random_engine);
    bool moved = false, left = false;
    for (size_t w : order) {
      Block& b = blocks[w / warps];
      for (size_t i = w % warps * 32; i < n && i < (w % warps + 1) * 32; ++i) {
        Thread& t = b.threads[i];
        if (t.done) continue;
        left = true;
        if (t.wait && *t.wait == t.seen) continue;
        moved = true;
        resume(t, stacks + (w / warps * n + i) * STACK);
        if (!failed.empty()) return false;
      }
      if (random_engine() % slow == 0) moved |= deliver_one(b);
    }
    if (!left) return true;
    if (moved) continue;
    for (Block& b : blocks) moved |= deliver_one(b);
    if (moved) continue;
    for (Block& b : blocks)
      for (Thread& t : b.threads)
        if (!t.done) {
          failed = std::string("deadlock: thread ") + std::to_string(t.index.x) + " of block " +
                   std::to_string(b.index.x) + " waits for " + t.what;
          return false;
        }
  }
}

}  // namespace

char* reserve() {
  const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, RESIDENT * 1024 * STACK, PROT_READ | PROT_WRITE, kind, -1, 0);
  if (p == MAP_FAILED) std::abort();
  return (char*)p;
}

const char* run(Index grid, Index block, size_t dynamic, unsigned seed, char* stacks,
                const std::function<void()>& call) {
  grid_size = grid, block_size = block, body = &call;
  random_engine.seed(seed);
  failed.clear();
  const size_t n = block.x * block.y * block.z, all = size_t(grid.x) * grid.y * grid.z;
  if (n > 1024) std::abort();
  check::start(watched, watched_count, stacks, n * std::min<size_t>(all, RESIDENT) * STACK);
  for (size_t from = 0; from < all; from += RESIDENT) {
    std::vector<Block> blocks(std::min<size_t>(RESIDENT, all - from));
    check::own(blocks.data(), blocks.data() + blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      const unsigned b = unsigned(from + i);
      prepare(blocks[i], b, {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y}, dynamic);
    }
    const bool ended = finish(blocks, stacks);
    for (const Block& b : blocks) check::leave_block(b.id);
    if (!ended) break;
  }
  if (const char* found = check::finish()) failed = found;
  return failed.empty() ? nullptr : failed.c_str();
}

}  // namespace machine
