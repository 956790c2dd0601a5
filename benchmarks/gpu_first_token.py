"""Measure the time to the first token from a file of the 31B's size, cold and warm.

    python benchmarks/gpu_first_token.py --work DIR [--layers 60] [--repeats 3]

Writes a GGUF with the shapes, types and tokenizer of Gemma 4 31B in Q4_K_M to DIR, 18.7 GB of
random numbers, and deletes it afterwards. `g4spec generate -n 1` then runs as a process: first with
an empty kernel cache, so that everything is compiled, then `--repeats` times with that cache. The
file is in the page cache if it fits, because it was just written. The time is that of the whole
process. The exit code is 1 unless the warm median is below 12 seconds (not checked with --layers).
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import synthetic, watch
from g4spec import gguf, quant
from g4spec.convert import convert
from g4spec.gguf.writer import TensorData

GOAL_SECONDS = 12
TILE = 1 << 18  # values that repeat in a tensor
PROMPT = "the fox is lazy"
write = gguf.write


class Content:
    """Contents of tensors: small random numbers in their type, repeated; ones for vectors."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.tiles: dict[tuple[quant.Format, int], Any] = {}

    def tile(self, form: quant.Format, columns: int) -> Any:
        if (form, columns) not in self.tiles:
            x = self.rng.standard_normal((max(1, TILE // columns), columns), np.float32)
            self.tiles[form, columns] = form.quantize(x * columns**-0.5).reshape(-1)
        return self.tiles[form, columns]

    def chunks(self, tensor: TensorData) -> Iterator[Any]:
        form, left = quant.by_type(tensor.type, tensor.name), tensor.nbytes
        if len(tensor.shape) == 1:
            yield form.quantize(np.ones(tensor.shape, np.float32))
            return
        tile = self.tile(form, tensor.shape[-1])
        while left:
            piece = tile[: min(left, tile.nbytes)]
            yield piece
            left -= piece.nbytes


def random_write(path: Path, kv: Any, tensors: Iterable[TensorData], *_: Any) -> int:
    """Write a GGUF as `gguf.write` does, with random contents except for frequencies."""
    content = Content()
    made = [
        t
        if t.name.startswith("rope_freqs")
        else TensorData(t.name, t.shape, t.type, content.chunks(t))
        for t in tensors
    ]
    return int(write(path, kv, made))


def model(folder: Path, layers: int) -> Path:
    """Write the file and return its path."""
    synthetic.sparse_target(folder / "target", layers)
    out = folder / "target.gguf"
    with mock.patch.object(gguf, "write", random_write):
        convert(folder / "target", out, type="q4_k_m")
    return out


def options(doc: str) -> argparse.ArgumentParser:
    """Add the options of scripts that make and run the file."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=synthetic.LAYERS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="result file")
    return parser


@contextlib.contextmanager
def made(work: Path, layers: int) -> Iterator[Path]:
    """Yield the file, in a folder that is removed afterwards."""
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        yield model(Path(name), layers)


def main() -> int:
    """Make the file, run, and write the result."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with made(args.work, args.layers) as path:
        size = path.stat().st_size
        print(f"{size:,} bytes", flush=True)
        command = [
            sys.executable,
            "-m",
            "g4spec",
            "generate",
            "-m",
            path,
            "-p",
            PROMPT,
            "-n",
            "1",
            "-c",
            "4096",
            "--device",
            args.device,
            "-q",
        ]
        env = {**os.environ, "XDG_CACHE_HOME": str(path.parent / "cache")}
        cold = watch.measure_process(command, env)
        print(f"cold {cold['seconds']:.1f} s", flush=True)
        runs = [watch.measure_process(command, env) for _ in range(args.repeats)]
    warm = watch.summarize(runs)
    print(f"warm {warm['seconds']:.1f} s", *(f"{r['seconds']:.1f}" for r in runs))
    whole = args.layers == synthetic.LAYERS
    met = warm["seconds"] < GOAL_SECONDS
    watch.write_result(
        args.out,
        "gpu-first-token",
        {
            "complete": whole,
            "bytes": size,
            "cold_seconds": round(cold["seconds"], 2),
            "warm": warm,
            "goals_met": met,
        },
    )
    return 0 if met or not whole else 1


if __name__ == "__main__":
    sys.exit(main())
