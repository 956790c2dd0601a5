// Numbers and arithmetic that kernels share: float32 constants, float4, and floats as integers that
// compare like them. Constants are macros: NVRTC would store variables in every cubin.
#pragma once
#include "ptx.cuh"

#define POS_INF __int_as_float(0x7f800000)
#define NEG_INF __int_as_float(0xff800000)
#define QUIET_NAN __int_as_float(0x7fc00000)
#define LOG2E 1.4426950408889634f

DEVICE float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }
DEVICE float4 mul4(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }
DEVICE float4 mul4(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 add4(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float square4(float4 v) { return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w); }
DEVICE float largest4(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
DEVICE bool finite4(float4 v) {  // NaN - NaN and inf - inf are NaN
  return sum4({v.x - v.x, v.y - v.y, v.z - v.z, v.w - v.w}) == 0.0f;
}

// The bits of a float so that they compare like floats. No number gives 0.
DEVICE u32 ordered_bits(u32 bits) { return bits >> 31 ? ~bits : bits | 0x80000000u; }
DEVICE u32 float_to_ordered(float x) { return ordered_bits(__float_as_uint(x)); }
DEVICE float ordered_to_float(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
