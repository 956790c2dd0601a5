// Q6_K in packed order (g4spec/runtime/cuda/packing.py): a value is d * scale * (q - 32).
#pragma once
#include "product.cuh"

struct Q6K {
  static constexpr int UNIT = 256, UNIT_BYTES = 26880, SCRATCH = 2048;

  template <int PARTS>
  struct Factors {  // of a row's groups, one lane a row
    float scales[16 / PARTS];

    DEVICE void load(const u8* unit, int warp, int lane, int part) {
      const u8* header = unit + 24576;
      const int row = warp * 32 + lane;
      const float d =
          from_half(*(const u16*)(header + 2048 + row * 2)) * (lane & 8 ? 0.0625f : 1.0f);
      const float bias = -32896.0f * d;
#pragma unroll
      for (int i = 0; i < 4 / PARTS; ++i) {  // d * (2^15 + 128 + scale) - d * (2^15 + 128): exact
        const u32 four = *(const u32*)(header + row * 16 + (part * (4 / PARTS) + i) * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const u32 bits = permute(four ^ 0x80808080u, 0x47000000u, 0x7604 + j * 16);
          scales[i * 4 + j] = fmaf(d, __uint_as_float(bits), bias);
        }
      }
    }
    DEVICE void store(u8* scratch, int lane) const {
#pragma unroll
      for (int i = 0; i < 16 / PARTS; ++i) ((float*)scratch)[i * 32 + row_slot(lane)] = scales[i];
    }
  };

  template <int NT, int PARTS>
  static DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act, const u8* scratch,
                              int warp, int lane, int part) {
    const float* scales = (const float*)scratch;  // [16 / PARTS groups][row slot]
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * 2 * 128;
    const uint2* highs = (const uint2*)(unit + 16384) + warp * 2 * 128;
#pragma unroll
    for (int j = 0; j < 4 / PARTS; ++j) {
      const int k64 = part * (4 / PARTS) + j;
      const uint4 w[2] = {codes[k64 * 32 + lane], codes[128 + k64 * 32 + lane]};
      const uint2 u[2] = {highs[k64 * 32 + lane], highs[128 + k64 * 32 + lane]};
      const auto rows = activations<NT>(act, k64);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 b[2][NT][2];
        rows.fragments(b, h, lane);
        const float4 s0 = *(const float4*)(scales + (j * 4 + h * 2) * 32 + g * 4);
        const float4 s1 = *(const float4*)(scales + (j * 4 + h * 2 + 1) * 32 + g * 4);
        float2 n[2][NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          n[0][nt] = rows.sums16(h * 2, nt, t), n[1][nt] = rows.sums16(h * 2 + 1, nt, t);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          u32 a0[4], a1[4];
          fragments(a0, a1, h ? w[tile].z : w[tile].x, h ? w[tile].w : w[tile].y,
                    h ? u[tile].y : u[tile].x);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            add(acc[tile][nt], a0, b[0][nt], n[0][nt], tile ? s0.z : s0.x, tile ? s0.w : s0.y);
            add(acc[tile][nt], a1, b[1][nt], n[1][nt], tile ? s1.z : s1.x, tile ? s1.w : s1.y);
          }
        }
      }
    }
  }

  // Two k16 steps; one word of upper bits serves both.
  static DEVICE void fragments(u32 (&a)[4], u32 (&b)[4], u32 x, u32 y, u32 h) {
    from_nibbles(a, x);
    from_nibbles(b, y);
    a[0] = and_or(h, 0x00300030u, a[0]);
    a[1] = and_or(h, 0x03000300u, a[1]);
    a[2] = and_or(h >> 2, 0x00300030u, a[2]);
    a[3] = and_or(h >> 2, 0x03000300u, a[3]);
    h = permute(h, 0, 0x2301);  // bytes of each half swapped: the second step's bits come here
    b[0] = and_or(h, 0x00300030u, b[0]);
    b[1] = and_or(h, 0x03000300u, b[1]);
    b[2] = and_or(h >> 2, 0x00300030u, b[2]);
    b[3] = and_or(h >> 2, 0x03000300u, b[3]);
  }

  static DEVICE void add(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2], float2 n,
                         float low, float high) {
    // 1024 + 32 in rows g; 1024 + 16 * 32 in rows g + 8, whose codes are times 16
    float c[4] = {n.x * 1.03125f, n.y * 1.03125f, n.x * 1.5f, n.y * 1.5f};
    mma_f16(c, a, b[0], b[1], c);
    fold(acc, c, low, high);
  }
};
