"""Time a full `validate` against `sha256sum`, and the opening of a file with Gemma's vocabulary.

    python benchmarks/opening.py [--repeats 5] [--work DIR]

The file is z-lab's DFlash for the 31B with random weights, as Q8_0, with 262,144 tokens and 514,906
merges. `validate` with all rules and `sha256sum` read it in alternation, both as processes.
`inspect` is timed with the start of the interpreter; opening the tokenizer, until the first text is
tokenized, in its own process without it; `tokenize` as a whole command, without a required time.
The exit code is 1 unless validate is no slower than sha256sum, and `inspect` and opening the
tokenizer take less than a second each.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import synthetic, watch
from g4spec.convert import convert
from g4spec.gguf import GGUF

G4SPEC = [sys.executable, "-m", "g4spec"]
OPEN = """
import sys, time
from pathlib import Path
from g4spec.gguf import GGUF
from g4spec.runtime.tokenizer import Tokenizer
start = time.perf_counter()
with GGUF(Path(sys.argv[1])) as file:
    tokenizer = Tokenizer.from_gguf(file)
assert tokenizer.encode("the fox is lazy")
print(time.perf_counter() - start)
"""


def opened(path: Path) -> dict[str, float]:
    """Return the seconds from the closed file to the first text's tokens."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    return {"seconds": float(done.stdout)}


def measured(path: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Run everything in alternation and return all measurements."""
    commands: dict[str, list[object]] = {
        "validate": [*G4SPEC, "validate", path],
        "sha256sum": ["sha256sum", path],
        "inspect": [*G4SPEC, "inspect", path],
        "tokenize": [*G4SPEC, "tokenize", "-m", path, "the fox is lazy"],
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in [*commands, "tokenizer"]}
    for _ in range(repeats):
        for name, command in commands.items():
            runs[name].append(watch.measure_process(command))
        runs["tokenizer"].append(opened(path))
    return runs


def main() -> int:
    """Make the file, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where 5 GB have room; emptied afterwards")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        work = Path(folder)
        synthetic.target_config(work / "target")
        path = work / "draft.gguf"
        convert(synthetic.draft(work / "draft"), path, target=work / "target")
        with GGUF(path) as file:
            counts = {k: len(file.kv[f"tokenizer.ggml.{k}"]) for k in ("tokens", "merges")}
        size = path.stat().st_size
        print(f"made {size:,} bytes with {counts} in {time.perf_counter() - start:.0f} s")
        runs = measured(path, args.repeats)
    found: dict[str, Any] = {name: watch.summarize(r) for name, r in runs.items()}
    ratio = found["validate"]["seconds"] / found["sha256sum"]["seconds"]
    for name, got in found.items():
        print(f"{name}: {got['seconds']:.2f} s")
    print(f"validate takes {ratio:.2f} of sha256sum's time")
    good = ratio <= 1 and all(found[n]["seconds"] < 1 for n in ("inspect", "tokenizer"))
    watch.write_result(
        args.out,
        "opening",
        {
            "bytes": size,
            **counts,
            "load": os.getloadavg()[0],
            "goals_met": good,
            "validate_per_sha256sum": round(ratio, 3),
            "medians": found,
            "runs": runs,
        },
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
