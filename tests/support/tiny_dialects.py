"""The same draft in every dialect: a current GGUF rewritten as another program would write it.

Each builder takes the current file (a direct conversion of the checkpoint) and returns its keys and
tensors under the dialect's names, without those that the dialect omits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from g4spec.gguf import GGUF, KV, TensorData, ValueType, array, boolean, string, u32, write
from g4spec.models.assistant import CENTROIDS, ORDERING, TOP_K


@dataclass
class Parts:
    """A file as data: keys, and tensors as (shape, type, bytes)."""

    kv: KV
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]]
    arch: str = ""

    @classmethod
    def of(cls, path: Path) -> Parts:
        with GGUF(path) as g:
            kv = {k: g.value(k) for k in g if not k.startswith("g4spec.")}
            tensors = {n: (t.shape, t.type, g.raw(n).tobytes()) for n, t in g.tensors.items()}
            return cls(kv, tensors, str(g["general.architecture"]))

    def rename_arch(self, arch: str) -> None:
        self.kv = {
            k.replace(f"{self.arch}.", f"{arch}.", 1) if k.startswith(f"{self.arch}.") else k: v
            for k, v in self.kv.items()
        }
        self.kv["general.architecture"] = string(arch)
        self.arch = arch

    def more(self, keys: KV) -> None:
        """Add keys of the architecture."""
        self.kv |= {f"{self.arch}.{key}": value for key, value in keys.items()}

    def key(self, old: str, new: str | None, change: Callable[[Any], Any] | None = None) -> None:
        """Rename a key of the architecture, or drop it."""
        value = self.kv.pop(f"{self.arch}.{old}", None)
        if new is not None and value is not None:
            self.kv[f"{self.arch}.{new}"] = change(value) if change else value

    def tensor(self, old: str, new: str | None) -> None:
        """Rename all tensors whose name contains `old`, or drop them."""
        out = {}
        for name, entry in self.tensors.items():
            if old not in name:
                out[name] = entry
            elif new is not None:
                out[name.replace(old, new)] = entry
        self.tensors = out

    def no_tokenizer(self) -> None:
        self.kv = {k: v for k, v in self.kv.items() if not k.startswith("tokenizer.")}

    def write(self, path: Path) -> Path:
        data = [TensorData(n, shape, kind, [raw]) for n, (shape, kind, raw) in self.tensors.items()]
        write(path, self.kv, data)
        return path


def _dflash(p: Parts, arch: str, fc: str, norm: str) -> int:
    """Apply the changes that all forks share: output ids under `dflash.`, no scale, no causality
    keys."""
    mask = p.kv["tokenizer.ggml.mask_token_id"].data
    p.rename_arch(arch)
    p.key(
        "target_layers",
        "dflash.target_layer_ids",
        lambda v: array(ValueType.I32, [i - 1 for i in v.data]),
    )
    p.key("block_size", "dflash.block_size")
    p.key("embedding_scale", None)
    p.key("attention.causal", None)
    p.key("rope.dimension_count", None)
    p.tensor("fc.weight", fc)
    p.tensor("enc.output_norm.weight", norm)
    return int(mask)


def lucebox(p: Parts) -> None:
    mask = _dflash(p, "gemma4-dflash-draft", "dflash.fc.weight", "dflash.hidden_norm.weight")
    p.no_tokenizer()
    p.key("attention.sliding_window_pattern", None)
    p.more(
        {
            "dflash.mask_token_id": u32(mask),
            "dflash.n_target_layers": u32(60),
            "dflash.n_target_features": u32(192),
            "vocab_size": u32(512),
            "tie_word_embeddings": boolean(True),
        }
    )


def lucebox_no_ids(p: Parts) -> None:
    lucebox(p)
    p.key("dflash.target_layer_ids", None)
    p.key("final_logit_softcapping", None)


def dusterbloom(p: Parts) -> None:
    mask = _dflash(p, "gemma4-dflash-draft", "dflash.fc.weight", "dflash.hidden_norm.weight")
    p.no_tokenizer()
    p.key("attention.sliding_window_pattern", None)
    p.key("attention.sliding_window", "dflash.sliding_window")
    p.key("final_logit_softcapping", "dflash.logit_softcap")
    p.more(
        {
            "dflash.mask_token_id": u32(mask),
            "dflash.n_target_layers": u32(3),
            "dflash.target_hidden": u32(64),
            "vocab_size": u32(512),
        }
    )


def ik(p: Parts) -> None:
    mask = _dflash(p, "dflash-draft", "dflash_fc.weight", "dflash_hidden_norm.weight")
    p.tensor(".ffn_norm.", ".post_attention_norm.")
    p.more(
        {
            "dflash.mask_token_id": u32(mask),
            "attention.causal": boolean(False),
            "dflash.n_target_features": u32(192),
            "dflash.laguna": boolean(False),
        }
    )


def beellama(p: Parts) -> None:
    ik(p)
    p.rename_arch("gemma4-dflash-draft")
    p.key("final_logit_softcapping", None)
    p.key("dflash.laguna", None)


def early_upstream(p: Parts) -> None:
    mask = _dflash(p, "dflash", "dflash_fc.weight", "dflash_hidden_norm.weight")
    p.kv["dflash.dflash.mask_token_id"] = u32(mask)


def _assistant(p: Parts, arch: str) -> None:
    p.rename_arch(arch)
    for key in (
        "nextn_predict_layers",
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
    ):
        p.key(key, None)


def _centroids(
    p: Parts,
    source: Path,
    centroids: str,
    ordering: str,
    keys: tuple[str, str],
    inverse: bool = False,
) -> None:
    """Write the centroid head as tensors, if the current file has it as arrays."""
    with GGUF(source) as g:
        if CENTROIDS not in g:
            return
        order, width = g.number_array(ORDERING), g.shapes()["token_embd.weight"][1]
        table = g.number_array(CENTROIDS).reshape(-1, width)
        top_k = g[TOP_K]
    if inverse:
        clusters = np.empty_like(order)
        clusters[order] = np.arange(len(order)) // (len(order) // len(table))
        order = clusters
    p.tensors[centroids] = (table.shape, 0, table.tobytes())
    p.tensors[ordering] = (order.shape, 26, order.astype("<i4").tobytes())
    p.more({keys[0]: u32(len(table)), keys[1]: u32(top_k), "use_ordered_embeddings": boolean(True)})


def atomic_chat(p: Parts, source: Path) -> None:
    _assistant(p, "gemma4_assistant")
    p.key("embedding_length_out", "n_embd_backbone")
    p.tensor("nextn.", "mtp.")
    p.more({"attention.k_eq_v": boolean(True), "requires_target_arch": string("gemma4")})
    _centroids(
        p,
        source,
        "mtp.centroids.weight",
        "mtp.token_ordering.weight",
        ("n_centroids", "centroid_top_k"),
    )


def ik_mtp(p: Parts, source: Path) -> None:
    _assistant(p, "gemma4_mtp")
    p.key("embedding_length_out", "backbone_embedding_length")
    p.tensor("nextn.pre_projection", "mtp_pre_proj")
    p.tensor("nextn.post_projection", "mtp_post_proj")
    p.tensor("rope_freqs", None)
    _centroids(
        p,
        source,
        "mtp_centroids.weight",
        "mtp_token_ordering.weight",
        ("centroid_count", "centroid_top_k"),
        inverse=True,
    )


def ik_assistant(p: Parts, source: Path) -> None:
    _assistant(p, "gemma4-assistant")
    p.kv["gemma4-assistant.n_centroids"] = u32(0)
    p.tensors["output.weight"] = p.tensors["token_embd.weight"]
    _centroids(
        p,
        source,
        "mtp.centroids.weight",
        "mtp.token_ordering.weight",
        ("n_centroids", "centroid_top_k"),
    )


def early_assistant(p: Parts, source: Path) -> None:
    p.key("attention.sliding_window_pattern", None)
    _centroids(
        p,
        source,
        "masked_embd_centroids.weight",
        "masked_embd_ordering",
        ("n_centroids", "centroid_top_k"),
    )


DFLASH: dict[str, Callable[[Parts], None]] = {
    "lucebox": lucebox,
    "lucebox without ids": lucebox_no_ids,
    "dusterbloom": dusterbloom,
    "ik": ik,
    "beellama": beellama,
    "early upstream": early_upstream,
}
ASSISTANT: dict[str, Callable[[Parts, Path], None]] = {
    "AtomicChat": atomic_chat,
    "ik mtp": ik_mtp,
    "ik assistant": ik_assistant,
    "early upstream": early_assistant,
}
