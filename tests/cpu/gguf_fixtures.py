"""Small healthy GGUF files, held as plain data so that a test can change one thing and write them.

The serializer is independent of `g4spec.gguf.write`, which refuses most of these broken files.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from g4spec import quant
from g4spec.convert import provenance
from g4spec.convert.derived import t2d_sha256
from g4spec.convert.tensors import StoredTensor
from g4spec.gguf import KV, Value, ValueType, array, boolean, f32, string, u32
from g4spec.models import assistant, dflash, dspark, eagle3, gemma4, gemma4_config
from g4spec.models import dflash_backbone as backbone
from g4spec.models.spec import LayerSpec

CODES = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "?",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}
V, H, N_LAYER, N_DRAFT = 512, 64, 12, 96


@dataclass
class Entry:
    """A tensor: PyTorch shape, ggml type number, bytes. `offset` None: the regular offset."""

    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None

    def numbers(self, dtype: str) -> np.ndarray:
        """Return the data as a writable array; `set` stores it again."""
        return np.frombuffer(self.data, dtype).copy()

    def set(self, values: np.ndarray) -> None:
        self.data = values.tobytes()


@dataclass
class File:
    """A GGUF file as data; `extra_keys` and `extra_tensors` are written after the others."""

    kv: KV
    tensors: dict[str, Entry]
    magic: bytes = b"GGUF"
    version: int = 3
    extra_keys: list[tuple[str, Value]] = field(default_factory=list)
    extra_tensors: list[tuple[str, Entry]] = field(default_factory=list)
    cut: int | None = None
    tail: bytes = b""
    edits: list[tuple[bytes, bytes]] = field(default_factory=list)

    def bytes(self) -> bytes:
        out = self._plain()
        for old, new in self.edits:
            out = out.replace(old, new, 1)
        return out

    def _plain(self) -> bytes:
        keys = [*self.kv.items(), *self.extra_keys]
        tensors = [*self.tensors.items(), *self.extra_tensors]
        out = self.magic + struct.pack("<Iqq", self.version, len(tensors), len(keys))
        out += b"".join(_string(k) + _value(v) for k, v in keys)
        body, at = [], 0
        for name, t in tensors:
            out += _string(name) + struct.pack("<I", len(t.shape))
            out += struct.pack(f"<{len(t.shape)}q", *reversed(t.shape))
            out += struct.pack("<iQ", t.type, at if t.offset is None else t.offset)
            body += [t.data, bytes(-len(t.data) % 32)]
            at += len(body[-2]) + len(body[-1])
        return (out + bytes(-len(out) % 32) + b"".join(body))[: self.cut] + self.tail

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path

    def set(self, key: str, type: ValueType, data: Any, item: ValueType | None = None) -> None:
        self.kv[key] = Value(type, data, item)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _scalar(kind: ValueType, value: Any) -> bytes:
    return _string(value) if kind is ValueType.STRING else struct.pack("<" + CODES[kind], value)


def _value(v: Value) -> bytes:
    if v.type is not ValueType.ARRAY:
        return struct.pack("<i", v.type) + _scalar(v.type, v.data)
    assert v.item is not None
    if v.item is ValueType.STRING:
        texts = [x.encode() for x in v.data]
        items = b"".join([struct.pack("<Q", len(x)) + x for x in texts])
    else:
        items = struct.pack(f"<{len(v.data)}{CODES[v.item]}", *v.data)
    return struct.pack("<iiQ", v.type, v.item, len(v.data)) + items


def tokenizer(n: int = V) -> KV:
    """Return tokenizer metadata: Gemma's special tokens at their ids, then invented words."""
    tokens = [f"w{i}" for i in range(n)]
    named = {
        0: "<pad>",
        1: "<eos>",
        2: "<bos>",
        3: "<unk>",
        4: "<mask>",
        50: "<|tool_response>",
        105: "<|turn>",
        106: "<turn|>",
        107: "\n",
    }
    for i, text in named.items():
        tokens[i] = text
    return {
        "tokenizer.ggml.model": string("gemma4"),
        "tokenizer.ggml.tokens": array(ValueType.STRING, tokens),
        "tokenizer.ggml.scores": array(ValueType.F32, [-1000.0] * n),
        "tokenizer.ggml.token_type": array(
            ValueType.I32, [3 if i in named else 1 for i in range(n)]
        ),
        "tokenizer.ggml.merges": array(ValueType.STRING, ["w 10", "w 11"]),
        "tokenizer.ggml.bos_token_id": u32(2),
        "tokenizer.ggml.eos_token_id": u32(1),
        "tokenizer.ggml.unknown_token_id": u32(3),
        "tokenizer.ggml.padding_token_id": u32(0),
        "tokenizer.ggml.mask_token_id": u32(4),
        "tokenizer.ggml.add_bos_token": boolean(True),
        "tokenizer.ggml.add_space_prefix": boolean(False),
        "tokenizer.chat_template": string("{{ bos_token }}"),
    }


def _layers(
    n: int, head_dim: tuple[int, int], n_kv: tuple[int, int], v_from_k: bool
) -> tuple[LayerSpec, ...]:
    """Return a Gemma layer pattern: five sliding, one full, and so on; the last layer is full."""
    full = [i % 6 == 5 or i == n - 1 for i in range(n)]
    return tuple(
        LayerSpec(
            i,
            None if f else 8,
            4,
            n_kv[f],
            head_dim[f],
            96,
            1e6 if f else 1e4,
            0.25 if f else 1.0,
            v_from_k and f,
        )
        for i, f in enumerate(full)
    )


def target_config(n_layer: int = N_LAYER) -> gemma4.Config:
    return gemma4.Config(V, H, 4096, 1e-6, 30.0, _layers(n_layer, (16, 32), (2, 1), True))


def zlab_config() -> dflash.Config:
    layers = tuple(
        LayerSpec(i, w, 4, 2, 16, 96, 1e6, causal=w is not None) for i, w in enumerate((8, 8, None))
    )
    return dflash.Config(
        n_vocab=V,
        n_embd=H,
        n_ctx=4096,
        eps=1e-6,
        softcap=30.0,
        layers=layers,
        target_layers=(2, 6, 10),
        block_size=4,
        mask_token=4,
        embed_scale=8.0,
        own_embed=False,
        own_head=False,
        n_draft=None,
        window_from_anchor=False,
    )


def speculators_config() -> dflash.Config:
    layers = tuple(LayerSpec(i, None, 4, 2, 16, 96, 1e4, causal=False) for i in range(2))
    return dflash.Config(
        n_vocab=V,
        n_embd=H,
        n_ctx=4096,
        eps=1e-6,
        softcap=0.0,
        layers=layers,
        target_layers=(2, 6, 10),
        block_size=4,
        mask_token=4,
        embed_scale=1.0,
        own_embed=True,
        own_head=True,
        n_draft=N_DRAFT,
        window_from_anchor=True,
    )


def assistant_config() -> assistant.Config:
    layers = _layers(4, (16, 32), (2, 1), False)
    body = gemma4.Config(V, 32, 4096, 1e-6, 0.0, layers, arch=assistant.ARCH)
    return assistant.Config(body, backbone=H, n_centroids=16, centroid_top_k=4)


def d2t_ids() -> np.ndarray:
    """Return ascending target ids, some of them consecutive, including the stop tokens."""
    ids = {1, 50, 106, *range(110, 110 + N_DRAFT // 2)}
    ids |= set(range(200, 200 + 5 * N_DRAFT, 3))
    return np.array(sorted(ids)[:N_DRAFT], np.int64)


def t2d_mask() -> np.ndarray:
    """Return one byte per target token: 1 if the draft can propose it."""
    mask = np.zeros(V, np.uint8)
    mask[d2t_ids()] = 1
    return mask


def values(module: ModuleType, config: Any) -> dict[str, np.ndarray]:
    """Return the weights of a fixture by GGUF name, before they are stored in any type."""
    rng = np.random.default_rng(0)
    table = np.random.default_rng(2)  # separate seed, because drafts repeat their target's table
    out: dict[str, np.ndarray] = {}
    for spec in module.tensors(config):
        source = table if spec.name == "token_embd.weight" else rng
        x = source.standard_normal(spec.shape).astype(np.float32)
        if "norm" in spec.name:
            x = 1 + x / 5
        if spec.make == "rope_freqs":
            x = np.where(np.arange(spec.shape[0]) < 4, 1, 1e30).astype(np.float32)
        out[spec.name] = d2t_ids() if spec.role == "index" else x
    return out


def _build(module: ModuleType, config: Any, matrix: str) -> File:
    """Build a file of `config`: matrices in type `matrix`, other tensors as the converter stores
    them."""
    tensors, weights = {}, values(module, config)
    for spec in module.tensors(config):
        x = weights[spec.name]
        if spec.role == "index":
            tensors[spec.name] = Entry(spec.shape, 27, x.tobytes())
            continue
        form = quant.get("f32" if spec.role == "vector" else matrix)
        tensors[spec.name] = Entry(spec.shape, form.type, form.quantize(x).tobytes())
    kv: KV = {**module.metadata(config), **tokenizer()}
    kv["general.file_type"] = u32(quant.get(matrix).file_type or 0)
    return File(kv, tensors)


WEIGHTS = string("rows-sha256:" + "5" * 64)


def _recorded() -> KV:
    return provenance.pairing_keys(tokenizer(), H, N_LAYER) | {provenance.TARGET_WEIGHTS: WEIGHTS}


def target(n_layer: int = N_LAYER) -> File:
    file = _build(gemma4, target_config(n_layer), "bf16")
    file.kv[provenance.WEIGHTS] = WEIGHTS
    return file


def experts() -> File:
    """Build a target with experts."""
    layers = tuple(
        replace(s, n_expert=8, n_expert_used=2, n_ff_expert=32) for s in target_config().layers
    )
    return _build(gemma4, replace(target_config(), layers=layers), "bf16")


def per_layer() -> File:
    """Build a target with per-layer embeddings whose last six layers share keys and values."""
    base = target_config().layers
    sources = gemma4_config.shared_kv([s.window is not None for s in base], 6)
    layers = tuple(
        replace(s, n_ple=8, kv_from=source, v_from_k=s.v_from_k and source is None)
        for s, source in zip(base, sources, strict=True)
    )
    config = replace(target_config(), layers=layers)
    file = _build(gemma4, config, "bf16")
    for spec in gemma4.tensors(config):
        if spec.optional:
            del file.tensors[spec.name]
    return file


def zlab() -> File:
    file = _build(dflash, zlab_config(), "q8_0")
    file.kv |= _recorded()
    return file


def speculators() -> File:
    file = _build(dflash, speculators_config(), "f16")
    t2d = StoredTensor("t2d", (V,), "BOOL", None, t2d_mask())
    file.kv |= {**_recorded(), provenance.T2D_SHA256: string(t2d_sha256(t2d))}
    return file


def dspark_file() -> File:
    """Build a DSpark draft with Gemma 4 layers and both heads."""
    layers = tuple(LayerSpec(i, None, 4, 1, 32, 96, 1e6, 0.25, True, False) for i in range(2))
    base = dataclasses.replace(
        zlab_config(), layers=layers, own_embed=True, own_head=True, from_anchor=True, gemma=True
    )
    config = backbone.extended(dspark.Config, base, head="vanilla", rank=32, confidence="both")
    file = _build(dspark, config, "f16")
    file.kv |= _recorded()
    return file


def eagle3_file() -> File:
    config = eagle3.Config(
        n_vocab=V,
        n_embd=H,
        n_ctx=4096,
        eps=1e-6,
        layers=(LayerSpec(0, None, 4, 2, 16, 96, 1e4),),
        target_layers=(2, 6, 10),
        n_target=H,
        own_embed=True,
        own_head=True,
        n_draft=N_DRAFT,
        norm_before_residual=True,
    )
    file = _build(eagle3, config, "f16")
    file.kv |= _recorded()
    return file


def assistant_file() -> File:
    config = assistant_config()
    file = _build(assistant, config, "f32")
    rng = np.random.default_rng(1)
    file.kv[assistant.CENTROIDS] = array(ValueType.F32, rng.standard_normal(16 * 32).tolist())
    file.kv[assistant.ORDERING] = array(ValueType.I32, rng.permutation(V).tolist())
    file.kv |= {assistant.TOP_K: u32(4), **_recorded()}
    return file


KINDS = {
    "target": target,
    "experts": experts,
    "per-layer": per_layer,
    "zlab": zlab,
    "speculators": speculators,
    "assistant": assistant_file,
    "dspark": dspark_file,
    "eagle3": eagle3_file,
}
"""Name -> function that builds a healthy file."""
TARGETS = ("target", "experts", "per-layer")

__all__ = [
    "KINDS",
    "N_DRAFT",
    "N_LAYER",
    "TARGETS",
    "Entry",
    "File",
    "H",
    "V",
    "array",
    "boolean",
    "d2t_ids",
    "f32",
    "string",
    "tokenizer",
    "u32",
]
