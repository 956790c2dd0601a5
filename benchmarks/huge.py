"""Convert a 61 GB target to Q8_0 and check that memory does not depend on its size.

    python benchmarks/huge.py --work DIR [--layers 60]

The checkpoint has the shapes of Gemma 4 31B: sparse shards of zeros, which take no disk space,
and a tokenizer of Gemma's size. The output is 32 GB; DIR must have room for it and is emptied
afterwards. A target with the minimum number of layers is converted first; the growth is the
difference of anonymous memory between the two. Pages of the mapped shards (`resident_mb`) are not
counted. With --layers a smaller target is converted, and the result says so. The exit code is 1
unless memory grows by less than 50 MB.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import synthetic, watch
from g4spec.gguf import GGUF

SMALLEST, GOAL_MB = 6, 50
Q8_0 = 34 / 64  # of the bytes of bf16


def one(work: Path, layers: int) -> dict[str, Any]:
    """Make a target of `layers` layers, convert it, and return the figures; delete all files."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        source, out = Path(folder) / "target", Path(folder) / "out.gguf"
        size = synthetic.sparse_target(source, layers)
        need, free = int(size * Q8_0) + (1 << 30), shutil.disk_usage(folder).free
        if free < need:
            raise SystemExit(
                f"{work}: {layers} layers need {need / 1e9:.0f} GB, free are "
                f"{free / 1e9:.0f} GB; try another --work, or --layers"
            )
        print(f"{layers} layers: {size:,} bytes of safetensors", flush=True)
        got = watch.measure_process(
            [sys.executable, "-m", "g4spec", "convert", source, "-o", out, "--type", "q8_0", "-q"]
        )
        with GGUF(out) as file:
            types = sorted({t.format.name for t in file.tensors.values()})
            tensors = len(file.tensors)
        written = out.stat().st_size
    rounded = {k: round(v, 1) for k, v in got.items()}
    print(f"  {written:,} bytes of GGUF: {rounded}", flush=True)
    return {
        "layers": layers,
        "input_bytes": size,
        "output_bytes": written,
        "tensors": tensors,
        "types": types,
        **rounded,
    }


def main() -> int:
    """Convert the small and the full target and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=synthetic.LAYERS)
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    small, whole = one(args.work, SMALLEST), one(args.work, args.layers)
    grown = round(whole["anonymous_mb"] - small["anonymous_mb"], 1)
    print(f"{whole['input_bytes'] / small['input_bytes']:.1f} times the input, {grown:+} MB")
    watch.write_result(
        args.out,
        "huge",
        {
            "complete": args.layers == synthetic.LAYERS,
            "load": os.getloadavg()[0],
            "growth_mb": grown,
            "goals_met": grown < GOAL_MB,
            "small": small,
            "whole": whole,
        },
    )
    return 0 if grown < GOAL_MB else 1


if __name__ == "__main__":
    sys.exit(main())
