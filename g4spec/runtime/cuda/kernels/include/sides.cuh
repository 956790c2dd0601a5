// Weights whose chunks of 4 KB are where the memory's two sides are: see g4spec/runtime/cuda/sides.py.
#pragma once
#include "ptx.cuh"

constexpr u32 CHUNK = 4096;

// Bytes from `first` on of an allocation. Chunk n of its first half is in pair n of chunks, chunk n
// of its second half the other one of that pair; a bit of each pair says which.
struct Sided {
  const u8* base;
  const u32* second;  // bits: the first half's chunk is the second of its pair; null: in order
  u32 pairs;
  i64 first;

  DEVICE const u8* chunk(u32 n) const {
    const bool other = n >= pairs;
    const u32 pair = other ? n - pairs : n;
    const u32 place = (__ldg(second + pair / 32) >> pair % 32 & 1) ^ (u32)other;
    return base + (u64)(pair * 2 + place) * CHUNK;
  }
  DEVICE const u8* at(i64 offset) const {
    const u64 x = first + offset;
    return second ? chunk((u32)(x / CHUNK)) + x % CHUNK : base + x;
  }
};

// As arguments of a kernel, whose names end in x.
#define MATRIX(x) const u8 *weights##x, const u32 *second##x, i64 first##x, u32 pairs##x
#define SIDED(x) {weights##x, second##x, pairs##x, first##x}

// A lane's share of a copy of BYTES: at most a chunk.
struct Piece {
  const u8* from;
  u32 to, bytes;

  template <u32 BYTES>
  static DEVICE Piece of(const Sided& w, i64 offset, u32 number) {
    const u64 x = w.first + offset;
    if (!w.second) return {w.base + x, 0, number ? 0 : BYTES};
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
