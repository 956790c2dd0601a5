"""Time the feed-forward part of layers with experts alone, with the shapes of Gemma 4 26B-A4B.

    python benchmarks/gpu_experts.py [--rows 1 8 16 32 64 128]

A graph of four layers, each after its attention, with random Q4_K weights, down matrices in Q8_0
and Q5_0 in turn. Prints for each number of rows: microseconds a layer, a digest of the results (two
versions of the kernels with the same bits print the same), and the microseconds that each kernel
adds. Writes `results/<date>-gpu-experts.json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from benchmarks.gpu_steps import kernels
from g4spec import quant
from g4spec.measure import synthetic
from g4spec.measure import synthetic_bench as steps
from g4spec.ops.weights import ExpertLayer
from g4spec.runtime.cuda.build import launch, units
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.step import experts, graphs

LAYERS, DOWN, EPS = 4, ("q8_0", "q5_0"), 1e-6
NORMS = ("post_attention", "ffn_norm", "post", "post_dense", "router_norm", "expert_norm")
S = experts.SHAPE


def compile_first(rows: list[int]) -> None:
    """Compile the kernels in parallel."""
    arch, names = launch.arch(), set[str]()
    for down in DOWN:
        types = [("q4_k", 256), (down, 64)] * 2
        sizes = (8, 16, experts.capacity(S, types, arch))
        names |= {
            experts.instance(types, S, next(n for n in sizes if count <= n), arch) for count in rows
        }
    units.compile_all([units.Job("experts.cu", name, arch) for name in sorted(names)], workers=16)


def layer(down: str, ops: CudaOps) -> ExpertLayer:
    def matrix(type: str, *shape: int) -> Any:
        return synthetic._matrix(quant.get(type), shape, ops)

    def vector(count: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(count, device=ops.device)

    return ExpertLayer(
        n_used=S.k,
        up_exps=None,
        eps=EPS,
        router=torch.randn(S.experts, S.width, device=ops.device),
        gains=vector(S.experts),
        gate=matrix("q4_k", S.dense, S.width),
        up=matrix("q4_k", S.dense, S.width),
        down=matrix(down, S.width, S.dense),
        gate_exps=matrix("q4_k", S.experts, 2 * S.expert, S.width),
        down_exps=matrix(down, S.experts, S.width, S.expert),
        **{name: vector(S.width) for name in (*NORMS, "post_experts")},
    )


def timed(layers: list[ExpertLayer], h: torch.Tensor, x: torch.Tensor, ops: CudaOps) -> Any:
    """Return the times of layers that all have the same input rows h and x [T, H]."""

    def step() -> tuple[torch.Tensor, ...]:
        return tuple(ops.expert_layer(h, x, e, e.post, None)[0] for e in layers)

    step()
    graph = graphs.Capture(step, None)
    graph.replay()
    assert all(bool(y.isfinite().all()) for y in graph.outputs)
    return {
        "rows": len(x),
        "us": round(steps.milliseconds(graph.replay) * 1e3 / LAYERS, 1),
        "digest": watch.digest(graph.outputs),
        "kernels_us": {
            name: round(ms * 1e3 / LAYERS, 1) for name, ms in kernels(graph.replay).items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compile_first(args.rows)
    torch.manual_seed(0)
    ops = CudaOps("cuda")
    layers = [layer(DOWN[i % len(DOWN)], ops) for i in range(LAYERS)]
    h, x = (torch.randn(max(args.rows), S.width, device=ops.device) for _ in "hx")
    found = []
    for count in args.rows:
        found.append(timed(layers, h[:count].contiguous(), x[:count].contiguous(), ops))
        print("{rows:4} rows {us:7.1f} us a layer  {digest}  {kernels_us}".format(**found[-1]))
    watch.write_result(args.out, "gpu-experts", {"layers": found})


if __name__ == "__main__":
    main()
