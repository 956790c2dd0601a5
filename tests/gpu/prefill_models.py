"""Small models for prefill: random weights for the reference, and the same packed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from g4spec import quant
from g4spec.models import gemma4
from g4spec.models.spec import LayerSpec
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.prefill.prefill import LayerWeights, PerLayerWeights, Prefill
from g4spec.runtime.cuda.prefill.prefill_attention import HeadWeights
from g4spec.runtime.cuda.prefill.prefill_experts import ExpertWeights
from g4spec.runtime.cuda.weights import packing
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.target import Target
from tests import memory_models as mm
from tests.gpu.device import DEVICE


@dataclass
class Small:
    """A configuration, and the types of its matrices by the last part of their names.

    Attributes:
        reference: weights by GGUF name, float32 on the CPU, exactly what the packed ones hold.
    """

    config: gemma4.Config
    types: dict[str, str]
    reference: dict[str, torch.Tensor]
    raw: dict[str, torch.Tensor]

    def target(self, n_ctx: int, chunk: int) -> Target:
        return Target(self.config, self.reference, Ops(), n_ctx, chunk)

    def prefill(
        self, n_ctx: int, chunk: int, kind: Kind = "f16", portable: bool = False
    ) -> Prefill:
        caches = [CudaKV(c.n_kv, c.head_dim, n_ctx, c.window, 16, DEVICE, kind, c.turning)
                  for c in gemma4.caches(self.config)]  # fmt: skip
        layers = [self._layer(s) for s in self.config.layers]
        freqs = [f.to(DEVICE) for f in self.target(n_ctx, chunk).model._freqs]
        return Prefill(self.config, layers, caches, freqs, chunk, n_ctx, portable)

    def matrices(self) -> dict[str, Any]:
        """What `CudaOps.load` gives for a file of these weights."""
        out: dict[str, Any] = {name: x.to(DEVICE) for name, x in self.reference.items()}
        for name, raw in self.raw.items():
            fmt, shape = self.types[name.split(".")[-2]], self.reference[name].shape
            data = raw.flatten(0, -2).to(DEVICE)
            data = data.view(torch.float16) if fmt == "f16" else data
            stack = shape[0] if len(shape) == 3 else 1
            out[name] = Matrix("" if fmt == "f16" else fmt, data, shape[-2], shape[-1], stack)
        return out

    def _vector(self, name: str) -> torch.Tensor | None:
        found = self.reference.get(name)
        return None if found is None else found.to(DEVICE)

    def weight(self, *names: str, interleave: bool = False) -> Weight:
        """Matrices below each other, or in turns of 16 rows; they must be of one type."""
        kind = self.types[names[0].split(".")[-2]]
        raws = [self.raw[name] for name in names]
        if interleave:
            halves = raws if len(raws) == 2 else [*raws[0].chunk(2, dim=-2)]
            raws = [torch.stack([h.unflatten(-2, (-1, 16)) for h in halves], -3).flatten(-4, -2)]
        raw = torch.cat(raws, dim=-2)
        columns = self.reference[names[0]].shape[-1]
        stack = raw if raw.dim() == 3 else raw[None]
        if kind == "f16":
            data = torch.from_numpy(raw.numpy().view(np.float16)).to(DEVICE)
            return Weight("", data, stack.shape[1], columns, len(stack))
        packed = [packing.pack(kind, m.contiguous(), packing.unit_of(kind, columns)) for m in stack]
        return Weight(kind, torch.cat(packed).to(DEVICE), stack.shape[1], columns, len(stack))

    def _layer(self, s: LayerSpec) -> LayerWeights:
        b = f"blk.{s.index}."

        def v(name: str) -> Any:
            return self._vector(f"{b}{name}.weight")

        def m(name: str) -> Weight:
            return self.weight(f"{b}{name}.weight")

        own = s.kv_from is None
        names = ["attn_q"] + ["attn_k"] * own + ["attn_v"] * (own and not s.v_from_k)
        gate, up = f"{b}ffn_gate.weight", f"{b}ffn_up.weight"
        same = self.types["ffn_gate"] == self.types["ffn_up"]
        return LayerWeights(
            v("attn_norm"), [m(x) for x in names],
            HeadWeights(v("attn_q_norm"), v("attn_k_norm") if own else None),
            m("attn_output"), v("post_attention_norm"), v("ffn_norm"),
            [self.weight(gate, up, interleave=True)] if same else [m("ffn_gate"), m("ffn_up")],
            m("ffn_down"), v("post_ffw_norm"), v("layer_output_scale"),
            ExpertWeights(
                v("ffn_gate_inp"), self._vector(f"{b}ffn_gate_inp.scale"),
                self._vector(f"{b}ffn_down_exps.scale"),
                [self.weight(f"{b}ffn_gate_up_exps.weight", interleave=s.index % 2 == 0)],
                m("ffn_down_exps"), v("pre_ffw_norm_2"), v("post_ffw_norm_1"),
                v("post_ffw_norm_2"), s.index % 2 == 0,
            ) if s.n_expert else None,
            PerLayerWeights(m("inp_gate"), m("proj"), v("post_norm")) if s.n_ple else None,
        )  # fmt: skip


def small(layers: tuple[LayerSpec, ...], types: dict[str, str], n_embd: int = 256) -> Small:
    """Random weights for these layers; `types`: by name, "" for all others."""
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
    """Every third layer attends to everything."""
    out = []
    for i in range(n_layer):
        full = i % 3 == 2
        given = {"head_dim": 128 if full else 64, "n_ff": 512} | kw
        out.append(mm.layer(i, full, **given))
        if not full:
            out[-1] = replace(out[-1], window=window)
    return tuple(out)
