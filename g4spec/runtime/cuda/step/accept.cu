// Acceptance of drafted tokens on the device, and the inputs of the next step: the state of
// sequences stays on the GPU between cycles, so that a CUDA graph can be replayed without waiting
// for the host. One warp per sequence.
#include "ptx.cuh"

// State of sequences between cycles: int64 [fields, room] in device memory, a line for each
// `CycleField` (build/constants.py).

// Result of a cycle for a sequence, written to pinned host memory.
struct CycleResult {
  i64 position, anchor, accepted, turn;
  i64 bad, unfit;  // bit masks: rows without a valid choice; drafted tokens of logits not finite
  i64 usable;      // drafted tokens before the first for which all tokens are suppressed
  i64 ids[MAX_STEP_ROWS], chosen[MAX_STEP_ROWS];
  float logits[MAX_STEP_ROWS];
  i64 unused[RESULT_WORDS - RESULT_LOGITS - MAX_STEP_ROWS / 2];
};
static_assert(sizeof(CycleResult) == RESULT_WORDS * 8, "cycle_state.py reads entries of this size");

// Commit the target's choices `chosen` [S, rows] for inputs ids [S, rows] (anchor, then drafted
// tokens), up to and including the first choice that differs from the drafted token; that one is
// the next anchor.
//
// logits, bad: [S, rows], of the choices. unfit: [S, pitch], `bad` of the draft, or null; a proposal
// ends before a token for which all are suppressed, unless `forced`. forced: null, or the number of
// drafted tokens to accept regardless of their values (for measurements).
// seen: pinned host memory [turns, room].
__global__ __launch_bounds__(32) void accept(const i64* chosen, const float* logits, const int* bad,
                                             const i64* ids, int rows, i64* state, int room,
                                             const i64* forced, const int* unfit, int pitch,
                                             CycleResult* seen, int turns) {
  griddep_launch_dependents();
  griddep_wait();
  const int s = blockIdx.x, i = threadIdx.x, at = s * rows + i;
  auto field = [&](CycleField::Value f) -> i64& { return state[f * room + s]; };
  const bool is_row = i < rows;
  const i64 choice = is_row ? chosen[at] : 0, id = is_row ? ids[at] : 0;
  const int fault = unfit && i < pitch ? unfit[s * pitch + i] : RowFault::NONE;
  const u32 undrafted = __ballot_sync(FULL_MASK, fault == RowFault::NOT_FINITE);
  const u32 emptied = __ballot_sync(FULL_MASK, !forced && fault == RowFault::SUPPRESSED);
  int used = (int)min((i64)rows, field(CycleField::ROWS));
  if (emptied) used = min(used, __ffs(emptied));
  const i64 following = __shfl_down_sync(FULL_MASK, id, 1);
  const bool held = i < used - 1 && (forced ? i < *forced : choice == following);
  const int n = __ffs(~__ballot_sync(FULL_MASK, held)) - 1;
  const i64 next = __shfl_sync(FULL_MASK, choice, n), turn = field(CycleField::TURN);
  const i64 position = field(CycleField::POSITION) + (used ? n + 1 : 0),
            anchor = used ? next : field(CycleField::ANCHOR);
  const u32 without = __ballot_sync(FULL_MASK, is_row && bad[at]);
  CycleResult& result = seen[turn * room + s];
  if (i < MAX_STEP_ROWS) {
    result.ids[i] = id, result.chosen[i] = choice;
    result.logits[i] = is_row ? logits[at] : 0.0f;
  }
  __syncwarp();
  if (i) return;
  result.position = position, result.anchor = anchor, result.accepted = n, result.turn = turn;
  result.bad = without, result.unfit = undrafted, result.usable = max(used - 1, 0);
  field(CycleField::POSITION) = position, field(CycleField::ANCHOR) = anchor,
  field(CycleField::ACCEPTED) = n;
  field(CycleField::TURN) = turn + 1 < turns ? turn + 1 : 0;
}

// Input rows of the next step or draft pass: planes [3, S, width] of ids (the anchor, then mask
// tokens), positions and slots. One block per sequence.
struct Planes {
  i64* first;
  int width;

  DEVICE void fill(i64 position, i64 anchor, i64 slot, i64 mask) const {
    const i64 plane = (i64)gridDim.x * width;
    for (int i = threadIdx.x; first && i < width; i += blockDim.x) {
      i64* at = first + blockIdx.x * width + i;
      at[0] = i ? mask : anchor, at[plane] = position + i, at[2 * plane] = slot;
    }
  }
};

// Write the rows of the next step, and those of the draft's proposal if `draft` is not null.
__global__ __launch_bounds__(32) void place(const i64* state, int room, i64* step, int step_width,
                                            i64* draft, int draft_width, i64 mask) {
  state += blockIdx.x;
  const i64 position = state[CycleField::POSITION * room],
            anchor = state[CycleField::ANCHOR * room];
  const i64 slot = state[CycleField::SLOT * room];
  Planes{step, step_width}.fill(position, anchor, slot, mask);
  Planes{draft, draft_width}.fill(position, anchor, slot, mask);
}
