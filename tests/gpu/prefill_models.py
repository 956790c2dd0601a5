"""Small random models for prefill: run by the reference, and with quantized weights by CUDA."""

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
    """A model with random weights.

    Attributes:
        types: quant type of each matrix, by the last part of its name before `.weight`.
        reference: weights by GGUF name, float32 on the CPU; matrices have the dequantized values.
        raw: blocks of the quantized matrices by GGUF name, uint8.
    """

    config: gemma4.Config
    types: dict[str, str]
    reference: dict[str, torch.Tensor]
    raw: dict[str, torch.Tensor]

    def wanted(
        self, ids: list[int], kind: Kind = "f16"
    ) -> tuple[torch.Tensor, torch.Tensor, list[LayerKV]]:
        """Run the reference on a prompt.

        Args:
            kind: cache type; with "q8_0" the caches are rounded.

        Returns:
            Rows after the final norm [T, H]; the residual before each of the n layers and after the
            last [T, n + 1, H]; the caches.
        """
        count, taps = len(ids), tuple(range(len(self.config.layers) + 1))
        space, cache = Space.single(count), LayerKV if kind == "f16" else ByteKV
        caches = [cache(shape, space, count) for shape in gemma4.caches(self.config)]
        batch = Batch(torch.tensor(ids), torch.arange(count), torch.zeros(count).long(), (count,))
        hidden, tapped = gemma4.Model(self.config, self.reference, Ops()).forward(
            batch, caches, taps
        )
        return hidden, torch.stack([tapped[i] for i in taps], dim=1), caches

    def reader(self, n_ctx: int, chunk: int, kind: Kind = "f16", portable: bool = False) -> Reader:
        """Return a prompt reader for a target that taps every layer. The pages of SLOT are in
        random order."""
        pages, backend = -(-n_ctx // PAGE), CudaBackend(DEVICE, kind, portable)
        space = backend.space(SLOTS, n_ctx, 2 * pages)
        order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(3)) + 1
        space.assign(SLOT, order[:pages].tolist())
        target = Target(self.config, self.matrices(portable), backend, space, chunk)
        target.taps = tuple(range(len(self.config.layers) + 1))
        reader = Reader(backend, target)
        reader._fits = True  # `fits` allows only published head sizes; kernels support more
        return reader

    def matrices(self, portable: bool = False) -> dict[str, Any]:
        """Return the weights as `CudaOps.load` would read them from a GGUF."""
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
    """A reference cache with keys and values rounded to Q8_0. Key columns that the CUDA cache takes
    from the values (`cuda_kv_size.shares`) are computed from the rounded values."""

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
        stored, rounded = round_to_q8_0(values), round_to_q8_0(keys)
        if self._rotary_pairs:
            half = self.head_dim // 2
            still = torch.arange(self.head_dim) % half >= CACHE_ROTARY_PAIRS
            rounded[..., still] = (keys * (stored / values))[..., still]
        super().append(slots, positions, rounded, stored)


def round_to_q8_0(x: torch.Tensor) -> torch.Tensor:
    """Quantize x to Q8_0 and dequantize it."""
    return dequantize(*quantize(x, torch.tensor(127.0)))


def small(layers: tuple[LayerSpec, ...], types: dict[str, str], n_embd: int = 256) -> Small:
    """Return a model with random weights. `types`: quant types as in `Small.types`; "": the type of
    all others but the token table, which is float32 unless named."""
    config = gemma4.Config(160, n_embd, 4096, 1e-6, 30.0, layers)
    reference = mm.weights(gemma4.tensors(config), 0, 0.3)
    raw, kinds = {}, {}
    for name, x in reference.items():
        part = name.split(".")[-2] if name.startswith("blk.") or x.dim() > 1 else ""
        if part == "token_embd" and part not in types:
            continue
        if x.dim() == 1 or not part or part == "ffn_gate_inp":
            continue
        kinds[part] = types.get(part, types[""])
        fmt = quant.get(kinds[part])
        data = fmt.quantize(x.numpy())
        raw[name] = torch.from_numpy(data)
        reference[name] = torch.from_numpy(fmt.dequantize(data)).view(x.shape)
    return Small(config, kinds, reference, raw)


def dense(n_layer: int = 6, window: int = 24, **kw: Any) -> tuple[LayerSpec, ...]:
    """Return layers, of which every third is global; `kw`: further fields of each."""
    out = []
    for i in range(n_layer):
        full = i % 3 == 2
        given = {"head_dim": 128 if full else 64, "n_ff": 512} | kw
        out.append(mm.layer(i, full, **given))
        if not full:
            out[-1] = replace(out[-1], window=window)
    return tuple(out)
