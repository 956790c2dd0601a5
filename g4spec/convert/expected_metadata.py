"""Metadata that converting a source would write; `validate` compares a file with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from g4spec import models
from g4spec.convert import derived, pipeline, provenance, sources, target_info
from g4spec.convert.sources import DetectedSource
from g4spec.errors import G4Error
from g4spec.gguf import GGUF, KV, string, u32

MODEL_PREFIXES = ("tokenizer.", "g4spec.")
"""Prefixes of keys that change what a model computes, besides the prefix of its architecture."""
ORIGIN_KEYS = (
    provenance.SOURCE,
    provenance.REVISION,
    provenance.DIGEST,
    provenance.COMMAND,
    provenance.VERSIONS,
    provenance.TARGET_SOURCE,
    provenance.TARGET_REVISION,
)
"""Keys that record the origin of a file. They are not compared: a source may have been moved."""
OPTIONAL_KEYS = (provenance.WEIGHTS, provenance.TARGET_WEIGHTS)
"""Keys that are written only if the weights were available at conversion."""
OPTIONAL_PREFIXES = (
    "general.type",
    "general.quantization_version",
    "general.sampling.",
    "g4spec.target.",
    provenance.T2D_SHA256,
)
"""Prefixes of keys that files of other tools may lack without harm."""
DEFAULTED_KEYS = (
    "attention.causal",
    "norm_before_fc",
    "norm_before_residual",
    "rope.dimension_count",
)
"""Keys of drafts, without the architecture. If a file lacks them, llama.cpp and this program take
the same value: false, or the key length."""


OTHER_TEMPLATES = ("tokenizer.chat_templates", "tokenizer.chat_template.")
"""Keys of further chat templates, which llama.cpp's converter writes; nothing uses them here."""


@dataclass(frozen=True, slots=True)
class ExpectedMetadata:
    """Metadata that a conversion would write.

    Attributes:
        keys: metadata key -> value, of the model, its tokenizer and its target.
        arrays: keys whose arrays are tensors of the source; they are compared as tensors.
        computed: names of tensors that the conversion computes from the configuration.
        refusal: reason why the source cannot be converted, or empty.
    """

    keys: KV = field(default_factory=dict)
    arrays: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()
    refusal: str = ""

    def covers(self, key: str, arch: str) -> bool:
        """True if a file must have this key exactly when the conversion writes it."""
        if key in ORIGIN_KEYS or key in self.arrays or key.startswith(OTHER_TEMPLATES):
            return False
        return key.startswith((f"{arch}.", *MODEL_PREFIXES)) or key == "general.architecture"


def from_source(source: Path, kind: ModuleType, target: GGUF | None) -> ExpectedMetadata:
    """Return the metadata that converting `source` would write.

    Args:
        kind: the module in `models/` that the file claims to be.
        target: the target of a draft, None for a target.
    """
    try:
        found = sources.detect(source)
        with found:
            if found.kind is not kind:
                return ExpectedMetadata(refusal=f"it is a {found.kind.TITLE}")
            if isinstance(found.source, GGUF) and found.dialect is None:
                return _of_gguf(found.source, kind)
            return _converted(found, target)
    except G4Error as error:
        return ExpectedMetadata(refusal=str(error))


def _of_gguf(file: GGUF, kind: ModuleType) -> ExpectedMetadata:
    """Return the keys of a GGUF that is only requantized: it keeps all of them."""
    config = kind.parse_gguf(file.kv, file.shapes())
    all_keys = ExpectedMetadata(arrays=_arrays(kind, config))
    arch = str(file.get("general.architecture"))
    kept = {key: file.value(key) for key in file if all_keys.covers(key, arch)}
    return ExpectedMetadata(kept, all_keys.arrays)


def _converted(found: DetectedSource, target: GGUF | None) -> ExpectedMetadata:
    if found.is_target:
        info = target_info.from_source(found)
    else:
        assert target is not None
        info = target_info.from_source(DetectedSource(models.targets()[models.TARGETS[0]], target))
    config, tensors, *_ = pipeline.read(found, info)
    keys = pipeline.model_keys(found.kind, config, info.tokenizer)
    keys |= {
        "general.type": string("model"),
        "general.quantization_version": u32(pipeline.QUANTIZATION_VERSION),
    }
    if found.is_target:
        keys |= info.sampling
        keys |= {provenance.WEIGHTS: string(info.weights)} if info.weights else {}
    else:
        keys |= {k: v for k, v in info.pairing.items() if k not in ORIGIN_KEYS}
    keys |= _digest(tensors)
    specs = found.kind.tensors(config)
    computed = frozenset(t.name for t in specs if t.source is None and t.make)
    return ExpectedMetadata(keys, _arrays(found.kind, config), computed)


def _digest(tensors: Any) -> KV:
    """Return the digest of `t2d`, the mask of a reduced vocabulary; it has no tensor in a GGUF."""
    t2d = next((t for name, t in tensors.items() if name.split(".")[-1] == "t2d"), None)
    return {} if t2d is None else {provenance.T2D_SHA256: string(derived.t2d_sha256(t2d))}


def _arrays(kind: ModuleType, config: Any) -> frozenset[str]:
    rule = getattr(kind, "metadata_tensors", None)
    return frozenset(key for key, _ in (rule(config) if rule else {}).values())
