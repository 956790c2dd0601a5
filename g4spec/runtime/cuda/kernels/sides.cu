// How long a multiprocessor waits for places in L2: which of them are at its side.
#include "ptx.cuh"

// Cycles of FOUR additions of nothing, one after the other, to each of `count` places, the least of
// ROUNDS. Atomic ones are done where a place belongs, never in a copy nearby. One multiprocessor
// measures; blocks on others stay for a while, so that each has one.
__global__ void latency(u8* base, const i64* offsets, int count, u32 processor, int* out) {
  constexpr int FOUR = 4, ROUNDS = 8;
  constexpr u32 PLACED = 20000;  // cycles until every block has begun
  if (threadIdx.x) return;
  const u32 began = cycles();
  if (multiprocessor() != processor) {
    while (cycles() - began < PLACED) {
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    u32* p = (u32*)(base + offsets[i]);
    u32 least = FULL, x = atomicAdd(p, 0u);
    for (int round = 0; round < ROUNDS; ++round) {
      const u32 from = cycles();
#pragma unroll
      for (int j = 0; j < FOUR; ++j) x = atomicAdd(p + (x == FULL), 0u);  // waits for x
      const u32 took = now(cycles() + (x == FULL)) - from;
      least = took < least ? took : least;
    }
    out[i] = (int)least;
  }
}
