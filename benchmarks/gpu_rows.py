"""Time steps with one row each of many sequences, with the published shapes on a GPU.

    python benchmarks/gpu_rows.py [--model 31b] [--rows 1 16 32 64 128] [--context 64]
        [--type iq3_s --tensor-type attn_v=q4_k ...]

Prints for each number of rows: milliseconds per step after half a second of rest, then without a
pause for one second, with power and clock, and the time by kernel. Weights are random
(`g4spec bench --synthetic`). Writes `results/<date>-gpu-rows.json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from gpu_steps import kernels, sustained  # noqa: E402
from watch import write_result  # noqa: E402

from g4spec.core import PAGE, Sequence  # noqa: E402
from g4spec.measure import run_record, synthetic  # noqa: E402
from g4spec.measure import synthetic_bench as steps  # noqa: E402
from g4spec.runtime import devices  # noqa: E402
from g4spec.runtime.batches import batch_of  # noqa: E402
from g4spec.runtime.cuda.build import launch, units  # noqa: E402
from g4spec.runtime.cuda.step import gemm_tiles, linear, linear_wide  # noqa: E402
from g4spec.runtime.pool import Pool  # noqa: E402


def compile_first(rows: list[int]) -> None:
    """Compile in parallel the kernels of linear_wide.cu that steps of Q4_K_M files launch."""
    arch, names = launch.arch(), set()
    wgmma = linear_wide.WGMMA and arch == linear_wide.WGMMA_ARCH
    for groups in {min(-(-count // 16), linear.MAX_ROW_GROUPS) for count in rows if count > 16}:
        cuts = [
            gemm_tiles.gemm_config(type, 256, 2, 2, arch, narrow)
            for type in ("q4_k", "q6_k")
            for narrow in (False, True)
        ]
        cuts.append(gemm_tiles.gemm_config("q6_k", 256, gemm_tiles.MANY_GROUPS, 2, arch))
        for how in cuts:
            (own,) = linear_wide.for_row_groups((how,), groups, arch, wgmma)
            names |= {own.name("linear"), own.name("gate_up")}
        names.add(
            linear_wide.two_matrix_instance(
                *linear_wide.for_row_groups((cuts[0], cuts[2]), groups, arch, wgmma)
            )
        )
    jobs = [units.Job("linear_wide.cu", name, arch) for name in sorted(names)]
    units.compile_all(jobs, workers=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="31b", choices=[*synthetic.TARGETS])
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--tensor-type", nargs="*", default=[], metavar="PATTERN=TYPE")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 32, 64, 128])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    compile_first(args.rows)
    backend: Any = devices.select("cuda", "q8_0")
    n_ctx, texts = args.context + 2 * PAGE, max(args.rows)
    target = synthetic.make_target(
        args.model, args.type, backend, n_ctx, texts, texts * (n_ctx + PAGE), args.tensor_type
    )
    pool = Pool(target.space)
    sequences = [Sequence(pool.free_slots.pop(), [], 0) for _ in range(texts)]
    for sequence in sequences:
        pool.grow(sequence, n_ctx)
    for first in range(0, texts, 8):  # zeros would be cheaper to multiply
        for at in range(0, args.context, 16):
            target.step(
                batch_of(
                    target.ops,
                    [
                        (s.slot, at, steps.random_tokens(target, 16))
                        for s in sequences[first : first + 8]
                    ],
                )
            )
    found: list[dict[str, Any]] = []
    for count in args.rows:
        play = steps.StepGraph(target, sequences[:count], 1, args.context).replay
        assert bool(play().isfinite().all()), count
        rested, settled = steps.milliseconds(play, rest=steps.REST), sustained(play)
        found.append(
            {"rows": count, "ms": rested, "sustained": settled, "kernels_ms": kernels(play)}
        )
        print(f"{args.model} {count:4d} rows {rested:7.3f} ms, sustained {settled}", flush=True)
    for each in found:
        longest = list(each["kernels_ms"].items())[:9]
        print(
            each["rows"],
            "rows:",
            *(f"{name.split('void ')[-1][:60]} {ms:g};" for name, ms in longest),
        )
    write_result(
        args.out,
        "gpu-rows",
        {
            "model": args.model,
            "type": args.type,
            "tensor_types": args.tensor_type,
            "context": args.context,
            "overridden_ops": run_record.overridden(target.ops),
            "read_bytes_per_second": steps.bandwidth(),
            "rows": found,
        },
    )


if __name__ == "__main__":
    main()
