// Detector of out-of-bounds accesses and data races in emulated kernels. Replaces the runtime of
// -fsanitize=thread: loads and stores of kernels arrive as calls (sanitizer.h).
//
// Races are found by vector clocks. Each agent has a clock: a thread, a thread's cp.async, the bulk
// copies on one mbarrier, a warp's wgmmas. An access is (agent, time). It happens before another
// access if the agent of the latter knows that time. Knowledge passes at barriers, mbarriers,
// __syncwarp, counters with release / acquire, and waits for asynchronous work; not at shuffles and
// votes. Bulk copies and wgmma use the async proxy: they know writes of threads to shared memory
// only after a proxy fence. In addition, compute-sanitizer's racecheck takes an arrival at an
// mbarrier to cover the arriving thread's own accesses only, not those of its warp before a
// __syncwarp; such cases are reported separately. Each 4-byte word keeps the accesses that no later
// one replaces. The happens-before table is in README.md.
#define CHECKED
#include "check.h"
#include <algorithm>
#include <array>
#include <elf.h>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

extern const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden")));
[[noreturn]] void stop_machine(const char* why);

namespace check {

volatile bool active = false;

namespace {

using u32 = uint32_t;
const char* const image = (const char*)&__ehdr_start;
const char* const image_end = [] {  // code and data of this library
  size_t end = 0;
  const auto* parts = (const Elf64_Phdr*)(image + __ehdr_start.e_phoff);
  for (int i = 0; i < __ehdr_start.e_phnum; ++i)
    if (parts[i].p_type == PT_LOAD)
      end = std::max<size_t>(end, parts[i].p_vaddr + parts[i].p_memsz);
  return image + end;
}();
constexpr unsigned MAX_READERS = 24;  // remembered per word of global memory
constexpr size_t MAX_REPORTS = 12, PAGE = 1024, DEPTH = 64;

using Clock = std::vector<u32>;  // time by agent
void raise(Clock& all, u32 agent, u32 time) {
  if (all.size() <= agent) all.resize(agent + 8);
  all[agent] = std::max(all[agent], time);
}
void join(Clock& all, const Clock& more) {
  if (all.size() < more.size()) all.resize(more.size());
  u32* to = all.data();
  const u32* from = more.data();
  for (size_t i = 0, n = more.size(); i < n; ++i) to[i] = std::max(to[i], from[i]);
}
bool has(const Clock& all, u32 agent, u32 time) { return agent < all.size() && all[agent] >= time; }

struct Knowledge {
  Clock own, fenced,
      told;  // agents of this block; before the last proxy fence; as racecheck sees it
  std::map<unsigned, std::shared_ptr<const Clock>> others;  // of other blocks
  void take(unsigned block, const std::shared_ptr<const Clock>& times) {
    auto& mine = others[block];
    if (!mine) mine = times;
    if (mine == times) return;
    auto both = std::make_shared<Clock>(*mine);
    join(*both, *times);
    mine = both;
  }
  void take(const Knowledge& more) {
    join(own, more.own), join(fenced, more.fenced), join(told, more.told);
    for (auto& [block, times] : more.others) take(block, times);
  }
};

struct SyncPoint {  // a barrier, mbarrier or warp
  Knowledge come, opened;
  u32 agent = 0, time = 0;  // of bulk copies
};

struct Actor {
  Knowledge known;
  std::vector<u32> calls;  // of `call_paths`
  size_t depth = 0;
  u32 copies = 0, copy_time = 0;      // agent, time
  u32 products = 0, product_time = 0;
};

enum Kind : uint8_t { READ, WRITE, ATOMIC };
struct Access {
  u32 time, block, agent, next, at, from;  // at: place in the code; from: its path of calls
  Kind kind;
  uint8_t bytes;  // of the word
};
std::vector<Access> pool;
u32 free_list = 0;

struct Block {
  std::vector<Actor> actors;
  std::vector<u32> owner;  // thread of each agent
  std::vector<char> what;
  std::unordered_map<const void*, SyncPoint> places;
  const char *base = nullptr, *own_from = nullptr, *own_to = nullptr;
  size_t dynamic = 0, rounded = 0, declared = 0;
  std::vector<u32> words;

  u32 agent(u32 thread, char kind) {
    owner.push_back(thread), what.push_back(kind);
    return u32(owner.size() - 1);
  }
};

struct Range {
  const char *from, *to;
  std::vector<std::unique_ptr<std::array<u32, PAGE>>> pages;
};

std::vector<Range> ranges;
std::map<unsigned, Block> blocks;
std::map<const void*, Knowledge> flags;
std::vector<std::string> reports;
std::vector<std::tuple<u32, u32, Kind, u32, u32, Kind>> seen;
std::string text;
const char *stacks, *stacks_end, *own_from, *own_to;  // the machine's
Block* block_now;
Actor* actor;
unsigned block_id, thread_id;
size_t last_range;

struct AgentTime {  // the agent of an access, and its time
  u32 agent, time;
};

std::string hex(u32 x) {
  char out[16];
  snprintf(out, sizeof out, "@%x", x);
  return out;
}
std::string place_of(const void* p) {
  const char* c = (const char*)p;
  if (c >= block_now->base && c < block_now->base + block_now->rounded)
    return "shared memory + " + std::to_string(c - block_now->base);
  if (c >= block_now->base && c < block_now->base + block_now->rounded + block_now->declared)
    return "declared shared memory + " + std::to_string(c - block_now->base - block_now->rounded);
  for (const Range& r : ranges)
    if (c >= r.from && c < r.to)
      return "tensor " + std::to_string(&r - ranges.data()) + " + " + std::to_string(c - r.from);
  return "no memory of this launch";
}
u32 place_in_code(const void* pc) { return u32((const char*)pc - image); }
std::vector<std::pair<u32, u32>> call_paths{{0, 0}};  // (path before, place in the code)
std::unordered_map<uint64_t, u32> path_numbers;
u32 path(u32 before, u32 place) {
  auto [found, added] = path_numbers.try_emplace((uint64_t)before << 32 | place, call_paths.size());
  if (added) call_paths.emplace_back(before, place);
  return found->second;
}
u32 caller() { return actor->depth ? actor->calls[std::min(actor->depth, DEPTH) - 1] : 0; }

std::string story(unsigned block, u32 agent, Kind kind, u32 at, u32 from) {
  static const char* const names[] = {"read", "write", "atomic"};
  std::string who = "block " + std::to_string(block);
  auto found = blocks.find(block);
  if (found != blocks.end()) {
    const char what = found->second.what[agent];
    who += " thread " + std::to_string(found->second.owner[agent]);
    if (what) who += what == 'c' ? ", its copy" : what == 'b' ? ", a bulk copy" : ", a product";
  }
  std::string way = hex(at);
  for (; from; from = call_paths[from].first) way += " " + hex(call_paths[from].second);
  return std::string(names[kind]) + " by " + who + " in {" + way + "}";
}
void report(const std::string& what) {
  if (reports.size() < MAX_REPORTS) reports.push_back(what);
}

bool other_proxy(u32 agent) {
  const char what = block_now->what[agent];
  return what == 'b' || what == 'p';
}

void touch(u32& head, AgentTime by, Kind kind, uint8_t mask, const char* word, u32 at,
           bool global) {
  const Knowledge& known = actor->known;
  const bool other = !global && other_proxy(by.agent);
  u32 readers = 0, *link = &head;
  for (u32 i = head; i; i = *link) {
    Access& a = pool[i];
    if (!(a.bytes & mask)) {
      link = &a.next;
      continue;
    }
    bool later;
    if (a.block == block_id) {
      const bool fence = other && a.kind != READ && !other_proxy(a.agent);
      later = has(fence ? known.fenced : known.own, a.agent, a.time);
    } else {
      auto found = known.others.find(a.block);
      later = found != known.others.end() && has(*found->second, a.agent, a.time);
    }
    const bool threads = a.block == block_id && !global && !block_now->what[by.agent] &&
        !block_now->what[a.agent];
    const bool told = later && (!threads || has(known.told, a.agent, a.time));
    if (!told && (a.kind != kind || kind == WRITE)) {
      const auto key = std::make_tuple(a.at, a.from, a.kind, at, caller(), kind);
      if (std::find(seen.begin(), seen.end(), key) == seen.end()) {
        seen.push_back(key);
        report((later ? "race, as racecheck has it, in " : "race in ") + place_of(word) + ": " +
               story(block_id, by.agent, kind, at, caller()) +
               ", not after " + story(a.block, a.agent, a.kind, a.at, a.from));
      }
    }
    const bool replaced = (a.bytes & ~mask) == 0 &&
        (kind == WRITE || (a.kind == kind && (told || (a.agent == by.agent && a.block == block_id))));
    if (replaced) {
      *link = a.next;
      a.next = free_list, free_list = i;
      continue;
    }
    readers += a.kind == READ;
    link = &a.next;
  }
  if (global && kind == READ && readers >= MAX_READERS) return;
  u32 i = free_list;
  if (i) {
    free_list = pool[i].next;
  } else {
    i = u32(pool.size());
    pool.emplace_back();
  }
  pool[i] = {by.time, block_id, by.agent, head, at, caller(), kind, mask};
  head = i;
}

template <class Head>
void each_word(const char* p, size_t bytes, Head head) {
  while (bytes) {
    const size_t skip = (uintptr_t)p % 4, n = std::min(bytes, 4 - skip);
    head(p - skip, uint8_t(((1 << n) - 1) << skip));
    p += n, bytes -= n;
  }
}

[[noreturn]] void outside(const char* p, size_t bytes, Kind kind, AgentTime by, u32 at) {
  report("out of bounds, " + std::to_string(bytes) + " bytes, " + place_of(p) + ": " +
         story(block_id, by.agent, kind, at, caller()));
  stop_machine("stopped");
}

bool in_range(size_t i, const char* p) { return p >= ranges[i].from && p < ranges[i].to; }

void access(const void* address, size_t bytes, Kind kind, AgentTime by, u32 at) {
  const char* p = (const char*)address;
  if (!bytes || (p >= stacks && p < stacks_end) || (p >= image && p < image_end) ||
      (p >= own_from && p < own_to))
    return;
  Block& b = *block_now;
  if (p >= b.own_from && p < b.own_to) return;
  if (p >= b.base && p < b.base + b.rounded + b.declared) {
    const size_t from = p - b.base, to = from + bytes;
    if (to > b.rounded + b.declared || (from < b.rounded && to > b.dynamic))
      outside(p, bytes, kind, by, at);
    each_word(p, bytes, [&](const char* word, uint8_t mask) {
      touch(b.words[(word - b.base) / 4], by, kind, mask, word, at, false);
    });
    return;
  }
  if (last_range >= ranges.size() || !in_range(last_range, p)) {
    for (last_range = 0; last_range < ranges.size() && !in_range(last_range, p); ++last_range) {
    }
    if (last_range == ranges.size()) outside(p, bytes, kind, by, at);
  }
  Range& r = ranges[last_range];
  if (p + bytes > r.to) outside(p, bytes, kind, by, at);
  const char* start = r.from - (uintptr_t)r.from % 4;
  each_word(p, bytes, [&](const char* word, uint8_t mask) {
    const size_t i = (word - start) / 4;
    auto& page = r.pages[i / PAGE];
    if (!page) page = std::make_unique<std::array<u32, PAGE>>(), page->fill(0);
    touch((*page)[i % PAGE], by, kind, mask, word, at, true);
  });
}

AgentTime me() { return {thread_id, actor->known.own[thread_id]}; }
void tick() { ++actor->known.own[thread_id], ++actor->known.told[thread_id]; }

}  // namespace

void start(const uint64_t* given, size_t n, const char* from, size_t bytes) {
  ranges.clear(), blocks.clear(), flags.clear(), reports.clear(), seen.clear();
  pool.assign(1, {}), free_list = 0, last_range = 0;
  stacks = from, stacks_end = from + bytes, own_from = own_to = nullptr;
  for (size_t i = 0; i < n; ++i) {
    const char* p = (const char*)given[2 * i];
    bool known = false;
    for (Range& r : ranges) known |= r.from == p;
    if (known) continue;
    ranges.push_back({p, p + given[2 * i + 1], {}});
    ranges.back().pages.resize((given[2 * i + 1] + 4) / 4 / PAGE + 1);
  }
}
const char* finish() {
  std::vector<Access>().swap(pool);
  ranges.clear(), blocks.clear(), flags.clear();
  text.clear();
  for (const std::string& one : reports) text += (text.empty() ? "" : "\n  ") + one;
  return text.empty() ? nullptr : text.c_str();
}
void block(unsigned id, unsigned threads, const char* base, size_t dynamic, size_t rounded,
           const void* from, const void* to) {
  Block& b = blocks[id];
  b.own_from = (const char*)from, b.own_to = (const char*)to;
  b.base = base, b.dynamic = dynamic, b.rounded = rounded;
  b.words.assign((rounded + (64 << 10)) / 4, 0);
  b.actors.resize(threads);
  for (u32 t = 0; t < threads; ++t) {
    b.agent(t, 0);
    b.actors[t].calls.resize(DEPTH);
  }
  for (u32 t = 0; t < threads; ++t) {
    raise(b.actors[t].known.own, t, 1);
    raise(b.actors[t].known.told, t, 1);
  }
}
void own(const void* from, const void* to) { own_from = (const char*)from, own_to = (const char*)to; }
void declared(size_t used) { block_now->declared = std::max(block_now->declared, used); }
void leave_block(unsigned id) {  // its accesses and agents are kept for reports
  Block& b = blocks[id];
  b.places.clear(), b.actors.clear(), b.words.clear();
}
void current(unsigned id, unsigned thread) {
  block_id = id, thread_id = thread;
  block_now = &blocks[id];
  actor = &block_now->actors[thread];
}

#define HERE place_in_code(__builtin_return_address(0))
void read(const void* p, size_t n) { if (active) access(p, n, READ, me(), HERE); }
void write(const void* p, size_t n) { if (active) access(p, n, WRITE, me(), HERE); }
void atomic(const void* p, size_t n) { if (active) access(p, n, ATOMIC, me(), HERE); }

void barrier_arrive(const void* place) {
  block_now->places[place].come.take(actor->known);
  tick();
}
void mbarrier_arrive(const void* place) {
  Knowledge& come = block_now->places[place].come;
  Clock told = come.told;
  raise(told, thread_id, actor->known.told[thread_id]);
  come.take(actor->known);
  come.told = std::move(told);
  tick();
}
void barrier_release(const void* place) {
  SyncPoint& p = block_now->places[place];
  p.opened = std::move(p.come);
  p.come = {};
}
void barrier_pass(const void* place) { actor->known.take(block_now->places[place].opened); }

void release(const void* flag) {
  Knowledge& f = flags[flag];
  f.take(block_id, std::make_shared<const Clock>(actor->known.own));
  for (auto& [other, times] : actor->known.others) f.take(other, times);
  tick();
}
void acquire(const void* flag) {
  auto found = flags.find(flag);
  if (found == flags.end()) return;
  for (auto& [other, times] : found->second.others) {
    if (other == block_id) {
      join(actor->known.own, *times);
      join(actor->known.told, *times);
    } else {
      actor->known.take(other, times);
    }
  }
}

void proxy_fence() {
  if (actor) join(actor->known.fenced, actor->known.own);
}

uint32_t copy(const void* to, const void* from, size_t bytes) {
  if (!actor->copies) actor->copies = block_now->agent(thread_id, 'c');
  const AgentTime by = {actor->copies, ++actor->copy_time};
  access(from, bytes, READ, by, HERE);
  access(to, bytes, WRITE, by, HERE);
  return by.time;
}
void copied(uint32_t until) {
  if (until) raise(actor->known.own, actor->copies, until);
}
uint32_t bulk(const void* to, const void* from, size_t bytes, const void* barrier) {
  SyncPoint& p = block_now->places[barrier];
  if (!p.agent) p.agent = block_now->agent(thread_id, 'b');
  const AgentTime by = {p.agent, ++p.time};
  access(from, bytes, READ, by, HERE);
  access(to, bytes, WRITE, by, HERE);
  return by.time;
}
void arrived_bulk(unsigned id, const void* barrier, uint32_t until) {
  SyncPoint& p = blocks[id].places[barrier];
  raise(p.come.own, p.agent, until);
}
void arrived_copies(unsigned id, const void* barrier, unsigned thread, uint32_t until) {
  Block& b = blocks[id];
  if (until) raise(b.places[barrier].come.own, b.actors[thread].copies, until);
}

void wgmma_reads(const void* p, size_t bytes) {
  Actor& first = block_now->actors[thread_id / 32 * 32];
  if (!first.products) first.products = block_now->agent(thread_id / 32 * 32, 'p');
  access(p, bytes, READ, {first.products, actor->product_time + 1}, HERE);
}
void wgmma_commit() { ++actor->product_time; }
void wgmma_wait(unsigned newest) {
  const Actor& first = block_now->actors[thread_id / 32 * 32];
  if (first.products && actor->product_time > newest)
    raise(actor->known.own, first.products, actor->product_time - newest);
}

}  // namespace check

#include "sanitizer.h"
