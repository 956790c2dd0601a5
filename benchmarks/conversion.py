"""Time the conversion of a full-size draft to Q8_0 against llama.cpp's converter.

    python benchmarks/conversion.py --source LLAMA_CPP_SOURCE [--repeats 3] [--work DIR]

The draft is z-lab's DFlash for the 31B with random weights, 3,071,941,240 bytes; its target has a
tokenizer of Gemma's size. Both converters run as processes, start-up included, alternating on the
same folder; without --source only ours runs. Memory is the peak of anonymous memory, which excludes
pages of mapped files that the kernel can reclaim (`resident_mb` includes them). Growth is that peak
minus the peak of `g4spec convert --help`. The exit code is 1 unless ours is at least 4 times as
fast, grows by less than 400 MB, and every matrix has the bytes that llama.cpp writes.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import synthetic, watch
from g4spec.gguf import GGUF

GOAL_SPEED, GOAL_MB = 4, 400
OURS = [sys.executable, "-m", "g4spec", "convert"]


def differing(a: Path, b: Path) -> list[str]:
    """Return the tensors whose type or bytes differ between the files."""
    with GGUF(a) as x, GGUF(b) as y:
        return sorted(
            n
            for n in {*x.tensors, *y.tensors}
            if n not in x.tensors
            or n not in y.tensors
            or x.tensors[n].type != y.tensors[n].type
            or x.raw(n).tobytes() != y.raw(n).tobytes()
        )


def measured(work: Path, source: Path | None, repeats: int) -> dict[str, Any]:
    """Run both converters in alternation and return all measurements."""
    draft, target, ours, theirs = (work / n for n in ("draft", "target", "a.gguf", "b.gguf"))
    commands: dict[str, list[object]] = {
        "g4spec": [*OURS, draft, "--target", target, "-o", ours, "--quiet"]
    }
    env = dict(os.environ)
    if source:
        env["PYTHONPATH"] = str(source / "gguf-py")
        commands["llama_cpp"] = [
            sys.executable,
            source / "convert_hf_to_gguf.py",
            draft,
            "--target-model-dir",
            target,
            "--outtype",
            "q8_0",
            "--outfile",
            theirs,
        ]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            (ours if name == "g4spec" else theirs).unlink(missing_ok=True)
            runs[name].append(watch.measure_process(command, env if name != "g4spec" else None))
            print(name, {k: round(v, 1) for k, v in runs[name][-1].items()}, flush=True)
    found: dict[str, Any] = {"runs": runs, "output_bytes": ours.stat().st_size}
    if source:
        found["differing"] = differing(ours, theirs)
    return found


def main() -> int:
    """Make the checkpoint, convert it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="llama.cpp's source folder")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where 7 GB have room; emptied afterwards")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    idle = watch.measure_process([*OURS, "--help"])["anonymous_mb"]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        work = Path(folder)
        synthetic.target_config(work / "target")
        synthetic.draft(work / "draft")
        found = measured(work, args.source, args.repeats)
    mine = found["g4spec"] = watch.summarize(found["runs"]["g4spec"])
    mine["growth_mb"] = round(mine["anonymous_mb"] - idle, 3)
    good = mine["growth_mb"] < GOAL_MB
    print(f"g4spec: {mine['seconds']:.1f} s, {mine['growth_mb']:.0f} MB")
    if args.source:
        its = found["llama_cpp"] = watch.summarize(found["runs"]["llama_cpp"])
        for key in ("seconds", "cpu_seconds"):
            found[f"speedup_{key}"] = round(its[key] / mine[key], 2)
        good = good and found["speedup_seconds"] >= GOAL_SPEED and not found["differing"]
        print(
            f"llama.cpp: {its['seconds']:.1f} s, {its['anonymous_mb']:.0f} MB; ours is "
            f"{found['speedup_seconds']:.2f} times as fast, {found['speedup_cpu_seconds']:.2f} "
            f"by processor time; differing tensors: {found['differing'] or 'none'}"
        )
    watch.write_result(
        args.out,
        "conversion",
        {
            "bytes": synthetic.DRAFT_BYTES,
            "load": os.getloadavg()[0],
            "goals_met": good,
            **found,
        },
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
