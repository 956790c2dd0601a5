"""Numbers of the emulator's matrix products."""

from pathlib import Path

import torch

from tests.emulator import kernels

KERNEL = """
#include "ptx.cuh"
__global__ void widen(const u16* x, float* y) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = from_half(x[i]);
}
"""


def test_every_half_is_converted(tmp_path: Path) -> None:
    """Subnormal and infinite halves, zeros of both signs, and NaN included."""
    file = tmp_path / "widen.cu"
    file.write_text(KERNEL)
    halves = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    out = torch.zeros(1 << 16)
    kernels.Emulated(str(file), "widen", "sm_90a")(256, 256, x=halves, y=out)
    want = halves.float()
    nan = want.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int32), want[~nan].view(torch.int32))
