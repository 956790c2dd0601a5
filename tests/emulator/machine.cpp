// The part of machine.h that does not depend on the kernel.
#include "state.h"
#include <algorithm>

namespace machine {

Thread* self;
Index block_size, grid_size;
const uint64_t* watched;
size_t watched_count;
jmp_buf scheduler;
std::mt19937 random_engine;
const std::function<void()>* body;
std::string failed;

void fail(const char* text) {
  check::active = false;
  if (failed.empty())
    failed = std::string(text) + " (block " + std::to_string(self->block->index.x) + ", thread " +
             std::to_string(self->index.x) + ")";
  _longjmp(scheduler, 1);
}
void fail(const char* text, unsigned number) {
  check::active = false;
  char whole[256];
  std::snprintf(whole, sizeof whole, text, number);
  fail(whole);
}
void fail_in_another_collective(const char* what) {
  check::active = false;
  fail((std::string(what) + " meets " + self->warp->doing + " in one warp").c_str());
}

int named_barrier_sync(int id, int threads, int add) {
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
static uint64_t initial_registers() {
  const uint64_t threads = block_size.x * block_size.y * block_size.z;
  return std::min<uint64_t>(65536 / threads / 8 * 8, 168);
}
void release_registers(uint64_t kept) {
  check::Quiet quiet;
  if (self->lane == 0) self->block->registers += initial_registers() - kept;
}
void acquire_registers(uint64_t wanted) {
  check::Quiet quiet;
  uint64_t& there = self->block->registers;
  if (self->lane) return;
  while (there < wanted - initial_registers()) wait_while(there, there, "registers");
  there -= wanted - initial_registers();
}

// ---- mbarriers ----

void init(uint64_t* bar, unsigned arrivals) {
  check::Quiet quiet;
  self->block->barriers[bar] = {0, 0, (int)arrivals, (int)arrivals};
}
static Mbarrier& mbarrier_at(uint64_t* bar) {
  auto& all = self->block->barriers;
  auto found = all.find(bar);
  if (found == all.end()) fail("a barrier that was not initialised");
  return found->second;
}
static void complete_if_done(uint64_t* bar, Mbarrier& b) {
  if (b.pending < 0) b.pending = 0, failed = "more arrivals than a barrier expects";
  if (b.pending || b.bytes) return;
  ++b.phase, b.pending = b.expected;
  check::barrier_release(bar);
}
void arrive(uint64_t* bar, int64_t bytes) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  Mbarrier& b = mbarrier_at(bar);
  b.bytes += bytes;
  --b.pending;
  check::mbarrier_arrive(bar);
  complete_if_done(bar, b);
}
void wait(uint64_t* bar, unsigned parity) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  const Mbarrier& b = mbarrier_at(bar);
  while ((b.phase & 1) == parity) wait_while(b.phase, b.phase, "mbarrier");
  check::barrier_pass(bar);
}

bool deliver_one(Block& block) {
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

void copy(void* to, const void* from, unsigned bytes) {
  check::Quiet quiet;
  CopyGroup& group = self->copies;
  group.copies.push_back({to, from, bytes});
  group.time = check::copy(to, from, bytes);
}
void cp_async_wait_group(size_t newest) {
  check::Quiet quiet;
  auto& groups = self->groups;
  while (groups.size() > newest) {
    for (const Copy& copy : groups.front().copies) copy.run();
    check::copied(groups.front().time);
    groups.erase(groups.begin());
  }
}
void cp_async_commit() {
  check::Quiet quiet;
  self->groups.push_back(self->copies);
  self->copies.copies.clear();
  // Committed copies may complete early.
  if (random_engine() % 4 == 0)
    for (const Copy& copy : self->groups.back().copies) copy.run();
}
void arrive_copied(uint64_t* bar) {
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
void cp_async_bulk(void* to, const void* from, unsigned bytes, uint64_t* bar) {
  check::atomic(bar, sizeof *bar);
  check::Quiet quiet;
  mbarrier_at(bar);
  const uint32_t time = check::bulk(to, from, bytes, bar);
  self->block->bulk_copies.push_back({{to, from, bytes}, bar, time});
}

// ---- shared memory ----

unsigned address(const void* p) {
  check::Quiet quiet;
  const char* c = (const char*)p;
  Block& b = *self->block;
  if (c < b.base || c >= b.base + STATIC + b.dynamic) fail("an address outside shared memory");
  return unsigned(c - b.base);
}
char* declare(int place, size_t bytes) {
  check::Quiet quiet;
  Block& b = *self->block;
  auto found = b.declared.find(place);
  if (found == b.declared.end()) {
    b.used = (b.used + 127) / 128 * 128;
    found = b.declared.emplace(place, b.used).first;
    b.used += bytes;
    if (b.used > STATIC) fail("more declared shared memory than a block has");
    check::declared(b.used);
  }
  return b.base + b.dynamic + found->second;
}

}  // namespace machine
