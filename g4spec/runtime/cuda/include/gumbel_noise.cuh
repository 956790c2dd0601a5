// Gumbel noise that sampling adds to logits, the same as `g4spec.ops.sampling`: a function of
// (seed, position, token) alone, so that target and draft draw the same noise.
#pragma once
#include "ptx.cuh"

// Philox4x32-10 (Salmon et al., 2011): counter c, key (key0, key1) -> four random words.
DEVICE uint4 philox(uint4 c, u32 key0, u32 key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)0xD2511F53u * c.x, b = (u64)0xCD9E8D57u * c.z;
    c = {(u32)(b >> 32) ^ c.y ^ key0, (u32)b, (u32)(a >> 32) ^ c.w ^ key1, (u32)a};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// Random words of tokens 4 i .. 4 i + 3.
DEVICE uint4 noise_words(u64 seed, u64 position, u32 i) {
  return philox({i, (u32)position, (u32)(position >> 32), 0}, (u32)seed, (u32)(seed >> 32));
}

// -log(-log(u)) for u = (word / 2^8 + 1/2) 2^-24. For u above one half it computes log1p(u - 1): 1
// - u is exact in float32 and u is not.
DEVICE float gumbel(u32 word) {
  const u32 w = word >> 8;
  const float u = w < 0x800000u ? (float)w + 0.5f : (float)(0xffffffu - w) + 0.5f;
  const float log_u = w < 0x800000u ? logf(u * 0x1p-24f) : log1pf(-u * 0x1p-24f);
  return -logf(-log_u);
}
DEVICE u32 noise_word(u64 seed, u64 position, u32 token) {
  const uint4 w = noise_words(seed, position, token / 4);
  return token % 4 == 0 ? w.x : token % 4 == 1 ? w.y : token % 4 == 2 ? w.z : w.w;
}
DEVICE float gumbel_of(u64 seed, u64 position, u32 token) {
  return gumbel(noise_word(seed, position, token));
}
