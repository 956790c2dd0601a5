// Weights whose chunks of 4 KB are where the memory's two sides are: see g4spec/runtime/cuda/sides.py.
#pragma once
#include "ptx.cuh"

constexpr u32 CHUNK = 4096, PAGE = 2 << 20;

// Bytes from `first` on of an allocation. Chunk n of its first half is the one of pair n at side 0,
// chunk n of its second half the other one.
struct Sided {
  const u8* base;
  u64 pages;        // side of each page's beginning, a bit each
  const u64* more;  // the same where there are more than 64 of them
  u32 mask;         // bits of a place in a page that change its side; 0: all is in order
  u32 pairs;
  i64 first;

  DEVICE const u8* chunk(u32 n) const {
    const bool other = n >= pairs;
    const u64 at = (u64)base + (u64)(other ? n - pairs : n) * (2 * CHUNK);
    const u32 page = (u32)(at / PAGE - (u64)base / PAGE);
    const u64 sides = more ? __ldg(more + page / 64) : pages;
    const u32 side = (__popc((u32)at & mask) ^ (u32)(sides >> page % 64) ^ (u32)other) & 1;
    return (const u8*)at + side * CHUNK;
  }
  DEVICE const u8* at(i64 offset) const {
    const u64 x = first + offset;
    return mask ? chunk((u32)(x / CHUNK)) + x % CHUNK : base + x;
  }
};

// As arguments of a kernel, whose names end in x.
#define MATRIX(x) \
  const u8 *weights##x, u64 pages##x, const u64 *more##x, u32 mask##x, u32 pairs##x, i64 first##x
#define SIDED(x) {weights##x, pages##x, more##x, mask##x, pairs##x, first##x}

// A lane's share of a copy of BYTES: at most a chunk.
struct Piece {
  const u8* from;
  u32 to, bytes;

  template <u32 BYTES>
  static DEVICE Piece of(const Sided& w, i64 offset, u32 number) {
    const u64 x = w.first + offset;
    if (!w.mask) return {w.base + x, 0, number ? 0 : BYTES};
    const u32 inside = (u32)x % CHUNK, end = inside + BYTES;
    const u32 begin = max(number * CHUNK, inside), until = min((number + 1) * CHUNK, end);
    if (begin >= until) return {nullptr, 0, 0};
    return {w.chunk((u32)(x / CHUNK) + number) + begin % CHUNK, begin - inside, until - begin};
  }
};

// Multiprocessors by the side they are at, and how the CTAs of a launch share its work so that each
// reads its own side: those of the work's first half are for side 0.
struct Draw {
  u32* drawn;  // by side, 16 bits each; zero between launches. Null: whoever comes
  u64 low, middle, high;  // sides of multiprocessors, a bit each

  // Number among the CTAs for the side that `side` names then, of which there are zero and
  // one, the last first.
  DEVICE int operator()(int zero, int one, int& side) const {
    __shared__ int found[2];
    if (threadIdx.x == 0) {
      const u32 sm = multiprocessor();
      const int mine = (sm < 64 ? low : sm < 128 ? middle : high) >> sm % 64 & 1;
      const u32 before = atomicAdd(drawn, mine ? 1u << 16 : 1u);
      const int number = mine ? before >> 16 : before & 0xffff;
      if ((before >> 16) + (before & 0xffff) == zero + one - 1) atomicExch(drawn, 0u);
      // Where a side has more multiprocessors than work, they take the other side's from the end.
      const int left = (mine ? one : zero) - 1 - number;
      found[0] = left >= 0 ? left : -1 - left;
      found[1] = left >= 0 ? mine : !mine;
    }
    __syncthreads();
    side = found[1];
    return found[0];
  }
};
