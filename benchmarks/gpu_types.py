"""Compare the GEMMs of a 31B layer in each quantized type with those in Q4_K on a GPU.

    python benchmarks/gpu_types.py [--types iq4_xs q3_k ...] [--rows 1 16] [--layers 4]

The matrices of a layer (qkv, o, gate_up, down) have the shapes of Gemma 4 31B, one type each time,
random codes and fixed scales; several layers, so that they do not fit into L2. For each type and
number of rows: microseconds of a layer's GEMMs in one CUDA graph; time per byte of the file
(`per_file_byte`) and per byte in GPU memory (`per_held_byte`), both divided by Q4_K's, which is
timed again beside each type; GB/s of packing (`pack_gb_s`). Before that: whether a row has the same
bits alone and among 16 (`same_bits`), and the largest relative error of a GEMM (`error`).
Writes `results/<date>-gpu-types.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from watch import write_result  # noqa: E402

from g4spec import quant  # noqa: E402
from g4spec.measure import run_record, synthetic  # noqa: E402
from g4spec.measure.synthetic_bench import milliseconds  # noqa: E402
from g4spec.runtime.cuda.build import launch, units  # noqa: E402
from g4spec.runtime.cuda.build.constants import GROUP_ROWS, PACK_ROWS  # noqa: E402
from g4spec.runtime.cuda.ops import CudaOps  # noqa: E402
from g4spec.runtime.cuda.step import (  # noqa: E402
    gemm_tiles,
    graphs,
    linear,
    linear_wide,
    packed_rows,
)
from g4spec.runtime.cuda.weights import dequant, held, packing  # noqa: E402
from g4spec.runtime.cuda.weights.dequant import Weight, plain  # noqa: E402

SHAPES = {"qkv": (16384, 5376), "o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504)}
BASE, DEVICE = "q4_k", "cuda"


def compile_first(types: list[str], rows: list[int], arch: str) -> None:
    """Compile all kernels that are launched, in parallel."""
    wgmma = linear_wide.WGMMA and arch == linear_wide.WGMMA_ARCH
    plain_scaled = packed_rows.PLAIN, packed_rows.SCALED
    jobs = {
        units.Job("norm.cu", packed_rows.instance(k, 1, *plain_scaled), arch)
        for _, k in SHAPES.values()
    }
    for type, (name, (n, k)) in product(types, SHAPES.items()):
        unit, kind = packing.unit_of(type, k), name if name == "gate_up" else "linear"
        jobs.add(units.Job("dequant.cu", dequant.instance(type, unit, torch.float16), arch))
        for tiles, few in product({1, *map(packed_rows.tiles, rows)}, (False, True)):
            if kind == "gate_up" and few:
                continue
            config = gemm_tiles.gemm_config(type, unit, n // PACK_ROWS, tiles, arch, few)
            jobs.add(units.Job("linear.cu", config.name(kind), arch))
            if tiles == 2:
                wide = wide_configs(config, rows, arch, wgmma)
                jobs |= {units.Job("linear_wide.cu", c.name(kind), arch) for c in wide}
    units.compile_all(sorted(jobs, key=str), workers=16)


def wide_configs(
    config: gemm_tiles.GemmConfig, rows: list[int], arch: str, wgmma: bool
) -> Iterator[gemm_tiles.GemmConfig]:
    """Yield the configs of linear_wide.cu for all numbers of rows above 16."""
    for count in rows:
        left = packed_rows.groups(count) if count > GROUP_ROWS else 0
        while left > 0:
            groups = min(left, linear.MAX_ROW_GROUPS)
            (found,) = linear_wide.for_row_groups((config,), groups, arch, wgmma)
            yield found
            left -= found.groups


def multiply(
    name: str, x: packed_rows.PackedRows, weight: Weight, workspace: linear.SplitKWorkspace
) -> torch.Tensor:
    """Launch the GEMM of one matrix of the layer as a decode step does and return its output."""
    if name == "gate_up":
        return linear_wide.gate_up(x, weight, workspace).data
    return linear_wide.linear(x, weight, workspace, parts=True)


def make_layer(type: str, ops: CudaOps) -> dict[str, Weight]:
    """Return the packed matrices of one layer, by name."""
    form = quant.get(type)
    return {n: synthetic._matrix(form, shape, ops).weight for n, shape in SHAPES.items()}


def pack_rate(type: str) -> float:
    """Return the GB/s, in bytes of the file already on the GPU, at which a matrix is packed."""
    n, k = SHAPES["down"]
    size = n, quant.get(type).row_bytes(k)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
    seconds = []
    for _ in range(3):  # the first time also allocates memory
        torch.cuda.synchronize()
        began = time.perf_counter()
        packing.pack(type, held.held(type, raw), packing.unit_of(type, k))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return raw.numel() / 1e9 / min(seconds)


def file_bytes(type: str) -> int:
    """Return the bytes of a layer's matrices in a file of this type."""
    return sum(quant.get(type).nbytes(shape) for shape in SHAPES.values())


def check(weights: dict[str, Weight], workspace: linear.SplitKWorkspace) -> dict[str, Any]:
    """Return whether a row has the same bits alone and among 16, and the largest relative error of
    a GEMM against float64."""
    weight = weights["o"]
    x = torch.randn(16, weight.columns, device=weight.data.device)
    together = linear.linear(packed_rows.pack_rows(x), weight, workspace)
    alone = [
        linear.linear(packed_rows.pack_rows(x[i : i + 1]), weight, workspace) for i in range(len(x))
    ]
    expected = x.double() @ plain(weight).double().t()
    error = (together - expected).abs().amax(1) / expected.abs().amax(1)
    return {"same_bits": torch.equal(torch.cat(alone), together), "error": float(error.max())}


def microseconds(
    layers: list[dict[str, Weight]], count: int, workspace: linear.SplitKWorkspace
) -> float:
    """Return the microseconds of one layer's GEMMs for `count` rows."""
    x = {
        n: packed_rows.pack_rows(torch.randn(count, k, device=workspace.partial.device))
        for n, (_, k) in SHAPES.items()
    }

    def all_layers() -> tuple[()]:
        for layer in layers:
            for n in SHAPES:
                multiply(n, x[n], layer[n], workspace)
        return ()

    all_layers()  # loads the kernels, which a capture must not do
    replay = graphs.Capture(all_layers, None).replay
    return milliseconds(replay, 20, 0.1) * 1e3 / len(layers)


def copies(layer: dict[str, Weight], count: int) -> list[dict[str, Weight]]:
    """Return `count` layers with the same values in different memory."""
    clones = [
        {n: replace(w, data=w.data.clone()) for n, w in layer.items()} for _ in range(count - 1)
    ]
    return [layer, *clones]


def measure(
    type: str,
    ops: CudaOps,
    base: list[dict[str, Weight]],
    rows: list[int],
    workspace: linear.SplitKWorkspace,
) -> dict[str, Any]:
    """Return the figures of one type; `base`: layers of Q4_K, as many as are measured."""
    layer = make_layer(type, ops)
    figures: dict[str, Any] = {
        "type": type,
        "file_gb": file_bytes(type) / 1e9,
        "held_gb": sum(w.data.nbytes for w in layer.values()) / 1e9,
        "pack_gb_s": pack_rate(type),
        **check(layer, workspace),
    }
    layers, base_gb = copies(layer, len(base)), file_bytes(BASE) / 1e9
    for count in rows:
        us, base_us = (microseconds(of, count, workspace) for of in (layers, base))
        figures |= {
            f"us_{count}": us,
            f"us_{count}_q4_k": base_us,
            f"per_file_byte_{count}": us / figures["file_gb"] / (base_us / base_gb),
            f"per_held_byte_{count}": us / figures["held_gb"] / (base_us / base_gb),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    types = [*packing.PARTS]
    parser.add_argument("--types", nargs="*", default=types, choices=types, metavar="TYPE")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="rows per GEMM")
    parser.add_argument("--layers", type=int, default=4, help="layers of each type in GPU memory")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the result")
    args = parser.parse_args()
    ops = CudaOps(DEVICE)
    workspace = linear.SplitKWorkspace(ops.device)
    compile_first([*dict.fromkeys([BASE, *args.types])], args.rows, launch.arch())
    base = copies(make_layer(BASE, ops), args.layers)
    result = {
        "overridden_ops": run_record.overridden(ops),
        "layers": args.layers,
        "shapes": SHAPES,
        "rows": [],
    }
    for type in args.types:
        figures = measure(type, ops, base, args.rows, workspace)
        print(json.dumps(figures), flush=True)
        result["rows"].append(figures)
        write_result(args.out, "gpu-types", result)  # kept if the time runs out


if __name__ == "__main__":
    main()
