// Cache types (g4spec/runtime/cuda/cache/cache_types.py): how kernels write and read a row of keys or
// values in a plane of the cache (g4spec/runtime/cuda/cache/cuda_kv.py). Q8: the type's number, 0 is
// F16, 1 is Q8_0 (bytes q + 128, and a half-precision scale per 32 values). The kernels with tensor
// cores copy whole tiles instead and have their own view (attention_copies.cuh).
#pragma once
#include "head_vector.cuh"
#include "prefill_kv_layout.cuh"

// Decode: append a head's vector (heads.cu). K or V plane; scales [.., columns / 32] for Q8_0.
struct Plane {
  void* rows;
  u16* scales;

  template <int Q8, int ROTARY_PAIRS, int D, int PAIRS>
  DEVICE void append(const HeadVector<D, PAIRS>& x, i64 at) const {
    constexpr int COLUMNS = ROTARY_PAIRS ? 2 * ROTARY_PAIRS : D;
    if constexpr (Q8)
      x.template store<ROTARY_PAIRS>((u8*)rows + at * COLUMNS, scales + at * (COLUMNS / 32));
    else
      x.template store<ROTARY_PAIRS>((u16*)rows + at * COLUMNS);
  }
};

// Decode without tensor cores: read single values (attention_plain.cu). K or V: [units, n_kv,
// capacity, D], scales [.., D / 32].
struct PlaneReader {
  const char* rows;
  const u16* scales;

  template <int D, int Q8>
  DEVICE float at(i64 row, int d) const {
    if (Q8) {
      const int code = (int)((const u8*)rows)[row * D + d] - 128;
      return code * from_half(scales[row * (D / 32) + d / 32]);
    }
    return from_half(((const u16*)rows)[row * D + d]);
  }
};

// Prefill: access to a row of a plane (prefill_heads.cu).
// ROTARY_PAIRS: the plane stores that many columns of each half of a head, other columns of `x` are
// not touched; 0: all. `write` leaves in `x` what `read` would return; a negative row is rounded
// but not written.
template <int D>
struct F16Cache {
  template <int ROTARY_PAIRS>
  static DEVICE void write(u8* plane, u16*, i64 row, HeadRow<D>& x) {
    u16* to = (u16*)plane + row * (ROTARY_PAIRS ? 2 * ROTARY_PAIRS : D);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!x.template stored<ROTARY_PAIRS>()) continue;
      if (row >= 0) pack_row(to + x.template column<ROTARY_PAIRS>(h), x.x[h]);
#pragma unroll
      for (int e = 0; e < x.V; ++e) x.x[h][e] = from_half(to_half(x.x[h][e]));
    }
  }
  template <int ROTARY_PAIRS>
  static DEVICE void read(HeadRow<D>& x, const u8* plane, const u16*, i64 row) {
    const u16* from = (const u16*)plane + row * (ROTARY_PAIRS ? 2 * ROTARY_PAIRS : D);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (x.template stored<ROTARY_PAIRS>())
        unpack_row(x.x[h], from + x.template column<ROTARY_PAIRS>(h));
  }
};

template <int N>
DEVICE void store(u8* to, const u8 (&bytes)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      ((u32*)to)[i] = bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 |
                      (u32)bytes[4 * i + 3] << 24;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = bytes[i];
  }
}

template <int D>
struct Q8Cache {
  static constexpr int V = HeadRow<D>::V;

  // Rounds bit for bit as `quantize` in cuda_kv.py.
  template <int ROTARY_PAIRS>
  static DEVICE void write(u8* plane, u16* scales, i64 row, HeadRow<D>& x) {
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = 0;
      float all = 0;  // fmaxf ignores NaN, a sum does not; MaxNan for each value takes registers
#pragma unroll
      for (int e = 0; e < V; ++e)
        most[h] = fmaxf(most[h], fabsf(x.x[h][e])), all += fabsf(x.x[h][e]);
      if (all != all) most[h] = all;
#pragma unroll
      for (int step = 1; step * V < 32; step *= 2)
        most[h] = MaxNan()(most[h], __shfl_xor_sync(FULL_MASK, most[h], step));
    }
    if (!x.template stored<ROTARY_PAIRS>()) return;
    constexpr int WIDTH = ROTARY_PAIRS ? 2 * ROTARY_PAIRS : D;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = x.template column<ROTARY_PAIRS>(h);
      const float step = __fdiv_rn(most[h], 127.0f), inverse = __frcp_rn(step);
      const float by = inverse - inverse == 0.0f ? inverse : 0.0f;  // 0 if infinite or NaN
      const u16 scale = to_half(step);
      u8 bytes[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float v = x.x[h][e] * by;
        const int code = (int)truncf(v + copysignf(0.49999997f, v));
        bytes[e] = (u8)(code + 128);
        x.x[h][e] = code * from_half(scale);
      }
      if (row < 0) continue;
      store<V>(plane + row * WIDTH + at, bytes);
      if (at % 32 == 0) scales[row * (WIDTH / 32) + at / 32] = scale;
    }
  }
  template <int ROTARY_PAIRS>
  static DEVICE void read(HeadRow<D>& x, const u8* plane, const u16* scales, i64 row) {
    if (!x.template stored<ROTARY_PAIRS>()) return;
    constexpr int WIDTH = ROTARY_PAIRS ? 2 * ROTARY_PAIRS : D;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = x.template column<ROTARY_PAIRS>(h);
      const float step = from_half(scales[row * (WIDTH / 32) + at / 32]);
#pragma unroll
      for (int e = 0; e < V; ++e) x.x[h][e] = ((int)plane[row * WIDTH + at + e] - 128) * step;
    }
  }
};
