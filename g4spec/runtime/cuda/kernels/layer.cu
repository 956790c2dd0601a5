// Several products and norms of a layer in one persistent kernel, so that weights keep streaming
// while results are exchanged.
//
// All CTAs run the same short program of operations. One warp of each runs ahead: it fills the ring
// of stages with the weights of the products to come, whatever the others wait for, and adds the
// activations of a stage once they exist. Between dependent operations stands a barrier over the
// grid, a counter in global memory; the grid must be resident as a whole (cooperative launch).
#include "consume.cuh"
#include "q4_k.cuh"
#include "q6_k.cuh"
#include "q8_0.cuh"
#include "rows.cuh"

enum Kind { NORM, Q4_K_LINEAR, Q4_K_GATED, Q6_K_LINEAR, Q6_K_GATED, Q8_0_LINEAR, Q8_0_GATED };

// One operation, 128 bytes; built by g4spec/runtime/cuda/layer.py.
struct Op {
  i32 kind, after;        // `after`: grid barriers that come before its inputs exist
  i32 signal, tokens;     // `signal`: a grid barrier follows
  i32 units, groups, run;  // products: units of K, groups of ROWS, units a CTA
  i32 n;                  // rows of weights, channels of a gated product, width of a norm
  const u8* weights;      // products
  const u8* rows;         // products: input
  const float* row_scale;  // products: [16] or null
  void* y;                // products: [T, n] float32, or rows; norms: rows
  const float* h;         // norms: [T, n], or null: no residual sum
  const float* x;         // norms: residual [T, n]
  float* x_out;           // norms: the new residual
  const float* weight;    // norms: of h
  const float* next;      // norms: of the new residual; null: no rows are written
  const float* scale;     // norms: the new residual is multiplied by it, or null
  float eps;
  i32 region;             // products: which share of `partial` and `arrived` they exchange sums in;
                          // products with no grid barrier between them must not share one
  i32 unused[2];
};
static_assert(sizeof(Op) == 128, "as the host builds it");

constexpr int MAX_OPS = 16;
constexpr int MOST_GROUPS = 2048;  // of one product
constexpr int STAGES = 3;

template <class F>
struct Width {  // rows of weights in a stage
  static constexpr int value = F::UNIT_BYTES < 20000 ? 256 : 128;
};

template <int NT>
struct Layout {
  static constexpr int larger(int a, int b) { return a > b ? a : b; }
  template <class F>
  using Of = Stage<F, NT, Width<F>::value>;
  static constexpr int SLOT =
      larger(Of<Q4K>::BYTES, larger(Of<Q6K>::BYTES, Of<Q80<256>>::BYTES));
  static constexpr int SCRATCH =
      larger(Of<Q4K>::SCRATCH, larger(Of<Q6K>::SCRATCH, Of<Q80<256>>::SCRATCH));
  static constexpr int BYTES = STAGES * SLOT + CONSUMERS * SCRATCH + pair_bytes(NT) +
                               MAX_OPS * (int)sizeof(Op) + 16 * STAGES + 64;
};

DEVICE void proxy_fence() {  // between ordinary stores and bulk copies of what they stored
#if ARCH >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// ---- the warp that runs ahead ----

template <int NT>
struct Feeder {
  const Op* ops;
  int n_ops, cta;
  u8* ring;
  u64 *full, *empty;

  struct Cursor {
    int op, unit, end, used;  // `used`: slots before this one
  };

  DEVICE void settle(Cursor& c) const {  // on the next unit there is
    while (c.op < n_ops && c.unit >= c.end) {
      if (++c.op == n_ops) return;
      const Op& o = ops[c.op];
      if (o.kind == NORM) continue;
      c.unit = cta * o.run;
      c.end = min(c.unit + o.run, o.units * o.groups);
    }
  }

  template <class F>
  DEVICE void weights(const Op& o, const Cursor& c) const {
    constexpr int ROWS = Width<F>::value;
    using S = Stage<F, NT, ROWS>;
    const int s = c.used % STAGES;
    barrier_expect(full + s, S::BYTES);
#pragma unroll
    for (int half = 0; half < ROWS / GROUP; ++half) {
      const i64 group = (i64)(c.unit / o.units) * (ROWS / GROUP) + half;
      bulk_copy(ring + s * Layout<NT>::SLOT + half * F::UNIT_BYTES,
                o.weights + (group * o.units + c.unit % o.units) * F::UNIT_BYTES, F::UNIT_BYTES,
                full + s);
    }
  }

  template <class F>
  DEVICE void rows(const Op& o, const Cursor& c) const {
    using S = Stage<F, NT, Width<F>::value>;
    const int s = c.used % STAGES;
    bulk_copy(ring + s * Layout<NT>::SLOT + S::WEIGHTS,
              o.rows + (i64)(c.unit % o.units) * S::ROWS_BYTES, S::ROWS_BYTES, full + s);
  }

  template <bool WEIGHTS>
  DEVICE void issue(Cursor& c) const {
    const Op& o = ops[c.op];
    if (o.kind <= Q4_K_GATED)
      WEIGHTS ? weights<Q4K>(o, c) : rows<Q4K>(o, c);
    else if (o.kind <= Q6_K_GATED)
      WEIGHTS ? weights<Q6K>(o, c) : rows<Q6K>(o, c);
    else
      WEIGHTS ? weights<Q80<256>>(o, c) : rows<Q80<256>>(o, c);
    ++c.unit, ++c.used;
    settle(c);
  }

  DEVICE void run(const u32* counter) const {
    Cursor ahead = {-1, 0, 0, 0};
    settle(ahead);
    Cursor behind = ahead;
    while (ahead.op < n_ops && ahead.used < STAGES) issue<true>(ahead);
    grid_wait();
    u32 passed = 0;
    bool last = false;
    while (behind.op < n_ops) {
      if (behind.used < ahead.used) {
        const u32 needed = ops[behind.op].after * gridDim.x;
        if (passed < needed) {
          passed = load_acquire(counter);
          if (passed >= needed) proxy_fence();
        }
        if (passed >= needed) issue<false>(behind);
      }
      if (ahead.op < n_ops &&
          barrier_done(empty + ahead.used % STAGES, (ahead.used / STAGES - 1) & 1))
        issue<true>(ahead);
      if (!last && ahead.op == n_ops) last = true, grid_launch();
    }
  }
};

// ---- the warps that compute ----

DEVICE float sum_over_consumers(float v, float* slots) {
#pragma unroll
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(FULL, v, i);
  consumers_sync();
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
  consumers_sync();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < CONSUMERS; ++i) sum += slots[i];
  return sum;
}

// x_out = (x + rms_norm(h) * weight) * scale, rows = rms_norm(x_out) * next. One CTA a token.
template <int NT>
DEVICE void norm(const Op& o, float* slots, int m) {
  constexpr int MOST = 6;  // float4 of a thread: up to 6,144 wide
  const int width = o.n / 4;
  float4 v[MOST], x[MOST], w[MOST];
  const i64 at = (i64)m * width;
  float square = 0;
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    const int i = j * 256 + threadIdx.x;
    const bool valid = i < width;
    x[j] = valid ? __ldcg((const float4*)o.x + at + i) : float4{0, 0, 0, 0};
    v[j] = valid && o.h ? __ldcg((const float4*)o.h + at + i) : float4{0, 0, 0, 0};
    w[j] = valid && o.h ? ((const float4*)o.weight)[i] : float4{0, 0, 0, 0};
    square += square4(v[j]);
  }
  if (o.h) {
    const float r = rsqrtf(sum_over_consumers(square, slots) / o.n + o.eps);
    const float s = o.scale ? *o.scale : 1.0f;
#pragma unroll
    for (int j = 0; j < MOST; ++j)
      x[j] = mul4(add4(x[j], mul4(mul4(v[j], r), w[j])), s);
  }
  square = 0;
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    const int i = j * 256 + threadIdx.x;
    square += square4(x[j]);
    if (i < width && o.x_out) ((float4*)o.x_out)[at + i] = x[j];
    w[j] = i < width && o.next ? ((const float4*)o.next)[i] : float4{0, 0, 0, 0};
  }
  if (!o.next) return;
  const float r = rsqrtf(sum_over_consumers(square, slots) / o.n + o.eps);
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    const int i = j * 256 + threadIdx.x;
    RowPlace(NT, m, i).store((u8*)o.y, mul4(mul4(x[j], r), w[j]), i < width);
  }
}

template <int NT>
struct Consumer {
  const Op* ops;
  const u8* ring;
  u64 *full, *empty;
  u8* mine;
  float *pairs, *partial;
  u32 *arrived, *counter;
  int cta;

  template <class F>
  DEVICE void product(const Op& o, int& used) const {
    constexpr int ROWS = Width<F>::value;
    const Work w = {o.weights, o.rows, o.row_scale,
                    partial + (i64)o.region * gridDim.x * 2048 * NT,  // 256 rows, 8 NT tokens
                    arrived + o.region * MOST_GROUPS, o.units, o.groups, o.run};
    if (o.kind % 2)
      consume<F, NT, ROWS, STAGES, Layout<NT>::SLOT, Layout<NT>::SCRATCH>(
          w, Plain{(float*)o.y, o.n, o.tokens}, ring, full, empty, used, mine, pairs, cta);
    else
      consume<F, NT, ROWS, STAGES, Layout<NT>::SLOT, Layout<NT>::SCRATCH>(
          w, GatedGelu{(u8*)o.y, o.n, o.tokens}, ring, full, empty, used, mine, pairs, cta);
  }

  DEVICE void run(int n_ops) const {
    int used = 0;
    u32 passed = 0;
    for (int i = 0; i < n_ops; ++i) {
      const Op& o = ops[i];
      const u32 needed = o.after * gridDim.x;
      if (passed < needed) {
        if (threadIdx.x == 0)
          while (load_acquire(counter) < needed) {
          }
        consumers_sync();
        passed = needed;
      }
      if (o.kind == NORM) {
        if (cta < o.tokens) norm<NT>(o, pairs, cta);
      } else if (o.kind <= Q4_K_GATED) {
        product<Q4K>(o, used);
      } else if (o.kind <= Q6_K_GATED) {
        product<Q6K>(o, used);
      } else {
        product<Q80<256>>(o, used);
      }
      if (!o.signal) continue;
      proxy_fence();
      consumers_sync();
      if (threadIdx.x == 0) add_release(counter, 1);
    }
    // The last CTA to leave zeroes the counters for the next launch: nobody waits any more.
    consumers_sync();
    if (threadIdx.x == 0 && atomicAdd(counter + 1, 1u) == gridDim.x - 1) {
      counter[0] = 0;
      counter[1] = 0;
    }
  }
};

template <int NT>
__global__ __launch_bounds__(THREADS, 1) void layer(const Op* program, int n_ops, float* partial,
                                                    u32* arrived, u32* counter) {
  using L = Layout<NT>;
  extern __shared__ __align__(128) u8 shared[];
  u8* scratch = shared + STAGES * L::SLOT;
  float* pairs = (float*)(scratch + CONSUMERS * L::SCRATCH);
  Op* ops = (Op*)((u8*)pairs + pair_bytes(NT));
  u64* full = (u64*)(ops + MAX_OPS);
  u64* empty = full + STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, CONSUMERS);
    }
    barrier_init_fence();
  }
  for (int i = threadIdx.x; i < n_ops * 8; i += THREADS) ((uint4*)ops)[i] = ((const uint4*)program)[i];
  __syncthreads();
  const int cta = gridDim.x - 1 - blockIdx.x;
  if (warp == CONSUMERS) {
    if (lane == 0) Feeder<NT>{ops, n_ops, cta, shared, full, empty}.run(counter);
    return;
  }
  grid_wait();
  Consumer<NT>{ops, shared, full, empty, scratch + warp * L::SCRATCH, pairs, partial, arrived,
               counter, cta}
      .run(n_ops);
}
