"""Small random models for prefill: the reference, and the same weights as loaded from a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from g4spec import quant
from g4spec.core import PAGE, Batch, CacheShape
from g4spec.models import gemma4
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cuda_kv import (
    Kind,
    dequantize,
    quantize,
    shares,
)
from g4spec.runtime.cuda.prefill.reader import Reader
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.target import Target
from tests.gpu.device import DEVICE
from tests.support import memory_models as mm

SLOT, SLOTS = 1, 3
"""The slot that prompts are read into, and the number of slots."""


@dataclass
class Small:
    """A configuration, and the quant types of its matrices by the last part of their names.

    Attributes:
        reference: weights by GGUF name, float32 on the CPU, exactly the values of the packed ones.
    """

    config: gemma4.Config
    types: dict[str, str]
    reference: dict[str, torch.Tensor]
    raw: dict[str, torch.Tensor]

    def wanted(
        self, ids: list[int], kind: Kind = "f16"
    ) -> tuple[torch.Tensor, torch.Tensor, list[LayerKV]]:
        """Compute with the reference: rows after the final norm, residuals before each layer and
        after the last [T, n + 1, H], and the caches, rounded to Q8_0 if `kind` is."""
        count, taps = len(ids), tuple(range(len(self.config.layers) + 1))
        space, cache = Space.single(count), LayerKV if kind == "f16" else ByteKV
        caches = [cache(shape, space, count) for shape in gemma4.caches(self.config)]
        batch = Batch(torch.tensor(ids), torch.arange(count), torch.zeros(count).long(), (count,))
        hidden, tapped = gemma4.Model(self.config, self.reference, Ops()).forward(
            batch, caches, taps
        )
        return hidden, torch.stack([tapped[i] for i in taps], dim=1), caches

    def reader(self, n_ctx: int, chunk: int, kind: Kind = "f16", portable: bool = False) -> Reader:
        """Return a prompt reader for a target that taps every layer. The pages of SLOT are
        shuffled."""
        pages, backend = -(-n_ctx // PAGE), CudaBackend(DEVICE, kind, portable)
        space = backend.space(SLOTS, n_ctx, 2 * pages)
        order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(3)) + 1
        space.assign(SLOT, order[:pages].tolist())
        target = Target(self.config, self.matrices(portable), backend, space, chunk)
        target.taps = tuple(range(len(self.config.layers) + 1))
        reader = Reader(backend, target)
        reader._fits = True  # kernels support more head sizes than the published ones
        return reader

    def matrices(self, portable: bool = False) -> dict[str, Any]:
        """Return weights as `CudaOps.load` would for a file of these weights."""
        out: dict[str, Any] = {name: x.to(DEVICE) for name, x in self.reference.items()}
        for name, raw in self.raw.items():
            fmt, shape = self.types[name.split(".")[-2]], self.reference[name].shape
            data = raw.flatten(0, -2).to(DEVICE)
            data = data.view(torch.float16) if fmt == "f16" else data
            stack = shape[0] if len(shape) == 3 else 1
            out[name] = Matrix(
                "" if fmt == "f16" else fmt, data, shape[-2], shape[-1], stack, file_order=portable
            )
        return out


class ByteKV(LayerKV):
    """A reference cache with keys and values rounded to Q8_0. Keys that are computed from values
    are computed from the rounded values."""

    def __init__(self, shape: CacheShape, space: Space, ring_slack: int) -> None:
        super().__init__(shape, space, ring_slack)
        self._rotary_pairs = shape.rotary_pairs if shares(shape.head_dim, shape.rotary_pairs) else 0

    def append(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        stored, rounded = bytes_of(values), bytes_of(keys)
        if self._rotary_pairs:
            half = self.head_dim // 2
            still = torch.arange(self.head_dim) % half >= CACHE_ROTARY_PAIRS
            rounded[..., still] = (keys * (stored / values))[..., still]
        super().append(slots, positions, rounded, stored)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Round x to Q8_0."""
    return dequantize(*quantize(x, torch.tensor(127.0)))


def small(layers: tuple[LayerSpec, ...], types: dict[str, str], n_embd: int = 256) -> Small:
    """Return a model with random weights; `types`: quant type by name, "" for all others."""
    config = gemma4.Config(160, n_embd, 4096, 1e-6, 30.0, layers)
    reference = mm.weights(gemma4.tensors(config), 0, 0.3)
    raw, kinds = {}, {}
    for name, x in reference.items():
        part = name.split(".")[-2] if name.startswith("blk.") else ""
        if x.dim() == 1 or not part or part == "ffn_gate_inp":
            continue
        kinds[part] = types.get(part, types[""])
        fmt = quant.get(kinds[part])
        data = fmt.quantize(x.numpy())
        raw[name] = torch.from_numpy(data)
        reference[name] = torch.from_numpy(fmt.dequantize(data)).view(x.shape)
    return Small(config, kinds, reference, raw)


def dense(n_layer: int = 6, window: int = 24, **kw: Any) -> tuple[LayerSpec, ...]:
    """Return a configuration in which every third layer is global."""
    out = []
    for i in range(n_layer):
        full = i % 3 == 2
        given = {"head_dim": 128 if full else 64, "n_ff": 512} | kw
        out.append(mm.layer(i, full, **given))
        if not full:
            out[-1] = replace(out[-1], window=window)
    return tuple(out)
