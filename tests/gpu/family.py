"""Files for tests of the GPU engine: the trained family, and random models of every kind in shapes
that the kernels support."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from g4spec import convert
from g4spec.core import Batch, Pick
from g4spec.ops.sampling import Sampler
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from tests.oracle import build
from tests.support import kinds, tiny

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny"
WINDOW, VOCAB, CTX = kinds.GPU_WINDOW, 1024, 512

SHAPE: dict[str, Any] = {
    "hidden": 256,
    "inter": 512,
    "heads": 2,
    "kv": 1,
    "global_kv": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "window": WINDOW,
    "vocab": VOCAB,
    "layers": 6,
    "period": 3,
}
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 16, "top_k": 3, "expert_inter": 128},
    "per-layer": {"ple": 64, "shared": 2, "k_eq_v": False},
}


TYPES = ("f32", "f16", "bf16", "q8_0", "q4_k_m")
"""Quant types of the trained family."""

DRAFTS = kinds.GPU


PAIRS = [(kind, "dense") for kind in DRAFTS] + [
    (kind, target) for target in ("experts", "per-layer") for kind in ("zlab", "assistant")
]
"""Pairs of random drafts and targets that are tested."""


def trained(folder: Path, type: str) -> dict[str, Path]:
    """Convert the trained target to a type, and its drafts. Return the files."""
    files = {"target": folder / "target.gguf"}
    convert.convert(TRAINED / "target", files["target"], type=type)
    for name in ("dflash", "dflash-speculators", "assistant", "dflash-other"):
        files[name] = folder / f"{name}.gguf"
        convert.convert(
            TRAINED / name,
            files[name],
            target=files["target"],
            type="q8_0" if type.startswith("q") else type,
        )
    return files


def random(folder: Path, kind: str, type: str = "q8_0") -> Path:
    """Convert a random target of `TARGETS` and keep its checkpoint in the same folder.

    Its layers outweigh its embedding, so that errors grow. `<kind>-calm.gguf` is the same target
    with smaller layers.
    """
    at = tiny.target(folder / kind, **(SHAPE | TARGETS[kind]))
    convert.convert(at, folder / f"{kind}-calm.gguf", type=type)
    convert.convert(build.with_large_layers(at, 5.0), folder / f"{kind}.gguf", type=type)
    return folder / f"{kind}.gguf"


def draft(folder: Path, kind: str, target: str, type: str = "q8_0") -> Path:
    """Convert a random draft of `DRAFTS` for a target made by `random` in the same folder."""
    name = f"{kind}-{target}"
    DRAFTS[kind](folder / name, folder / target)
    convert.convert(folder / name, folder / f"{name}.gguf", target=folder / target, type=type)
    return folder / f"{name}.gguf"


def pairs(
    folder: Path, shape: dict[str, Any], make: dict[str, Callable[[Path, Path], Any]], type: str
) -> Path:
    """Write `target.gguf`, a random target of this shape, and `<name>.gguf` of each draft in
    `make`. Return the folder."""
    on = tiny.target(folder / "target", **shape)
    convert.convert(build.with_large_layers(on, 5.0), folder / "target.gguf", type=type)
    for name, maker in make.items():
        maker(folder / name, on)
        convert.convert(folder / name, folder / f"{name}.gguf", target=on, type=type)
    return folder


def generate(
    engine: Engine, prompt: list[int], length: int, n: int, sampler: Sampler | None = None
) -> Request:
    """Return a finished request that ignores stop tokens."""
    run = engine.generate(prompt, Options(n, sampler or Sampler(), length, ignore_eos=True))
    for _ in run:
        pass
    return run


def help_out(engine: Engine, truth: list[int], right: Callable[[int], int]) -> None:
    """Replace the first `right(i)` tokens of the draft's i-th proposal by those of `truth`. Cycles
    then run in the eager runner."""
    made: Any = engine.draft
    engine.scheduler.cycles.runners = [EagerRunner(engine.target, made)]
    propose, turn = type(made).propose, iter(range(10**6))

    def better(batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        drafted = propose(made, batch, count, pick).clamp(min=0)
        position = int(batch.positions[0])
        true = truth[position + 1 : position + 1 + min(count, right(next(turn)))]
        drafted[0, : len(true)] = drafted.new_tensor(true)
        return drafted

    made.propose = better
