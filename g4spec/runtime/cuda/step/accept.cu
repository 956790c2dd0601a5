#include "ptx.cuh"

// The state of S sequences between cycles: int64 [FIELDS, room] in device memory, see cycle_state.py.
enum Field {
  POSITION,  // of row 0 of the next step
  ANCHOR,    // the token of that row
  ACCEPTED,  // drafted tokens that held in the last cycle
  ROWS,      // rows of the step that count, anchor included; 0: the sequence only fills the batch
  SLOT,      // of the caches
  TURN,      // which of the host's places the next cycle is told to
};

constexpr int MOST = 16;  // rows of a sequence in a step

// What the host is told of a sequence.
struct Seen {
  i64 position, anchor, accepted, turn;
  i64 bad, unfit;  // bits: rows without a choice; the same of drafted tokens
  i64 ids[MOST], chosen[MOST];
  float logits[MOST];
  i64 unused[2];
};
static_assert(sizeof(Seen) == 48 * sizeof(i64), "as cycle_state.py reads it");

// A step read ids [S, rows] (anchors, then what was drafted) and chose `chosen` [S, rows]: commits a
// sequence's choices up to the first one that was not drafted, which becomes its next anchor. One
// warp a sequence.
//
// logits, bad: [S, rows], of the choices. unfit: [S, pitch] of the drafted tokens, or null.
// forced: null, or how many drafted tokens to accept whatever they are (for measurements).
// seen: memory of the host [turns, room].
__global__ __launch_bounds__(32) void accept(const i64* chosen, const float* logits, const int* bad,
                                             const i64* ids, int rows, i64* state, int room,
                                             const i64* forced, const int* unfit, int pitch,
                                             Seen* seen, int turns) {
  griddep_launch_dependents();
  griddep_wait();
  const int s = blockIdx.x, i = threadIdx.x, at = s * rows + i;
  auto field = [&](Field f) -> i64& { return state[f * room + s]; };
  const bool is_row = i < rows;
  const i64 choice = is_row ? chosen[at] : 0, id = is_row ? ids[at] : 0;
  const int used = (int)min((i64)rows, field(ROWS));
  const i64 following = __shfl_down_sync(FULL_MASK, id, 1);
  const bool held = i < used - 1 && (forced ? i < *forced : choice == following);
  const int n = __ffs(~__ballot_sync(FULL_MASK, held)) - 1;
  const i64 next = __shfl_sync(FULL_MASK, choice, n), turn = field(TURN);
  const i64 position = field(POSITION) + (used ? n + 1 : 0), anchor = used ? next : field(ANCHOR);
  const u32 without = __ballot_sync(FULL_MASK, is_row && bad[at]);
  const u32 undrafted = __ballot_sync(FULL_MASK, unfit && i < pitch && unfit[s * pitch + i]);
  Seen& told = seen[turn * room + s];
  if (i < MOST) {
    told.ids[i] = id, told.chosen[i] = choice;
    told.logits[i] = is_row ? logits[at] : 0.0f;
  }
  __syncwarp();
  if (i) return;
  told.position = position, told.anchor = anchor, told.accepted = n, told.turn = turn;
  told.bad = without, told.unfit = undrafted;
  field(POSITION) = position, field(ANCHOR) = anchor, field(ACCEPTED) = n;
  field(TURN) = turn + 1 < turns ? turn + 1 : 0;
}

// Where sequences stand, as rows: planes [3, S, width] of ids (the anchor, then masks), positions and
// slots. One block a sequence.
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

// The rows of a step, and of a proposal if a draft is given others (or null).
__global__ __launch_bounds__(32) void place(const i64* state, int room, i64* step, int step_width,
                                            i64* draft, int draft_width, i64 mask) {
  state += blockIdx.x;
  const i64 position = state[POSITION * room], anchor = state[ANCHOR * room];
  const i64 slot = state[SLOT * room];
  Planes{step, step_width}.fill(position, anchor, slot, mask);
  Planes{draft, draft_width}.fill(position, anchor, slot, mask);
}
