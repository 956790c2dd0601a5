#include "ptx.cuh"

// The state of a sequence between cycles, int64 in device memory.
struct State {
  i64 position;  // of row 0 of the next step
  i64 anchor;    // the token of that row
  i64 accepted;  // drafted tokens that held in the last cycle
  i64 rows;      // rows of the step that count, anchor included
  i64 turn;      // which of the host's places the next cycle is told to
};

// A step read ids [rows] (the anchor, then what was drafted) and chose `chosen` [rows]: commits the
// choices up to the first one that was not drafted, which becomes the next anchor.
//
// forced: null, or how many drafts to accept whatever they are (for measurements).
// seen: null, or memory of the host [turns, size]: the state and what lies behind it, as they are then.
__global__ void accept(const i64* chosen, const i64* ids, State* state, const i64* forced,
                       int rows, i64* seen, int turns, int size) {
  grid_launch();
  grid_wait();
  const int i = threadIdx.x;
  const int used = (int)min((i64)rows, state->rows);
  bool held = i < used - 1 && chosen[i] == ids[i + 1];
  if (forced) held = i < used - 1 && i < *forced;
  const int n = __ffs(~__ballot_sync(FULL, held)) - 1;
  const i64 position = state->position + n + 1, anchor = chosen[n], turn = state->turn;
  __syncwarp();
  if (i == 0) state->position = position, state->anchor = anchor, state->accepted = n;
  if (!seen) return;
  __syncwarp();
  for (int k = i; k < size; k += 32) seen[turn * size + k] = __ldcg((const i64*)state + k);
  __syncwarp();
  if (i == 0) state->turn = turn + 1 < turns ? turn + 1 : 0;
}

// Where the next step stands: its first token, masks behind it, and their positions [room].
__global__ void place(const State* state, i64* ids, i64* positions, int room, i64 mask) {
  const int i = threadIdx.x;
  if (i >= room) return;
  ids[i] = i ? mask : state->anchor;
  positions[i] = state->position + i;
}
