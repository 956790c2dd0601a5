"""Test whether `wgmma` and `mma.sync` of sm_90 sum the same products to the same bits.

    python benchmarks/gpu_wgmma_bits.py

Sums 2 x 16 products of random operands as the quant formats have them: codes as subnormal halves,
1024 + code, and halves; activations of one magnitude and of magnitudes from 2^-12 to 2^7; starting
from zero and from a number. Prints for each case how many of two million sums differ, and one of
those that do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from g4spec.runtime.cuda.build import launch  # noqa: E402

BLOCKS = 500
KERNEL = str(HERE / "gpu_wgmma_bits.cu")


def codes(bits: int, shift: int = 0, add: int = 0) -> torch.Tensor:
    """Return two codes per 32-bit word of a lane's operands, as halves with these bits."""
    words = torch.randint(0, 1 << bits, (2, BLOCKS, 128, 2, 4), device="cuda", dtype=torch.int32)
    low, high = (words << shift) + add
    return low | high << 16


def halves(*shape: int, wild: bool) -> torch.Tensor:
    x = torch.randn(*shape, device="cuda")
    sizes = torch.randint(-12, 8, shape, device="cuda").float()
    return (x * torch.exp2(sizes) if wild else x).half()


def main() -> None:
    torch.manual_seed(0)
    for wild in (False, True):
        b = halves(BLOCKS, 64, 64, wild=wild)
        operands = {
            "4 bits": codes(4),
            "4 bits << 4": codes(4, 4),
            "6 bits": codes(6),
            "1024 + 8 bits": codes(8, 0, 0x6400),
            "halves": halves(BLOCKS, 128, 2, 8, wild=wild).view(torch.int32),
        }
        for name, a in operands.items():
            size = 300.0 if name in ("halves", "1024 + 8 bits") else 1e-4
            for zero in (True, False):
                c = torch.randn(BLOCKS, 128, 32, device="cuda") * size
                wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
                both = torch.zeros(2, device="cuda")
                launch.kernel(KERNEL, "bits<0>")(
                    BLOCKS, 128, a=a.contiguous(), b=b, c=c, wrong=wrong, both=both, zero=zero
                )
                print(
                    "wgmma bits:",
                    "wild," if wild else "normal,",
                    name,
                    "from zero:" if zero else "from a number:",
                    int(wrong),
                    "of",
                    c.numel(),
                    both.tolist(),
                    flush=True,
                )


if __name__ == "__main__":
    main()
