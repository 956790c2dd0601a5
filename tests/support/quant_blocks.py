"""Blocks of 32 edge-case values for quant types, and the results of ggml's C code for them.

Whole tensors are given for types that search for their scales. Measured with `quantize_row_*_ref`
of llama.cpp, compiled for x86-64 without contraction: `GOLDEN` holds the bytes for `BLOCKS` in
order, `REFERENCE_ERROR` the relative RMS errors of `quantize_*` without an imatrix for `tensors`.
"""

from __future__ import annotations

import numpy as np

from g4spec import quant


def _block(*values: float, rest: float = 0.0) -> np.ndarray:
    out = np.full(32, rest, np.float32)
    out[: len(values)] = values
    return out


def _ramp(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, 32, dtype=np.float32)


BLOCKS = {
    "zeros": _block(),
    "minus zeros": _block(rest=-0.0),
    "zeros, minus first": _block(-0.0, 0.0, 1.0),
    "zeros, plus first": _block(0.0, -0.0, 1.0, rest=-0.0),
    "plus before minus": _block(0.5, 2.0, -2.0, 1.0),
    "minus before plus": _block(0.5, -2.0, 2.0, 1.0),
    "one value": _block(rest=3.25),
    "one value below zero": _block(rest=-3.25),
    "one outlier": _block(1000.0, rest=-0.01),
    "halves": _block(*(np.arange(-16, 16) / 2)),
    "halves of 16 steps": _block(*(np.arange(31) / 2 - 3), 12.0),
    "just below halves": np.nextafter(_block(*(np.arange(-16, 16) / 2)), np.float32(0)),
    "ramp": _ramp(-1.0, 1.3),
    "ramp above zero": _ramp(7.0, 9.0),
    "scale below normal half precision": _ramp(-3e-5, 2e-5),
    "scale lost in half precision": _ramp(-1e-8, 3e-9),
    "scale with an infinite inverse": _ramp(-1e-38, 2e-38),
    "subnormal": _ramp(-1e-40, 1.2e-40),
    "smallest": _block(1e-45, -1e-45, 7e-45),
    "largest": _ramp(-65504.0, 60000.0),
    "random": np.random.default_rng(20).standard_normal(32).astype(np.float32),
    "random, heavy tails": np.random.default_rng(21).standard_cauchy(32).astype(np.float32),
}


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Return bytes [rows, row bytes] of a type: random codes and scales, and half-precision factors
    in the range of real matrices."""
    rng = np.random.default_rng(columns)
    kind = quant.get(name)
    if not kind.quantized:
        return kind.quantize(rng.standard_normal((rows, columns)).astype(np.float32))
    dtype = quant.block_dtype(name)
    blocks = rng.integers(0, 256, (rows, kind.row_bytes(columns)), np.uint8).view(dtype)
    halves = (rng.standard_normal(blocks.shape) * 1e-3).astype(np.float16)
    for factor in {"d", "dmin", "m"} & set(dtype.names):
        blocks[factor] = rng.permutation(halves.reshape(-1)).reshape(halves.shape)
    if name == "iq1_m":  # its factor is in the upper bits of four words
        quarters = halves.view(np.uint16)[..., None] >> np.arange(0, 16, 4) & 15
        blocks["scales"] = blocks["scales"] & 0xFFF | quarters.astype(np.uint16) << 12
    elif name == "mxfp4":
        blocks["e"] = rng.integers(112, 120, blocks.shape)
    return blocks.view(np.uint8)


def tensors(n: int = 1 << 16) -> dict[str, np.ndarray]:
    """Return typical and extreme values of model tensors, in BF16 precision."""
    rng = np.random.default_rng(22)
    found = {
        "normal": rng.standard_normal(n),
        "small": rng.standard_normal(n) * 0.02,
        "laplace": rng.laplace(size=n),
        "heavy tails": rng.standard_t(4, size=n),
        "uniform": rng.uniform(-1, 1, n),
        "above zero": rng.uniform(0, 1, n),
        "below zero": -rng.uniform(0, 1, n),
        "a size for each group": rng.standard_normal(n)
        * np.repeat(np.exp(rng.standard_normal(n // 32)), 32),
        "mostly zero": rng.standard_normal(n) * (rng.random(n) < 0.1),
        "outliers": rng.standard_normal(n) * np.where(rng.random(n) < 0.003, 30, 1),
    }
    return {
        name: (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        for name, x in found.items()
    }


def relative_rms(x: np.ndarray, got: np.ndarray) -> float:
    """Return the RMS of the error divided by the RMS of the values."""
    want = x.astype(np.float64)
    return float(np.sqrt(np.square(got - want).sum() / np.square(want).sum()))


GOLDEN = {
    "q4_0": [
        "008088888888888888888888888888888888",
        "008088888888888888888888888888888888",
        "00b088888088888888888888888888888888",
        "00b088888088888888888888888888888888",
        "00b486808f84888888888888888888888888",
        "00348a808f8c888888888888888888888888",
        "80b600000000000000000000000000000000",
        "803600000000000000000000000000000000",
        "d0d780888888888888888888888888888888",
        "003c809191a2a2b3b3c4c4d5d5e6e6f7f7f8",
        "00be5a4a4949393838282727171616060505",
        "003c809091a1a2b3b3c4c4d5d5e6e6f7f7f8",
        "33b17e6e6d5d5c5c4b4b3b3a2a2919180807",
        "80bc12121212121111010101010101010101",
        "3f0070708181929293a3a3b4b4c5c5c6d6d6",
        "000050606161717272828383939494a4a5a5",
        "008000000000000000000000000000000000",
        "008000000000000000000000000000000000",
        "008000000000000000000000000000000000",
        "ff6f80809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "1a35a78c7c7949c64585f50b486886357485",
        "9c5088888888888888888888888088888888",
    ],
    "q4_1": [
        "0000000000000000000000000000000000000000",
        "0000008000000000000000000000000000000000",
        "442c008000000f00000000000000000000000000",
        "442c000000000f00000000000000000000000000",
        "443400c0797f707b777777777777777777777777",
        "443400c079707f7b777777777777777777777777",
        "0000804200000000000000000000000000000000",
        "000080c200000000000000000000000000000000",
        "2b541fa10f000000000000000000000000000000",
        "223c00c880809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "003c00c2809191a2a2b3b3c4c4d5d5e6e6f7f7f8",
        "223c00c880809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "e83000bc80809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "4430004780809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "3800f78180809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "0000008080809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "0000008000000000000000000000000000000000",
        "0000008000000000000000000000000000000000",
        "0000008000000000000000000000000000000000",
        "1670fffb80809191a2a2b3b3c4c4d5d5e6e6f7f7",
        "00351ac1a78c7d7949c74585f50b486996357485",
        "244d9cdceeeeeeeeeeeefefeeeeeeee0feeeeeee",
    ],
    "q5_0": [
        "0080ffffffff00000000000000000000000000000000",
        "0080ffffffff00000000000000000000000000000000",
        "00acfbffffff00000000000000000000000000000000",
        "00acfbffffff00000000000000000000000000000000",
        "00b0f4ffffff0c000f08000000000000000000000000",
        "0030fdffffff04000f08000000000000000000000000",
        "80b20000000000000000000000000000000000000000",
        "80320000000000000000000000000000000000000000",
        "d0d3feffffff00000000000000000000000000000000",
        "00380000ffff00112233445566778899aabbccddeeff",
        "00ba7f000000949383727161505f4f3e3d2d1c1b0b0a",
        "00380000ffff00112233445566778899aabbccddeeff",
        "33adff7f0000ecdbcabaa9988776655453423120100f",
        "80b80000000024231313131313131313120202020202",
        "1f000000f8ffe0f1f20313243546576869798a9bacbd",
        "0000000000ffb0b1c1d2d3e3f4f5051617273839495a",
        "00800000000000000000000000000000000000000000",
        "00800000000000000000000000000000000000000000",
        "0080ffffffff00000000000000000000000000000000",
        "ff6b0000ffff00112233445566778899aabbccddeeff",
        "1a311e0ea3914e08d9e2738d8a0ada0670b11c59f80b",
        "9c4cfff7ffbf0000000000000010000000000000f000",
    ],
    "q5_1": [
        "000000000000000000000000000000000000000000000000",
        "000000800000000000000000000000000000000000000000",
        "212800800400000000000f00000000000000000000000000",
        "212800000400000000000f00000000000000000000000000",
        "213000c0fbffffff030f0007000000000000000000000000",
        "213000c0fdffffff03000f07000000000000000000000000",
        "000080420000000000000000000000000000000000000000",
        "000080c20000000000000000000000000000000000000000",
        "08501fa1010000000f000000000000000000000000000000",
        "003800c80000ffff00112233445566778899aabbccddeeff",
        "be3700c20080ffff102132435465768798a9bacbdcedfef0",
        "003800c80000ffff00112233445566778899aabbccddeeff",
        "c02c00bc0000ffff00112233445566778899aabbccddeeff",
        "212c00470000ffff00112233445566778899aabbccddeeff",
        "1b00f7810000ffff00112233445566778899aabbccddeeff",
        "000000800000ffff00112233445566778899aabbccddeeff",
        "000000800000000000000000000000000000000000000000",
        "000000800000000000000000000000000000000000000000",
        "000000800000000000000000000000000000000000000000",
        "e86bfffb0000ffff00112233445566778899aabbccddeeff",
        "d7301ac11e0ea3915e19eaf3749e9b1bfa0780c22d6af91b",
        "fa489cdcfff7ffffeedeeeeeeeeeeefeeeeeeee0eeeeddee",
    ],
    "q8_0": [
        "00000000000000000000000000000000000000000000000000000000000000000000",
        "00000000000000000000000000000000000000000000000000000000000000000000",
        "082000007f0000000000000000000000000000000000000000000000000000000000",
        "082000007f0000000000000000000000000000000000000000000000000000000000",
        "0824207f814000000000000000000000000000000000000000000000000000000000",
        "082420817f4000000000000000000000000000000000000000000000000000000000",
        "8d267f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f",
        "8d268181818181818181818181818181818181818181818181818181818181818181",
        "e0477f00000000000000000000000000000000000000000000000000000000000000",
        "082c81899199a1a9b1b9c0c8d0d8e0e8f0f8000810182028303840474f575f676f77",
        "0c2ee0e6ebf0f5fb00050b10151a20252a30353a40454a4f555a5f656a6f747a7f7f",
        "082c81899199a1a9b1b9c1c8d0d8e0e8f0f800081018202830383f474f575f676f77",
        "3e219ea6adb4bbc3cad1d8e0e7eef5fd040b121a21282f373e454c545b626971787f",
        "892c63646566666768696a6b6c6d6e6f70707172737475767778797a7a7b7c7d7e7f",
        "040081888f959ca3aab1b8bec5ccd3dae1e7eef5fc030a10171e252c333940474e55",
        "000081868c91969ca1a6acb1b6bcc1c6ccd1d6dce1e6ecf1f6fb01060b11161b2126",
        "00000000000000000000000000000000000000000000000000000000000000000000",
        "00000000000000000000000000000000000000000000000000000000000000000000",
        "00000000000000000000000000000000000000000000000000000000000000000000",
        "086081899199a0a8b0b8c0c8cfd7dfe7eff7ff060e161e262e363d454d555d656c74",
        "2425ee3c461015e8d2d3ce2efd06e0cac4d61e01e9f4b93dc3026a81badc06abf4ff",
        "a5400000000000000001010001810000ff00ffff0000000002060000ff000200fc00",
    ],
}

REFERENCE_ERROR = {
    "q2_k": {
        "normal": 0.2948576,
        "small": 0.2949598,
        "laplace": 0.3439822,
        "heavy tails": 0.3441478,
        "uniform": 0.2339628,
        "above zero": 0.1363051,
        "below zero": 0.1345506,
        "a size for each group": 0.3019182,
        "mostly zero": 0.4460979,
        "outliers": 0.2435312,
    },
    "q3_k": {
        "normal": 0.1508276,
        "small": 0.1504066,
        "laplace": 0.1772141,
        "heavy tails": 0.1853942,
        "uniform": 0.1257856,
        "above zero": 0.1086095,
        "below zero": 0.1058567,
        "a size for each group": 0.1522848,
        "mostly zero": 0.0707533,
        "outliers": 0.1264530,
    },
    "iq4_nl": {
        "normal": 0.0760232,
        "small": 0.0757890,
        "laplace": 0.0883659,
        "heavy tails": 0.0937966,
        "uniform": 0.0641476,
        "above zero": 0.0602061,
        "below zero": 0.0605883,
        "a size for each group": 0.0761275,
        "mostly zero": 0.0546513,
        "outliers": 0.1078644,
    },
    "iq4_xs": {
        "normal": 0.0765341,
        "small": 0.0763323,
        "laplace": 0.0891073,
        "heavy tails": 0.0947050,
        "uniform": 0.0647066,
        "above zero": 0.0607070,
        "below zero": 0.0610798,
        "a size for each group": 0.0770483,
        "mostly zero": 0.0561652,
        "outliers": 0.1099636,
    },
    "q4_k": {
        "normal": 0.0712518,
        "small": 0.0710808,
        "laplace": 0.0848970,
        "heavy tails": 0.0871354,
        "uniform": 0.0547158,
        "above zero": 0.0291920,
        "below zero": 0.0279352,
        "a size for each group": 0.0708996,
        "mostly zero": 0.0487801,
        "outliers": 0.0910774,
    },
    "q5_k": {
        "normal": 0.0361344,
        "small": 0.0359519,
        "laplace": 0.0430275,
        "heavy tails": 0.0439664,
        "uniform": 0.0277413,
        "above zero": 0.0144535,
        "below zero": 0.0144060,
        "a size for each group": 0.0361846,
        "mostly zero": 0.0358653,
        "outliers": 0.0478145,
    },
    "q6_k": {
        "normal": 0.0177485,
        "small": 0.0177481,
        "laplace": 0.0217045,
        "heavy tails": 0.0229683,
        "uniform": 0.0132570,
        "above zero": 0.0131209,
        "below zero": 0.0131251,
        "a size for each group": 0.0177748,
        "mostly zero": 0.0079431,
        "outliers": 0.0305677,
    },
}
