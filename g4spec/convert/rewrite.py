"""Rewrite a draft GGUF in another program's dialect (`dialects.py`) into the form of a checkpoint.

Metadata that such a file lacks come from the target, or from how drafts of its kind are trained.
Each such choice is explained in a note to the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.convert import derived
from g4spec.convert.dialects import FAMILIES, OUTPUT_LAYER_IDS, Dialect, DialectFamily, current_name
from g4spec.convert.plan import PlannedTensor
from g4spec.convert.target_info import TargetInfo
from g4spec.convert.tensors import StoredTensor
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.models.fields import Fields

TOKENS = "tokenizer.ggml.tokens"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class RewrittenDraft:
    """A draft GGUF translated from its dialect.

    Attributes:
        config: the kind's configuration.
        tensors: name in the file -> tensor.
        canonical_names: name in the file -> name in a checkpoint of the kind.
        dropped: tensors of the file that are not needed.
        notes: remarks for the user.
    """

    config: Any
    tensors: Mapping[str, StoredTensor]
    canonical_names: Mapping[str, str]
    dropped: list[PlannedTensor]
    notes: list[str]


def rewrite(file: GGUF, dialect: Dialect, kind: ModuleType, target: TargetInfo) -> RewrittenDraft:
    """Translate `file` for `target`.

    Args:
        kind: the module in `models/` that the draft becomes.

    Raises Unsupported for features that have no code, InputError if it does not fit the target.
    """
    return _Rewriter(file, dialect, kind, target).result()


def stored_tensor(file: GGUF, name: str) -> StoredTensor:
    """Return a tensor of an open GGUF."""
    info = file.tensors[name]
    part = file.parts[info.part]
    place = (part.path, part.data_start + info.offset)
    return StoredTensor(
        name, info.shape, info.format.name.upper(), info.format, file.raw(name), place
    )


class _Rewriter:
    def __init__(self, file: GGUF, dialect: Dialect, kind: ModuleType, target: TargetInfo) -> None:
        self.file, self.dialect, self.kind, self.target = file, dialect, kind, target
        self.family: DialectFamily = FAMILIES[dialect.kind]
        self.notes = [f"{file.path.name} has the GGUF dialect of {dialect.title}: rewritten"]
        self.dropped: list[PlannedTensor] = []
        arch = f"{file.get('general.architecture')}."
        self.own_keys = {
            key.removeprefix(arch): key
            for key in file
            if not key.startswith(("general.", "tokenizer.", "g4spec."))
        }
        names = file.tensors
        self.current = {current_name(self.family, name, names): name for name in names}
        if len(self.current) != len(names):
            raise InputError(
                f"{file.path}: a tensor is present under two names", found=[*names][:8]
            )
        self.tensors = {name: stored_tensor(file, name) for name in names}

    def result(self) -> RewrittenDraft:
        self._refuse()
        self._same_tokenizer()
        kv = self._keys()
        config = (self._dflash if self.dialect.kind == "dflash" else self._assistant)(kv)
        self.kind.check_pair(config, self.target.config)
        sources = {s.name: s.source for s in self.kind.tensors(config) if s.source}
        dropped = {row.source for row in self.dropped}
        canonical_names = {
            name: sources.get(current, current)
            for current, name in self.current.items()
            if name not in dropped
        }
        tensors = {n: t for n, t in self.tensors.items() if n not in dropped}
        return RewrittenDraft(config, tensors, canonical_names, self.dropped, self.notes)

    def _refuse(self) -> None:
        """Raise Unsupported if the file uses a feature that has no code here, InputError if it
        scales positions."""
        used_keys = [key for key, full in self.own_keys.items() if self._value(full)]
        for pattern, feature in self.family.unsupported:
            found = next(
                (
                    n
                    for n in (*self.current, *self.file.tensors, *used_keys)
                    if re.fullmatch(pattern, n)
                ),
                None,
            )
            if found is not None:
                raise Unsupported(
                    f"{self.file.path}: {feature} ({found}); this version has no code for it"
                )
        arch = f"{self.file.get('general.architecture')}."
        Fields(self.file.kv, str(self.file.path), arch).require_plain_positions()

    def _value(self, key: str) -> Any:
        """Return a metadata value; of an array with over 1024 entries, its length."""
        return self.file.length(key) if self.file.length(key) > 1024 else self.file[key]

    def _same_tokenizer(self) -> None:
        tokens = self.file.get(TOKENS)
        if tokens is not None and not isinstance(tokens, list):
            raise InputError(f"{self.file.path}: {TOKENS}", expected="a list of texts")
        if tokens is not None and tokens != list(self.target.tokenizer[TOKENS].data):
            raise InputError(
                f"{self.file.path}: its tokens are not the target's",
                expected=f"{self.target.n_tokens} tokens, the same ones",
                found=f"{len(tokens)} tokens",
                fix="pass the target this draft was made for",
            )

    def _keys(self) -> dict[str, Any]:
        """Return the metadata under current names: the target's tokenizer, then the file's keys."""
        kv = {key: value.data for key, value in self.target.tokenizer.items()}
        if (mask := self.file.get("tokenizer.ggml.mask_token_id")) is not None:
            kv["tokenizer.ggml.mask_token_id"] = mask
        unknown = []
        for key, full in self.own_keys.items():
            new = self.family.renamed_keys.get(key, key)
            if new == key and key not in self.family.kept_keys:
                if not any(re.fullmatch(p, key) for p in self.family.ignored_keys):
                    unknown.append(key)
                continue
            value = self.file[full]
            if new == "target_layers" and key in (OUTPUT_LAYER_IDS, "target_layer_ids"):
                value = [i + 1 for i in self._integers(full)]
            elif new == "target_layers":
                value = self._integers(full)
            name = new if new.startswith("tokenizer.") else f"{self.dialect.kind}.{new}"
            kv[name] = value
        if unknown:
            self.notes.append(f"unknown keys are dropped: {', '.join(unknown)}")
        return kv

    def _integers(self, key: str) -> list[int]:
        value = self.file[key]
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise InputError(
                f"{self.file.path}: {key}", expected="a list of integers", found=f"{value!r:.80}"
            )
        return value

    def _pattern(self, kv: dict[str, Any], n_layer: object, always: bool) -> None:
        """Set `attention.sliding_window_pattern` to a list of bool, with a default if missing."""
        key = f"{self.dialect.kind}.attention.sliding_window_pattern"
        pattern = kv.get(key)
        if isinstance(pattern, list):
            kv[key] = [bool(x) for x in pattern]
        elif (
            isinstance(n_layer, int)
            and 0 < n_layer <= 512
            and (always or kv.get(f"{self.dialect.kind}.attention.sliding_window"))
        ):
            kv[key] = [True] * (n_layer - 1) + [False]
            self.notes.append(
                "no sliding_window_pattern: all layers but the last use a sliding window, as in "
                "every published draft of this kind"
            )

    # ---- DFlash

    def _dflash(self, kv: dict[str, Any]) -> Any:
        own_table = "token_embd.weight" in self.current or "d2t" in self.current
        if (activation := kv.get("dflash.hidden_activation", "silu")) != "silu":
            raise Unsupported(f"{self.file.path}: activation", expected="silu", found=activation)
        kv.setdefault("dflash.vocab_size", self.target.config.n_vocab)
        self._pattern(kv, kv.get("dflash.block_count"), always=False)
        pattern = kv.get("dflash.attention.sliding_window_pattern")
        if pattern is not None:  # sliding layers are causal inside a block, full ones are not
            kv["g4spec.dflash.layer_causal"] = pattern
        kv["g4spec.dflash.window_from_anchor"] = own_table
        if "dflash.target_layers" not in kv:
            kv["dflash.target_layers"] = self._default_taps(kv)
        if not own_table and "dflash.embedding_scale" not in kv:
            scale = math.sqrt(self.target.config.n_embd)
            kv["dflash.embedding_scale"] = scale
            self.notes.append(
                f"embedding_scale {scale:.4f} added: trained on Gemma's scaled embedding"
            )
        if not own_table and "dflash.final_logit_softcapping" not in kv:
            kv["dflash.final_logit_softcapping"] = self.target.config.softcap
        if "d2t" in self.current:
            self._offsets(self.current["d2t"])
        return self.kind.parse_gguf(kv, self._shapes())

    def _default_taps(self, kv: Mapping[str, Any]) -> list[int]:
        """Return the taps of z-lab's formula: from the second layer to the third from the end."""
        hidden = kv.get("dflash.embedding_length")
        width = self._shapes().get("fc.weight", (0, 0))[-1]
        depth = len(self.target.config.layers)
        count = width // hidden if isinstance(hidden, int) and hidden else 0
        if not 2 <= count <= depth:
            raise InputError(f"{self.file.path}: no target layer ids")
        ids = [round(1 + k * (depth - 4) / (count - 1)) for k in range(count)]
        self.notes.append(f"no target_layer_ids: used {ids}, from z-lab's formula")
        return [i + 1 for i in ids]

    def _offsets(self, name: str) -> None:
        """Convert `d2t` to offsets, as in a checkpoint; forks store offsets or absolute ids."""
        tensor = self.tensors[name]
        if tensor.format is None or not tensor.format.integer or len(tensor.shape) != 1:
            raise InputError(
                f"{self.file.path}: tensor {name}",
                expected="a row of integers",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
        ids = tensor.array().astype(np.int64)
        absolute = bool((np.diff(ids) > 0).all())
        delta = ids - np.arange(len(ids)) if absolute else ids
        self.tensors[name] = computed_tensor(name, delta, "i64")

    # ---- assistants

    def _assistant(self, kv: dict[str, Any]) -> Any:
        arch = "gemma4-assistant"
        n_layer = kv.get(f"{arch}.block_count")
        self._pattern(kv, n_layer, always=True)
        if "rope_freqs.weight" in self.current:
            self._rotated_fraction(kv)
        config = self.kind.parse_gguf(kv, self._shapes())
        self._scales(len(config.layers))
        self._check_rotation(config)
        if ORDERING in self.current:
            config = self._centroids(config, kv)
        return config

    def _rotated_fraction(self, kv: dict[str, Any]) -> None:
        values = self._rope_freqs()
        fraction = float(np.count_nonzero(values == 1)) / max(values.size, 1)
        if fraction != 0.25:
            kv["g4spec.rope_partial"] = fraction

    def _check_rotation(self, config: Any) -> None:
        """Raise Unsupported unless the file's RoPE divisors are those that its configuration
        implies. They are dropped and computed again."""
        name = self.current.get("rope_freqs.weight")
        if name is None:
            self.notes.append("rope_freqs added: a quarter of each full-attention head rotates")
            return
        found = self._rope_freqs()
        full = {s.head_dim for s in config.body.layers if s.window is None}
        # Compare sizes first: the size in an untrusted configuration may be gigabytes.
        if full != {2 * found.size} or not np.array_equal(found, derived.rope_freqs(config.body)):
            raise Unsupported(
                f"{self.file.path}: {name}",
                expected="ones, then 1e30",
                found=f"{found[:4].tolist()}...",
            )
        self.dropped.append(
            PlannedTensor(
                "drop",
                name,
                None,
                self.tensors[name].shape,
                "",
                "computed from the configuration, with the same values",
            )
        )

    def _scales(self, n_layer: int) -> None:
        missing = [
            n
            for i in range(n_layer)
            if (n := f"blk.{i}.layer_output_scale.weight") not in self.current
        ]
        for name in missing:
            self.current[name] = name
            self.tensors[name] = computed_tensor(name, np.ones(1, np.float32), "f32")
        if missing:
            self.notes.append(f"layer_output_scale added to {len(missing)} layers: 1")

    def _centroids(self, config: Any, kv: Mapping[str, Any]) -> Any:
        """Read a centroid head; its ordering maps slots to tokens, or tokens to clusters."""
        name = self.current[ORDERING]
        table = self._shapes().get(CENTROIDS, ())
        if len(table) != 2:
            raise InputError(f"{self.file.path}: {name} without a table of centroids")
        clusters, order = table[0], self.tensors[name].array()
        inverse = _slots(order, clusters)
        if inverse is not None:
            self.tensors[name] = computed_tensor(name, inverse, "i32")
            self.notes.append(f"{name} maps tokens to clusters: inverted")
        elif not np.array_equal(np.sort(order.reshape(-1)), np.arange(config.n_vocab)):
            raise InputError(
                f"{self.file.path}: {name}",
                expected="a permutation of the tokens, or each token's cluster",
                found=f"{order.size} numbers such as {order.reshape(-1)[:4].tolist()}",
            )
        top_k = kv.get("gemma4-assistant.centroid_top_k", 32)
        if not isinstance(top_k, int) or not 1 <= top_k <= clusters:
            raise InputError(
                f"{self.file.path}: centroid_top_k", expected=f"1 to {clusters}", found=top_k
            )
        return replace(config, n_centroids=clusters, centroid_top_k=top_k)

    # ----

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {current: self.tensors[name].shape for current, name in self.current.items()}

    def _rope_freqs(self) -> NDArray[Any]:
        return np.asarray(self.tensors[self.current["rope_freqs.weight"]].array()).reshape(-1)


def _slots(order: NDArray[Any], clusters: int) -> NDArray[np.int32] | None:
    """Invert a map token -> cluster into slot -> token, tokens of a cluster in ascending order.

    Returns None if `order` is no such map. The order within a cluster does not matter.
    """
    flat = order.reshape(-1)
    if flat.dtype.kind != "i" or not flat.size or clusters < 1 or flat.size % clusters:
        return None
    if flat.min() < 0 or flat.max() != clusters - 1 or clusters == flat.size:
        return None
    if (np.bincount(flat, minlength=clusters) != flat.size // clusters).any():
        return None
    return np.argsort(flat, kind="stable").astype(np.int32)


def computed_tensor(name: str, values: NDArray[Any], type: str) -> StoredTensor:
    """Return a tensor with computed values, which is in no file."""
    form = quant.get(type)
    return StoredTensor(
        name,
        values.shape,
        type.upper(),
        form,
        np.ascontiguousarray(values).view(np.uint8).reshape(-1),
    )
