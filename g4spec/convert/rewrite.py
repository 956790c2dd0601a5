"""A draft GGUF in another program's dialect (`dialects.py`), read as if it were its checkpoint.

What such a file leaves out is taken from the target or follows from how its kind is trained: the
reasons are in the notes, which the user sees.
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

TOKENS = "tokenizer.ggml.tokens"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class RewrittenDraft:
    """A dialect's file in the words of its kind.

    Attributes:
        config: the kind's configuration.
        tensors: by the name in the file. `canonical_names`: that name -> the checkpoint's name.
        dropped: tensors of the file that are not needed.
    """

    config: Any
    tensors: Mapping[str, StoredTensor]
    canonical_names: Mapping[str, str]
    dropped: list[PlannedTensor]
    notes: list[str]


def rewrite(file: GGUF, dialect: Dialect, kind: ModuleType, pair: TargetInfo) -> RewrittenDraft:
    """Read `file` as the checkpoint of a `kind` of draft for the target `pair`.

    Raises Unsupported for features without code, InputError when it does not fit the target.
    """
    return _Rewriter(file, dialect, kind, pair).result()


def stored_tensor(file: GGUF, name: str) -> StoredTensor:
    """A tensor of a GGUF."""
    info = file.tensors[name]
    part = file.parts[info.part]
    place = (part.path, part.data_start + info.offset)
    return StoredTensor(
        name, info.shape, info.format.name.upper(), info.format, file.raw(name), place
    )


class _Rewriter:
    def __init__(self, file: GGUF, dialect: Dialect, kind: ModuleType, pair: TargetInfo) -> None:
        self.file, self.dialect, self.kind, self.pair = file, dialect, kind, pair
        self.family: DialectFamily = FAMILIES[dialect.kind]
        self.notes = [f"{file.path.name} is written in the dialect of {dialect.title}: rewritten"]
        self.dropped: list[PlannedTensor] = []
        arch = f"{file.get('general.architecture')}."
        self.own = {
            key.removeprefix(arch): key
            for key in file
            if not key.startswith(("general.", "tokenizer.", "g4spec."))
        }
        names = file.tensors
        self.current = {current_name(self.family, name, names): name for name in names}
        if len(self.current) != len(names):
            raise InputError(f"{file.path}: tensors under two names at once", found=[*names][:8])
        self.tensors = {name: stored_tensor(file, name) for name in names}

    def result(self) -> RewrittenDraft:
        self._refuse()
        self._same_tokenizer()
        kv = self._keys()
        config = (self._dflash if self.dialect.kind == "dflash" else self._assistant)(kv)
        self.kind.check_pair(config, self.pair.config)
        sources = {s.name: s.source for s in self.kind.tensors(config) if s.source}
        gone = {row.source for row in self.dropped}
        canonical_names = {
            name: sources.get(now, now) for now, name in self.current.items() if name not in gone
        }
        tensors = {n: t for n, t in self.tensors.items() if n not in gone}
        return RewrittenDraft(config, tensors, canonical_names, self.dropped, self.notes)

    def _refuse(self) -> None:
        """Features that change what the draft computes and have no code here."""
        said = [key for key, full in self.own.items() if self._value(full)]
        for pattern, feature in self.family.unsupported:
            found = next(
                (n for n in (*self.current, *self.file.tensors, *said) if re.fullmatch(pattern, n)),
                None,
            )
            if found is not None:
                raise Unsupported(
                    f"{self.file.path}: {feature} ({found}); this version has no code for it"
                )

    def _value(self, key: str) -> Any:
        """A value; of long arrays only whether there is one."""
        return self.file.length(key) if self.file.length(key) > 1024 else self.file[key]

    def _same_tokenizer(self) -> None:
        mine = self.file.get(TOKENS)
        if mine is not None and not isinstance(mine, list):
            raise InputError(f"{self.file.path}: {TOKENS}", expected="a list of texts")
        if mine is not None and mine != list(self.pair.tokenizer[TOKENS].data):
            raise InputError(
                f"{self.file.path}: its tokens are not the target's",
                expected=f"{self.pair.n_tokens} tokens, the same ones",
                found=f"{len(mine)} tokens",
                fix="pass the target this draft was made for",
            )

    def _keys(self) -> dict[str, Any]:
        """Metadata under the current names: the target's tokenizer, then the file's own."""
        kv = {key: value.data for key, value in self.pair.tokenizer.items()}
        if (mask := self.file.get("tokenizer.ggml.mask_token_id")) is not None:
            kv["tokenizer.ggml.mask_token_id"] = mask
        strange = []
        for key, full in self.own.items():
            new = self.family.renamed_keys.get(key, key)
            if new == key and key not in self.family.kept_keys:
                if not any(re.fullmatch(p, key) for p in self.family.ignored_keys):
                    strange.append(key)
                continue
            value = self.file[full]
            if new == "target_layers" and key in (OUTPUT_LAYER_IDS, "target_layer_ids"):
                value = [i + 1 for i in self._integers(full)]
            elif new == "target_layers":
                value = self._integers(full)
            name = new if new.startswith("tokenizer.") else f"{self.dialect.kind}.{new}"
            kv[name] = value
        if strange:
            self.notes.append(f"keys without a meaning here are left out: {', '.join(strange)}")
        return kv

    def _integers(self, key: str) -> list[int]:
        value = self.file[key]
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise InputError(
                f"{self.file.path}: {key}", expected="a list of integers", found=f"{value!r:.80}"
            )
        return value

    def _pattern(self, kv: dict[str, Any], n_layer: object, always: bool) -> None:
        """`attention.sliding_window_pattern` as a list of bool; made where it is missing."""
        key = f"{self.dialect.kind}.attention.sliding_window_pattern"
        given = kv.get(key)
        if isinstance(given, list):
            kv[key] = [bool(x) for x in given]
        elif (
            isinstance(n_layer, int)
            and 0 < n_layer <= 512
            and (always or kv.get(f"{self.dialect.kind}.attention.sliding_window"))
        ):
            kv[key] = [True] * (n_layer - 1) + [False]
            self.notes.append(
                "no sliding_window_pattern: all layers but the last slide, as in "
                "every published draft of this kind"
            )

    # ---- DFlash

    def _dflash(self, kv: dict[str, Any]) -> Any:
        own_table = "token_embd.weight" in self.current or "d2t" in self.current
        if (activation := kv.get("dflash.hidden_activation", "silu")) != "silu":
            raise Unsupported(f"{self.file.path}: activation", expected="silu", found=activation)
        kv.setdefault("dflash.vocab_size", self.pair.config.n_vocab)
        self._pattern(kv, kv.get("dflash.block_count"), always=False)
        pattern = kv.get("dflash.attention.sliding_window_pattern")
        if pattern is not None:  # sliding layers are causal inside a block, full ones are not
            kv["g4spec.dflash.layer_causal"] = pattern
        kv["g4spec.dflash.window_from_anchor"] = own_table
        if "dflash.target_layers" not in kv:
            kv["dflash.target_layers"] = self._default_taps(kv)
        if not own_table and "dflash.embedding_scale" not in kv:
            scale = math.sqrt(self.pair.config.n_embd)
            kv["dflash.embedding_scale"] = scale
            self.notes.append(
                f"embedding_scale {scale:.4f} added: trained on Gemma's scaled embedding"
            )
        if not own_table and "dflash.final_logit_softcapping" not in kv:
            kv["dflash.final_logit_softcapping"] = self.pair.config.softcap
        if "d2t" in self.current:
            self._offsets(self.current["d2t"])
        return self.kind.parse_gguf(kv, self._shapes())

    def _default_taps(self, kv: Mapping[str, Any]) -> list[int]:
        """Where z-lab reads its targets: from the second layer to the third from the end."""
        hidden = kv.get("dflash.embedding_length")
        width = self._shapes().get("fc.weight", (0, 0))[-1]
        depth = len(self.pair.config.layers)
        count = width // hidden if isinstance(hidden, int) and hidden else 0
        if not 2 <= count <= depth:
            raise InputError(f"{self.file.path}: names no target layers")
        ids = [round(1 + k * (depth - 4) / (count - 1)) for k in range(count)]
        self.notes.append(f"no target_layer_ids: took {ids}, where z-lab's formula places them")
        return [i + 1 for i in ids]

    def _offsets(self, name: str) -> None:
        """`d2t` as offsets, which a checkpoint has; forks store offsets or absolute ids."""
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
        self.tensors[name] = _made(name, delta, "i64")

    # ---- assistants

    def _assistant(self, kv: dict[str, Any]) -> Any:
        arch = "gemma4-assistant"
        n_layer = kv.get(f"{arch}.block_count")
        self._pattern(kv, n_layer, always=True)
        if "rope_freqs.weight" in self.current:
            self._rotated_share(kv)
        config = self.kind.parse_gguf(kv, self._shapes())
        self._scales(len(config.layers))
        self._check_rotation(config)
        if ORDERING in self.current:
            config = self._centroids(config, kv)
        return config

    def _rotated_share(self, kv: dict[str, Any]) -> None:
        values = self._floats("rope_freqs.weight")
        share = float(np.count_nonzero(values == 1)) / max(values.size, 1)
        if share != 0.25:
            kv["g4spec.rope_partial"] = share

    def _check_rotation(self, config: Any) -> None:
        """The file's divisors must be those that its configuration implies."""
        name = self.current.get("rope_freqs.weight")
        if name is None:
            self.notes.append("rope_freqs made: a quarter of each full layer's head rotates")
            return
        found = self._floats("rope_freqs.weight")
        full = {s.head_dim for s in config.body.layers if s.window is None}
        # The size first: what the configuration claims may be gigabytes.
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
                "made again from the configuration, the same",
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
            self.tensors[name] = _made(name, np.ones(1, np.float32), "f32")
        if missing:
            self.notes.append(f"layer_output_scale of {len(missing)} layers made: 1")

    def _centroids(self, config: Any, kv: Mapping[str, Any]) -> Any:
        """A centroid head; its ordering leads from cluster slot to token, or the other way."""
        name = self.current[ORDERING]
        table = self._shapes().get(CENTROIDS, ())
        if len(table) != 2:
            raise InputError(f"{self.file.path}: {name} without a table of centroids")
        clusters, order = table[0], self.tensors[name].array()
        inverse = _slots(order, clusters)
        if inverse is not None:
            self.tensors[name] = _made(name, inverse, "i32")
            self.notes.append(f"{name} names each token's cluster: turned into cluster slots")
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
        return {now: self.tensors[name].shape for now, name in self.current.items()}

    def _floats(self, now: str) -> NDArray[Any]:
        return np.asarray(self.tensors[self.current[now]].array()).reshape(-1)


def _slots(order: NDArray[Any], clusters: int) -> NDArray[np.int32] | None:
    """Slot -> token from token -> cluster, tokens of a cluster in ascending order; None if
    `order` is no such map. The order within a cluster is lost there, and means nothing."""
    flat = order.reshape(-1)
    if flat.dtype.kind != "i" or not flat.size or clusters < 1 or flat.size % clusters:
        return None
    if flat.min() < 0 or flat.max() != clusters - 1 or clusters == flat.size:
        return None
    if (np.bincount(flat, minlength=clusters) != flat.size // clusters).any():
        return None
    return np.argsort(flat, kind="stable").astype(np.int32)


def _made(name: str, values: NDArray[Any], type: str) -> StoredTensor:
    """A tensor that stands in no file."""
    form = quant.get(type)
    return StoredTensor(
        name,
        values.shape,
        type.upper(),
        form,
        np.ascontiguousarray(values).view(np.uint8).reshape(-1),
    )
