"""Build models of the published shapes with random weights on the GPU, to measure speed without a
checkpoint. Their output is meaningless; their speed is that of the real models.

Shapes: config.json of google/gemma-4-{E2B,E4B,12B,26B-A4B,31B}, of their assistants, and of z-lab's
DFlash drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from g4spec.models import assistant, dflash, gemma4
from g4spec.models.spec import Checkpoint, TensorSpec
from g4spec.quant import policy
from g4spec.quant.format import Format
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.memory import Size
from g4spec.runtime.target import Target

VOCAB = 262144
SLIDING, FULL = "sliding_attention", "full_attention"


def _text_config(
    hidden: int, layers: int, heads: int, kv: tuple[int, int], ff: int, period: int = 6, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv[0],
        "num_global_key_value_heads": kv[1],
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": ff,
        "sliding_window": 1024,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
        "layer_types": [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)],
        **more,
    }


_SMALL = {
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": VOCAB,
    "max_position_embeddings": 131072,
}
TARGETS = {
    "31b": _text_config(5376, 60, 32, (16, 4), 21504),
    "26b-a4b": _text_config(
        2816,
        30,
        16,
        (8, 2),
        2112,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "12b": _text_config(3840, 48, 16, (8, 1), 15360),
    "e4b": _text_config(2560, 42, 8, (2, 2), 10240, num_kv_shared_layers=18, **_SMALL),
    "e2b": _text_config(
        1536, 35, 8, (1, 1), 6144, 5, num_kv_shared_layers=20, use_double_wide_mlp=True, **_SMALL
    ),
}
"""`text_config` of each target, by its size."""

DRAFTS = {"31b": (64, 10752), "26b-a4b": (32, 5632), "12b": (32, 7680)}
"""Size of the target -> heads and feed-forward width of z-lab's DFlash draft."""

ASSISTANTS = {
    "31b": (1024, 32, 8192),
    "26b-a4b": (1024, 16, 8192),
    "12b": (1024, 16, 8192),
    "e4b": (256, 4, 2048),
    "e2b": (256, 4, 2048),
}
"""Size of the target -> hidden size, heads and feed-forward width of Google's assistant."""

CENTROIDS = 2048
"""Number of token clusters in the centroid heads of the E2B and E4B assistants."""


def make_target(
    name: str,
    type: str,
    backend: CudaBackend,
    n_ctx: int,
    n_slots: int = 1,
    pool: int = 0,
    tensor_types: Sequence[str] = (),
) -> Target:
    """Build a target of a size in TARGETS, quantized as `g4spec convert --type --tensor-type` does.
    Its KV cache has `n_slots` sequences of up to `n_ctx` tokens, and `pool` tokens in total."""
    config = gemma4.parse_hf(Checkpoint({"text_config": TARGETS[name]}, {}))
    size = Size.of(n_ctx, n_slots, pool)
    space = backend.space(size.slots, size.n_ctx, size.pages)
    weights = _weights_with_rope(gemma4.tensors(config), type, backend.ops, tensor_types)
    return Target(config, weights, backend, space, backend.chunk)


def draft_kinds(name: str) -> list[str]:
    """Return the kinds of draft available for a size, the default first."""
    return [k for k, sizes in (("dflash", DRAFTS), ("assistant", ASSISTANTS)) if name in sizes]


def make_draft(
    name: str, type: str, target: Target, kind: str | None = None
) -> dflash.Drafter | assistant.Drafter:
    """Build a draft for a target of size `name`.

    `kind`: one of `draft_kinds`; default: the first.
    """
    make = _dflash if (kind or draft_kinds(name)[0]) == "dflash" else _assistant
    return make(name, type, target)


class _AssistantHead:
    """A replacement for the file of an assistant: a centroid head with random contents."""

    def __init__(self, config: assistant.Config) -> None:
        rng = np.random.default_rng(0)
        centres = rng.standard_normal(config.n_centroids * config.n_embd, np.float32)
        order = rng.permutation(config.n_vocab).astype(np.int32)
        self.arrays = {assistant.CENTROIDS: centres, assistant.ORDERING: order}

    def number_array(self, key: str) -> Any:
        return self.arrays[key]


def _assistant(name: str, type: str, target: Target) -> assistant.Drafter:
    (hidden, heads, ff), of_target = ASSISTANTS[name], TARGETS[name]
    kv = of_target["num_key_value_heads"], of_target["num_global_key_value_heads"]
    same = {key: of_target[key] for key in ("sliding_window", "attention_k_eq_v")}
    config = assistant.parse_hf(
        Checkpoint(
            {
                "architectures": ["Gemma4AssistantForCausalLM"],
                "backbone_hidden_size": target.config.n_embd,
                "use_ordered_embeddings": name not in DRAFTS,
                "num_centroids": CENTROIDS,
                "text_config": _text_config(
                    hidden, 4, heads, kv, ff, 4, final_logit_softcapping=None, **same
                ),
            },
            {},
        ),
        target.config,
    )
    weights: Any = _weights_with_rope(assistant.tensors(config), type, target.backend.ops)
    head: Any = _AssistantHead(config)
    return assistant.Drafter(config, weights, target.ops, target, head, [], target.n_states)


def _dflash(name: str, type: str, target: Target) -> dflash.Drafter:
    heads, ff = DRAFTS[name]
    n = len(target.config.layers)
    taps = [round(1 + k * (n - 4) / 5) for k in range(6)]
    config = dflash.parse_hf(
        Checkpoint(
            {
                "architectures": ["DFlashDraftModel"],
                "vocab_size": VOCAB,
                "hidden_size": target.config.n_embd,
                "intermediate_size": ff,
                "num_hidden_layers": 5,
                "num_attention_heads": heads,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "hidden_act": "silu",
                "max_position_embeddings": 262144,
                "rope_theta": 1e6,
                "layer_types": [SLIDING] * 4 + [FULL],
                "use_sliding_window": True,
                "sliding_window": 2048,
                "block_size": 16,
                "dflash_config": {"mask_token_id": 4, "target_layer_ids": taps},
                "final_logit_softcapping": 30.0,
                "tie_word_embeddings": True,
            },
            {},
        ),
        target.config,
    )
    ring_slack = target.backend.ring_slack(target.chunk)
    kv = [target.backend.cache(s, target.space, ring_slack) for s in dflash.caches(config, None)]
    weights: Any = _weights(dflash.tensors(config), type, target.backend.ops)
    file: Any = None
    drafter = dflash.Drafter(config, weights, target.ops, target, file, kv, target.n_states)
    target.taps = drafter.taps
    return drafter


def _weights_with_rope(
    specs: Sequence[TensorSpec], type: str, ops: CudaOps, tensor_types: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `_weights` and the RoPE frequency divisors of the global layers: of 256 pairs, the
    first 64 rotate."""
    divisors = torch.tensor([1.0] * 64 + [1e30] * (256 - 64), device=ops.device)
    return _weights(specs, type, ops, tensor_types) | {"rope_freqs.weight": divisors}


def _weights(
    specs: Sequence[TensorSpec], type: str, ops: CudaOps, tensor_types: Sequence[str] = ()
) -> dict[str, Any]:
    """Return random weights, in the form in which `CudaBackend.load` returns those of a file."""
    choice = policy.Policy(
        policy.readable_mix(type, tensor_types),
        {s.name: s.shape for s in specs if not s.optional},
    )
    out: dict[str, Any] = {}
    for spec in specs:
        if spec.optional or spec.make:
            continue
        form, _ = choice.choose(spec.name, spec.shape, spec.role)
        if len(spec.shape) == 1 or not form.quantized:
            out[spec.name] = _float_tensor(spec, ops)
        else:
            out[spec.name] = _matrix(form, spec.shape, ops)
    return out


def _float_tensor(spec: TensorSpec, ops: CudaOps) -> torch.Tensor:
    """Return a random F32 tensor: a vector of values near 1, or a matrix whose matmul preserves
    magnitudes."""
    x = torch.randn(spec.shape, device=ops.device)
    return x * spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 1 + 0.1 * x


def _matrix(form: Format, shape: tuple[int, ...], ops: CudaOps) -> Matrix:
    columns, rows = shape[-1], math.prod(shape[:-1])
    raw = random_rows(form, rows, columns, ops.device)
    return Matrix(form.name, raw, shape[-2], columns, rows // shape[-2], file_order=ops.portable)


def random_rows(form: Format, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [rows, bytes of a row]: random codes, and scales with which a matmul preserves
    magnitudes."""
    raw = torch.randint(0, 256, (rows, form.row_bytes(columns)), dtype=torch.uint8, device=device)
    blocks = raw.view(rows, columns // form.block, form.block_bytes)
    for at, value in _FACTORS.get(form.name, ()):
        bits = torch.tensor([value * columns**-0.5], dtype=torch.float16).view(torch.uint8)
        blocks[..., at : at + 2] = bits.to(device)
    for at, byte in _BYTES.get(form.name, ()):
        blocks[..., at] = byte
    return raw


_FACTORS = {
    "q4_k": ((0, 1 / 150), (2, 1 / 20)),
    "q5_k": ((0, 1 / 300), (2, 1 / 20)),
    "q6_k": ((208, 1 / 1400),),
    "q8_0": ((0, 1 / 74),),
    "q4_0": ((0, 1 / 4.6),),
    "q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "q5_0": ((0, 1 / 9.2),),
    "q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "iq4_nl": ((0, 1 / 70),),
    "iq4_xs": ((0, 1 / 1300),),
    "q3_k": ((108, 1 / 42),),
    "q2_k": ((80, 1 / 14), (82, 1 / 8)),
    "iq3_s": ((0, 1 / 167),),
    "iq3_xxs": ((0, 1 / 167),),
    "iq2_s": ((0, 1 / 64),),
    "iq2_xs": ((0, 1 / 64),),
    "iq2_xxs": ((0, 1 / 64),),
    "iq1_s": ((0, 1 / 8),),
    "tq1_0": ((52, 1 / 0.82),),
    "tq2_0": ((64, 1 / 1.2),),
}
"""Format -> (byte offset, value) of a block's half-precision scales. Values are for one column;
`random_rows` divides them by sqrt(columns)."""
_BYTES = {
    "mxfp4": ((0, 119),),
    "nvfp4": tuple((at, 0x03) for at in range(4)),
    "iq1_m": tuple((at, byte) for at, byte in ((49, 0x02), (51, 0x02), (53, 0xA2), (55, 0x12))),
}
"""Format -> (byte offset, byte) of scales that are not half-precision. The values suit matrices of
about 5,000 columns."""
