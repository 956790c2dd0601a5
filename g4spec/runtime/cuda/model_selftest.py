"""The models of `doctor --self-test`: small targets with random weights read a prompt and run
steps, on this machine's GPU and with the reference. Together they use embedding, norms, rotary
embedding, both kinds of attention, feed-forward, experts, prefill and the output projection."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from g4spec import quant
from g4spec.backend import Backend
from g4spec.core import MAX_STEP_ROWS, PROMPT_BLOCK
from g4spec.models import gemma4
from g4spec.models.spec import Checkpoint, TensorSpec
from g4spec.ops.kv import Space
from g4spec.quant.policy import ROUTER_WEIGHT
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.batches import batch_of
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.target import Target

TYPE = "q8_0"
"""Type of all matrices; `kernel_selftest` checks the matmuls of the others."""
PROMPT = PROMPT_BLOCK + 88
"""Tokens of the prompt: a whole block, and a part of one."""
N_CTX = 1024
TOLERANCE = 2.0**-5
"""Maximum error of a logit, relative to the largest of its row. The GPU rounds rows between
operations to half precision, the reference does not."""

_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
_DENSE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 3,
    "layer_types": _LAYERS,
    "sliding_window": 256,
    "final_logit_softcapping": 30.0,
}
MODELS = {
    "dense target": _DENSE,
    "target with experts": _DENSE
    | {
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 256,
    },
    "target with per-layer embeddings": _DENSE
    | {
        "attention_k_eq_v": False,
        "num_hidden_layers": 6,
        "layer_types": _LAYERS * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 2048,
    },
}
"""Title -> configuration, with the head sizes of the published targets."""


def checks(backend: CudaBackend) -> Iterator[tuple[bool, str]]:
    """Yield whether each model passed, and its description."""
    for title, config in MODELS.items():
        same, error = _compare(gemma4.parse_hf(Checkpoint(config, {})), backend)
        bits = "the same bits" if same else "OTHER BITS"
        yield (
            same and error < TOLERANCE,
            f"kernels of a {title}: after a prompt of {PROMPT} tokens a row has {bits} among 1 to "
            f"{MAX_STEP_ROWS}, largest error {error:.1e}",
        )


def _compare(config: gemma4.Config, backend: CudaBackend) -> tuple[bool, float]:
    """Return whether a row's bits do not depend on the others, and the largest error."""
    exact, held = {}, {}
    seed = torch.Generator().manual_seed(1)
    for spec in gemma4.tensors(config):
        exact[spec.name], held[spec.name] = _weight(spec, backend, seed)
    ids = torch.randint(4, config.n_vocab, (PROMPT + MAX_STEP_ROWS,), generator=seed).tolist()
    reference = _target(config, exact, TorchBackend(backend.cache_type))
    target = _target(config, held, backend)
    want, got = _logits(reference, ids), _logits(target, ids)
    same = all(torch.equal(_step(target, ids, n), got[1 : 1 + n]) for n in range(1, MAX_STEP_ROWS))
    error = (got.double().cpu() - want.double()).abs().amax(-1) / want.abs().amax(-1)
    return same, float(error.max())


def _weight(spec: TensorSpec, backend: CudaBackend, seed: torch.Generator) -> tuple[Any, Any]:
    """Return random values of a tensor for the reference, and the same as the GPU holds them."""
    if spec.make == "rope_freqs":
        values = torch.full(spec.shape, 1e30)
        values[: spec.shape[0] // 4] = 1.0
    elif spec.role == "vector":
        values = 1 + 0.1 * torch.randn(spec.shape, generator=seed)
    else:
        scale = 0.3 if spec.role == "embed" else 1.5 / math.sqrt(spec.shape[-1])
        values = scale * torch.randn(spec.shape, generator=seed)
        if not spec.name.endswith(ROUTER_WEIGHT):
            rows, columns = spec.shape[-2:]
            raw = quant.get(TYPE).quantize(values.view(-1, columns).numpy())
            values = torch.from_numpy(quant.get(TYPE).dequantize(raw)).view(spec.shape)
            count = math.prod(spec.shape[:-2])
            on_gpu = torch.from_numpy(raw).to(backend.device)
            order = backend.ops.portable
            return values, Matrix(TYPE, on_gpu, rows, columns, count, file_order=order)
    return values, values.to(backend.device)


def _target(config: gemma4.Config, weights: dict[str, Any], backend: Backend) -> Target:
    space = backend.space(1, N_CTX, Space.single(N_CTX).n_pages)
    space.assign(0, range(1, space.n_pages + 1))
    return Target(config, weights, backend, space, PROMPT)


def _logits(target: Target, ids: list[int]) -> torch.Tensor:
    """Read the prompt. Return the logits of its last row and of a step of MAX_STEP_ROWS rows."""
    last = target.backend.read(target, 0, ids[:PROMPT], 0).hidden[-1:]
    return torch.cat([target.logits(last).clone(), _step(target, ids, MAX_STEP_ROWS)])


def _step(target: Target, ids: list[int], rows: int) -> torch.Tensor:
    """Return the logits of the first `rows` tokens after the prompt, computed in one step."""
    batch = batch_of(target.ops, [(0, PROMPT, ids[PROMPT : PROMPT + rows])])
    return target.step(batch)[1].clone()
