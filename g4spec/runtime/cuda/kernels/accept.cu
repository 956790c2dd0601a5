#include "ptx.cuh"

// The state of a sequence between cycles, int64 in device memory.
struct State {
  i64 position;  // of row 0 of the next step
  i64 anchor;    // the token of that row
  i64 accepted;  // drafted tokens that held in the last cycle
  i64 rows;      // rows of the step that count, anchor included
};

// A step read ids [rows] (the anchor, then what was drafted) and chose `chosen` [rows]: commits the
// choices up to the first one that was not drafted, which becomes the next anchor.
//
// forced: null, or how many drafts to accept whatever they are (for measurements).
// next_ids: [1 or more] or null, gets the anchor. next_positions: [room] or null, gets
// position, position + 1, ...
__global__ void accept(const i64* chosen, const i64* ids, State* state, const i64* forced,
                       i64* next_ids, i64* next_positions, int rows, int room) {
  grid_launch();
  grid_wait();
  const int i = threadIdx.x;
  const int used = (int)min((i64)rows, state->rows);
  bool held = i < used - 1 && chosen[i] == ids[i + 1];
  if (forced) held = i < used - 1 && i < *forced;
  const int n = __ffs(~__ballot_sync(FULL, held)) - 1;
  const i64 position = state->position + n + 1, anchor = chosen[n];
  __syncwarp();
  if (i == 0) {
    state->position = position, state->anchor = anchor, state->accepted = n;
    if (next_ids) next_ids[0] = anchor;
  }
  if (next_positions && i < room) next_positions[i] = position + i;
}
