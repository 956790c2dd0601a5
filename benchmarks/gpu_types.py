"""Products of a layer of the 31B by quant type on a GPU, against Q4_K.

    python benchmarks/gpu_types.py [--types iq4_xs q3_k ...] [--rows 1 16] [--layers 4]

Queries to values, output, gates and ups, down, all of one type, random codes and scales, of so
many layers, which do not fit into L2. For each type and number of rows: microseconds of a layer's
products one behind the other (a CUDA graph); milliseconds for each GB that the file has of them,
and that memory holds, both over those of Q4_K, which is measured again beside each type; GB/s of
packing. First that rows keep their bits among more and that values are right. Writes
`results/<date>-gpu-types.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))

from g4spec import quant  # noqa: E402
from g4spec.measure import run_record, synthetic  # noqa: E402
from g4spec.measure.synthetic_bench import milliseconds  # noqa: E402
from g4spec.runtime.cuda.build import launch, units  # noqa: E402
from g4spec.runtime.cuda.build.constants import GROUP_ROWS  # noqa: E402
from g4spec.runtime.cuda.ops import CudaOps  # noqa: E402
from g4spec.runtime.cuda.step import graphs, linear, linear_wide, packed_rows  # noqa: E402
from g4spec.runtime.cuda.weights import held, packing  # noqa: E402
from g4spec.runtime.cuda.weights.dequant import Weight, plain  # noqa: E402

SHAPES = {"qkv": (16384, 5376), "o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504)}
BASE = "q4_k"


def compile_first(types: list[str], rows: list[int], arch: str) -> None:
    """Compile what is measured in several processes."""
    narrow, wide = set(), set()
    for type in types:
        for n, _ in SHAPES.values():
            for tiles in {packed_rows.tiles(count) for count in rows}:
                for few in (False, True):
                    how = linear.gemm_config(type, 256, n // 128, tiles, arch, few)
                    narrow |= {how.name("linear"), how.name("gate_up")}
                    for count in rows:
                        if count > GROUP_ROWS:
                            groups = min(packed_rows.groups(count), linear.MAX_ROW_GROUPS)
                            (own,) = linear_wide.for_row_groups((how,), groups, arch)
                            wide |= {own.name("linear"), own.name("gate_up")}
    jobs = [
        units.Job(file, name, arch)
        for file, names in (("linear.cu", narrow), ("linear_wide.cu", wide))
        for name in sorted(names)
    ]
    units.compile_all(jobs, workers=16)


def run(
    name: str, x: packed_rows.PackedRows, weight: Weight, by: linear.SplitKWorkspace
) -> torch.Tensor:
    """The product of this name; what it leaves."""
    if name == "gate_up":
        return linear_wide.gate_up(x, weight, by).data
    return linear_wide.linear(x, weight, by, parts=True)


def layer(type: str, ops: CudaOps) -> dict[str, Weight]:
    """A layer's matrices."""
    form = quant.get(type)
    return {n: synthetic._matrix(form, shape, ops).weight for n, shape in SHAPES.items()}


def load_rate(type: str) -> float:
    """GB/s of the file's bytes, already on the GPU, at which matrices are packed."""
    n, k = SHAPES["down"]
    size = n, quant.get(type).row_bytes(k)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    took = []
    for _ in range(3):  # the first time memory is allocated
        torch.cuda.synchronize()
        began = time.perf_counter()
        packing.pack(type, held.held(type, raw), packing.unit_of(type, k))
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return raw.numel() / 1e9 / min(took)


def file_bytes(type: str) -> int:
    return sum(quant.get(type).nbytes(shape) for shape in SHAPES.values())


def right(weights: dict[str, Weight], by: linear.SplitKWorkspace) -> dict[str, Any]:
    """Whether one row has its bits among 16, and the largest error of a product, relatively."""
    w = weights["o"]
    x = torch.randn(16, w.columns, device=w.data.device)
    many = linear.linear(packed_rows.pack_rows(x), w, by)
    alone = [linear.linear(packed_rows.pack_rows(row.contiguous()), w, by) for row in x.split(1)]
    want = x.double() @ plain(w).double().t()
    error = (many - want).abs().amax(1) / want.abs().amax(1)
    return {"same_bits": torch.equal(torch.cat(alone), many), "error": float(error.max())}


def microseconds(layers: list[dict[str, Weight]], count: int, by: linear.SplitKWorkspace) -> float:
    """Of the products of a layer, for so many rows."""
    x = {
        n: packed_rows.pack_rows(torch.randn(count, k, device=by.partial.device))
        for n, (_, k) in SHAPES.items()
    }

    def chain() -> tuple[()]:
        for each in layers:
            for n in SHAPES:
                run(n, x[n], each[n], by)
        return ()

    play = graphs.Capture(chain, torch.cuda.graph_pool_handle()).replay
    return milliseconds(play, 20, 0.1) * 1e3 / len(layers)


def copies(first: dict[str, Weight], count: int) -> list[dict[str, Weight]]:
    return [
        first,
        *({n: replace(w, data=w.data.clone()) for n, w in first.items()} for _ in range(count - 1)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", default=[*packing.PARTS], choices=[*packing.PARTS])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    ops = CudaOps("cuda")
    by = linear.SplitKWorkspace(ops.device)
    compile_first([*dict.fromkeys([BASE, *args.types])], args.rows, launch.arch())
    base = copies(layer(BASE, ops), args.layers)
    rows = []
    for type in args.types:
        weights = layer(type, ops)
        row: dict[str, Any] = {
            "type": type,
            "file_gb": file_bytes(type) / 1e9,
            "held_gb": sum(w.data.nbytes for w in weights.values()) / 1e9,
            "pack_gb_s": load_rate(type),
            **right(weights, by),
        }
        layers = copies(weights, args.layers)
        for count in args.rows:
            own, other = (microseconds(of, count, by) for of in (layers, base))
            per = own / row["file_gb"], other / (file_bytes(BASE) / 1e9)
            row |= {
                f"us_{count}": own,
                f"us_{count}_q4_k": other,
                f"per_file_byte_{count}": per[0] / per[1],
                f"per_held_byte_{count}": own / row["held_gb"] / per[1],
            }
        del layers, weights
        rows.append(row)
        print(json.dumps(row), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{datetime.date.today()}-gpu-types.json"
    path.write_text(
        json.dumps(
            {
                "machine": run_record.describe_machine(),
                "device": ops.title,
                "torch": torch.__version__,
                "commit": run_record.commit(),
                "layers": args.layers,
                "shapes": SHAPES,
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
