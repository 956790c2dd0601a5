"""Malformed and unusual targets and drafts for a GPU: some must be refused before a kernel runs,
others must run although no kernel supports them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.backend import Backend
from g4spec.convert import convert
from g4spec.core import PROMPT_BLOCK
from g4spec.errors import G4Error, InputError
from g4spec.ops import reference
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.draft_file import DraftFile
from g4spec.runtime.engine import Engine
from g4spec.runtime.target import Target
from tests.emulator import runtime
from tests.gpu import family
from tests.gpu.device import EMULATED, GPU
from tests.support import malformed, tiny, tiny_drafts
from tests.support.malformed import Broken

CTX, NEW = 256, 6
PROMPT = [2, *range(20, 60)]
NEAR = {"17 heads to 1": 0.6, "64 columns, 36 in experts": 0.1}
"""Maximum difference of logits between the GPU, which rounds activations to half precision, and
the reference. Default 0.05; these targets differ by 0.30 and 0.04 even on the CPU with the same
cache."""
OPTIONAL = "missing: rope_freqs.weight"
"""Optional tensor of a draft: without it, RoPE frequencies are unscaled, which costs acceptance but
does not change the text."""

SMALL: dict[str, Any] = {"layers": 3, "period": 3, "vocab": 512}
KINDS: dict[str, dict[str, Any]] = {
    kind: {"layers": 6, "heads": 2, "kv": 1} | shape for kind, shape in family.TARGETS.items()
}
"""Kinds of targets from which malformed ones are made."""
LARGE = {"heads": 2, "kv": 1, "head_dim": 256, "global_head_dim": 512}
"""Head sizes that prefill kernels support."""
ODD_TARGETS: dict[str, dict[str, Any]] = {
    "heads of 48": {"head_dim": 48, "global_head_dim": 80},
    "heads of 2": {"head_dim": 2, "global_head_dim": 6},
    "33 columns": {"hidden": 33, "inter": 35},
    "5 experts": {"experts": 5, "top_k": 5, "expert_inter": 33},
    "1 expert": {"experts": 1, "top_k": 1, "expert_inter": 32, "hidden": 320},
    "3 experts": {"experts": 3, "top_k": 1, "expert_inter": 64, "hidden": 256},
    "129 experts": {"experts": 129, "top_k": 17, "expert_inter": 32},
    "per-layer 10": {"layers": 6, "ple": 10, "shared": 2, "k_eq_v": False},
    "window of 1": {"window": 1},
    "window of 7, 6 heads to 3": {"window": 7, "heads": 6, "kv": 3, "global_kv": 3},
    "17 heads to 1": {
        "heads": 17,
        "kv": 1,
        "global_kv": 1,
        "head_dim": 256,
        "global_head_dim": 512,
    },
    "36 columns, heads of 256": {"hidden": 36, "inter": 44, **LARGE},
    "260 columns, 5 experts": {
        "hidden": 260,
        "inter": 268,
        "experts": 5,
        "top_k": 5,
        "expert_inter": 36,
        **LARGE,
    },
    "260 columns, 8 experts": {
        "hidden": 260,
        "experts": 8,
        "top_k": 5,
        "expert_inter": 32,
        **LARGE,
    },
    "64 columns, 36 in experts": {
        "hidden": 64,
        "inter": 36,
        "experts": 7,
        "top_k": 3,
        "expert_inter": 40,
        **LARGE,
    },
    "no softcap": {"softcap": None},
}
"""Valid targets, each with a size that no kernel supports."""
Make = Callable[[Path, Path], Any]
ODD_DRAFTS: dict[str, Make] = {
    "zlab of 48": lambda at, on: tiny.zlab_dflash(at, on, head_dim=48, inter=34),
    "zlab of 2": lambda at, on: tiny.zlab_dflash(at, on, head_dim=2),
    "zlab, blocks of 2": lambda at, on: tiny.zlab_dflash(at, on, block=2),
    "zlab, blocks of 13, window of 3": lambda at, on: tiny.zlab_dflash(at, on, block=13, window=3),
    "speculators of 80": lambda at, on: tiny.speculators_dflash(at, on, head_dim=80, heads=6, kv=3),
    "assistant": lambda at, on: tiny.assistant(at, on, hidden=36, inter=50, centroids=16),
    "dspark": lambda at, on: tiny_drafts.speculators_dspark(at, on, head_dim=48, block=5),
    "eagle3 of 48": lambda at, on: tiny_drafts.eagle3(at, on, head_dim=48),
    "p-eagle": lambda at, on: tiny_drafts.eagle3(at, on, depths=7, head_dim=80),
    "dflash2": lambda at, on: tiny_drafts.zlab_dflash2(at, on, head_dim=48, block=3),
    "zlab of 64": lambda at, on: tiny.zlab_dflash(at, on, head_dim=64, inter=34),
    "eagle3 of 64": lambda at, on: tiny_drafts.eagle3(at, on, head_dim=64, inter=50),
    "zlab of 64 on 36 columns": lambda at, on: tiny.zlab_dflash(at, on, head_dim=64, inter=34),
    "dspark of 64 on 36 columns": lambda at, on: tiny_drafts.speculators_dspark(
        at, on, head_dim=64
    ),
}
ON = {kind: {"hidden": 36} for kind in ODD_DRAFTS if kind.endswith("on 36 columns")}
"""Target shapes of some of these drafts."""
CACHE = {"17 heads to 1": "q8_0"}


def write_target(folder: Path, shape: dict[str, Any], type: str = "q8_0") -> Path:
    """Write a random target of a shape, as a checkpoint and as a GGUF in the same folder."""
    at = tiny.target(folder / "target", **(SMALL | shape))
    convert(at, folder / "target.gguf", type=type)
    return folder / "target.gguf"


def write_draft(folder: Path, make: Make) -> Path:
    """Write a draft for the target in the same folder."""
    make(folder / "draft", folder / "target")
    convert(folder / "draft", folder / "draft.gguf", target=folder / "target", type="q8_0")
    return folder / "draft.gguf"


@contextlib.contextmanager
def record_kernels() -> Iterator[list[str]]:
    """Yield a list of the g4spec kernels launched inside the context."""
    if EMULATED:
        with runtime.launched() as names:
            yield names
        return
    names, before = [], launch.Kernel.__call__

    def call(self: launch.Kernel, *args: Any, **more: Any) -> None:
        names.append(self.name)
        before(self, *args, **more)

    launch.Kernel.__call__ = call  # type: ignore[method-assign]
    try:
        yield names
    finally:
        launch.Kernel.__call__ = before  # type: ignore[method-assign]


def refused(load: Callable[[], object]) -> str | None:
    """Return None if a load fails with an InputError before any kernel runs; else what happened."""
    with record_kernels() as names:
        try:
            load()
        except InputError:
            return f"{len(names)} kernels ran first: {sorted(set(names))}" if names else None
        except G4Error as error:
            return f"{type(error).__name__}: {error}"
    return "it was loaded"


def broken_targets(source: Path) -> Iterator[Broken]:
    for how in malformed.HOWS:
        yield from malformed.tensors(source, how)
    yield from malformed.numbers(source)


def broken_drafts(kind: str, source: Path) -> Iterator[Broken]:
    for how in malformed.HOWS:
        for what, write in malformed.tensors(source, how, malformed.borrowed(kind, source)):
            if what != OPTIONAL:
                yield what, write
    yield from malformed.numbers(source)


def load_target(path: Path, device: str = GPU) -> Engine:
    return Engine.load(path, n_ctx=CTX, device=device, chunk=PROMPT_BLOCK)


def build(path: Path, backend: Backend, target: Target) -> None:
    """Load a draft for a loaded target."""
    with DraftFile(path) as file:
        file.kind.check_pair(file.config, target.config)
        file.build(backend, target)


def text(engine: Engine, length: int) -> list[int]:
    return family.generate(engine, PROMPT, length, NEW).ids


def wrong_text(
    target: Path, draft: Path | None, cache: str = "f16", near: float = 0.05
) -> str | None:
    """Return None if a pair generates its target's text, close to the reference; else the error."""
    with Engine.load(
        target, draft, n_ctx=CTX, device=GPU, cache_type=cache, chunk=PROMPT_BLOCK
    ) as engine:
        plain = text(engine, 0)
        if draft is not None:
            most = engine.draft.max_tokens if engine.draft else 0
            for length in sorted({1, min(5, most), most}):
                if text(engine, length) != plain:
                    return f"another text with {length} drafted"
            return None
        with layer_inputs() as inputs:
            got = first_logits(engine)
    with load_target(target, "cpu") as engine, same_experts(inputs):
        far = float((got - first_logits(engine)).abs().max())
    return None if far <= near else f"logits differ by {far:.3f}"


LayerInputs = list[tuple[torch.Tensor, torch.Tensor]]
"""Attention [T, H] and residual [T, H] of each layer with experts, in the order of calls."""


@contextlib.contextmanager
def layer_inputs() -> Iterator[LayerInputs]:
    """Record the inputs of layers with experts on the GPU."""
    inputs: LayerInputs = []
    original = CudaOps.expert_layer

    def expert_layer(ops: CudaOps, h: Any, x: torch.Tensor, *layer: Any) -> Any:
        whole = h.sum(0) if h.dim() == 3 else h  # partial sums
        inputs.append((whole.float().cpu(), x.float().cpu()))
        return original(ops, h, x, *layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaOps, "expert_layer", expert_layer)
        yield inputs


@contextlib.contextmanager
def same_experts(inputs: LayerInputs) -> Iterator[None]:
    """Let the reference choose the experts that it chooses for these inputs.

    Rounding exchanges experts whose scores are nearly equal, which moves logits by up to 0.7.
    """
    calls = iter(inputs)
    layer, route = reference.Ops.expert_layer, reference.Ops.route
    ids = torch.empty(0)

    def expert_layer(ops: reference.Ops, h: Any, x: torch.Tensor, e: Any, *others: Any) -> Any:
        nonlocal ids
        rows = (part[: len(x)] for part in next(calls))  # the GPU's are padded
        given, _ = ops.norm_residual_norm(*rows, e.post_attention, e.eps, None)
        ids, _ = route(ops, given, e.router_norm, e.router, e.gains, e.n_used, e.eps)
        return layer(ops, h, x, e, *others)

    def chosen(
        ops: reference.Ops, x: Any, scale: Any, gate: Any, gains: Any, top_k: int, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        all_ids, weights = route(ops, x, scale, gate, torch.ones_like(gains), len(gains), eps)
        weights = weights.gather(1, all_ids.argsort(1).gather(1, ids))
        return ids, weights / weights.sum(1, keepdim=True) * gains[ids]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.Ops, "expert_layer", expert_layer)
        patch.setattr(reference.Ops, "route", chosen)
        yield
    assert next(calls, None) is None, "the reference ran fewer layers"


def first_logits(engine: Engine) -> torch.Tensor:
    """Return the logits of the token after the prompt, [V]."""
    from g4spec.runtime.batches import concat_steps
    from tests.support.one_sequence import single_sequence

    with single_sequence(engine) as one:
        read = concat_steps(list(one.prefill(PROMPT)))
    return engine.target.logits(read.hidden[-1:])[0].float().cpu()
