"""Drafts reading prompts: the bits of their caches, and comparison with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4spec import quant
from g4spec.core import PROMPT_BLOCK, Batch, StepRows
from g4spec.models import dflash, eagle3
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.cache.cache_types import KINDS as CACHES
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.prefill import draft_ops, long_ops, plan, prefill_attention, reader
from g4spec.runtime.cuda.prefill.reader import Reader
from g4spec.runtime.cuda.weights.matrix import Matrix
from tests.gpu.device import DEVICE, EMULATED
from tests.gpu.prefill_models import SLOT, SLOTS, dense, small
from tests.support import memory_models as mm

pytestmark = pytest.mark.gpu

BLOCK = 192 if EMULATED else PROMPT_BLOCK
COUNT, N_CTX, E = BLOCK + 37, 2 * PROMPT_BLOCK, 256


@pytest.fixture(autouse=True)
def _block(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_ops, long_ops, plan, prefill_attention, reader):
        monkeypatch.setattr(module, "PROMPT_BLOCK", BLOCK)


def dflash_config() -> dflash.Config:
    """Return a configuration whose rings are smaller than a block."""
    layers = tuple(
        mm.layer(i, full=False, head_dim=64, rope_base=1e4, n_ff=256, causal=False)
        for i in range(2)
    )
    return mm.dflash_config(n_embd=E, layers=layers, target_layers=(1, 3))


def eagle3_config() -> eagle3.Config:
    """Return a configuration with a layer that attends to rows appended earlier in the prompt."""
    layers = tuple(mm.layer(i, full=i > 0, head_dim=64, n_ff=256, v_from_k=False) for i in range(2))
    return eagle3.Config(
        n_vocab=mm.V,
        n_embd=E,
        n_ctx=4096,
        eps=1e-6,
        layers=layers,
        target_layers=(1, 3),
        n_target=E,
        own_embed=True,
        own_head=True,
        n_draft=64,
        norm_before_residual=True,
        mask_token=4,
    )


KINDS: dict[str, tuple[Any, Any]] = {
    "dflash": (dflash, dflash_config()),
    "eagle3": (eagle3, eagle3_config()),
}


class Drafts:
    """A draft's weights on the GPU, and their values for the reference."""

    def __init__(self, name: str) -> None:
        self.kind, self.config = KINDS[name]
        q8_0 = quant.get("q8_0")
        self.numbers = mm.weights(self.kind.tensors(self.config), 1, 0.3)
        self.there: dict[str, Any] = {}
        for key, x in self.numbers.items():
            self.there[key] = x.to(DEVICE)
            if x.dim() == 2 and key != "token_embd.weight":
                raw = q8_0.quantize(x.numpy())
                self.numbers[key] = torch.from_numpy(q8_0.dequantize(raw)).view(x.shape)
                data = torch.from_numpy(raw).flatten(0, -2).to(DEVICE)
                self.there[key] = Matrix("q8_0", data, *x.shape)

    def on(self, by: Reader, kind: Kind) -> Any:
        space = by.target.space
        caches = [CudaKV(c, space, 32, kind) for c in self.kind.caches(self.config, None)]
        return self.kind.Drafter(
            self.config, self.there, by.target.ops, by.target, None, caches, SLOTS
        )

    def reference(self) -> Any:
        space = Space.single(N_CTX)
        caches = [LayerKV(c, space, N_CTX) for c in self.kind.caches(self.config, None)]
        return self.kind.Drafter(self.config, self.numbers, Ops(), None, None, caches)


def rows_of(taps: torch.Tensor, start: int, slot: int) -> StepRows:
    """Return the target's rows from position `start` on."""
    n, device = len(taps), taps.device
    positions = torch.arange(start, start + n, device=device)
    batch = Batch(positions * 7 % mm.V, positions, torch.full_like(positions, slot), (n,))
    return StepRows(batch, taps[:, :E], taps)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_blocks(name: str, kind: Kind) -> None:
    drafts, by = Drafts(name), small(dense(3), {"": "q8_0"}).reader(N_CTX, 2 * BLOCK, kind)
    taps = torch.randn(COUNT, 2 * E, generator=torch.Generator().manual_seed(0)) * 3
    reference, stored, states = drafts.reference(), [], []
    reference.commit(rows_of(taps, 0, 0), torch.tensor([COUNT - 1]))
    for pieces in ([COUNT], [BLOCK, COUNT - BLOCK]):
        draft, at = drafts.on(by, kind), 0
        for n in pieces:
            by.commit(draft, rows_of(taps[at : at + n].to(DEVICE), at, SLOT))
            at += n
        states.append([x[SLOT] for x in draft.state])
        stored.append([])
        for mine, theirs in zip(draft.caches, reference.caches, strict=True):
            last = COUNT - 1 - (name == "eagle3")  # its newest row waits for the next token
            first = 0 if mine.window is None else last + 1 - mine.window
            stored[-1] += mine.read(SLOT, first, last)
            for x, y in zip(stored[-1][-2:], theirs.read(0, first, last), strict=True):
                error = ((x.cpu() - y).norm(dim=-1) / y.norm(dim=-1)).max()
                assert error < (0.01 if kind == "f16" else 0.03), error
    for first, second in zip(*stored, strict=True):
        assert torch.equal(first, second)
    for first, second in zip(*states, strict=True):
        assert torch.equal(first, second)
