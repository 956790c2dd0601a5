"""Reads sizes and shapes of local targets and drafts: GGUF files and checkpoint folders.

Only headers are read. Unlike the runtime's parsers, these accept every Gemma 4 file, including
sizes that g4spec cannot run, because other engines may run them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec import models
from g4spec.advisor import named_models, runtime_support
from g4spec.advisor.facts import Facts
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.advisor.schema import DraftFact, SizeFact
from g4spec.core import CacheShape
from g4spec.errors import InputError
from g4spec.gguf import GGUF, folder_hint, regular_files
from g4spec.models import pairing
from g4spec.models.fields import MAX_LAYERS
from g4spec.models.spec import Checkpoint
from g4spec.models.upstream import REFUSED_SUFFIX

ENGINES = ("vllm", "sglang")
SHORT = 2
"""Bytes per 16-bit cache value."""
EAGLE3_LENGTH = 5
"""Tokens that RedHat recommends to draft with EAGLE-3; a chain has no maximum of its own."""


@contextmanager
def _malformed(path: Path) -> Iterator[None]:
    """Turn errors caused by malformed configuration values into InputError."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError) as problem:
        raise InputError(f"{path}: malformed configuration ({problem})") from problem


def read_target(facts: Facts, path: Path, given: str) -> TargetModel:
    """Read a target from a GGUF file or a checkpoint folder."""
    with _malformed(path):
        read = _gguf_target if path.is_file() else _folder_target
        return read(facts, path, given)


def read_draft(facts: Facts, path: Path, given: str, of: TargetModel) -> DraftModel:
    """Read a draft of target `of` from a GGUF file or a checkpoint folder."""
    with _malformed(path):
        read = _gguf_draft if path.is_file() else _folder_draft
        return read(facts, path, given, of)


# ---- GGUF


def _list(kv: Mapping[str, Any], key: str, n: int) -> list[Any]:
    """Return a per-layer value as a list of n entries; a scalar applies to all layers."""
    value = kv.get(key)
    if value is None:
        raise InputError(f"GGUF metadata: {key} is missing")
    got = value if isinstance(value, list) else [value] * n
    if len(got) != n:
        raise InputError(f"GGUF metadata: {key}", expected=f"{n} entries", found=len(got))
    return got


def _number(kv: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = kv.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"GGUF metadata: {key}", expected="a number", found=value)
    return value


def _layers(kv: Mapping[str, Any], prefix: str) -> int:
    n = _number(kv, f"{prefix}.block_count")
    if not 0 < n <= MAX_LAYERS:
        raise InputError("GGUF metadata: layers", expected=f"1 to {MAX_LAYERS}", found=n)
    return n


def gguf_caches(kv: Mapping[str, Any], arch: str) -> tuple[CacheShape, ...]:
    """Return the cache shapes of a gemma4 file, without layers that share an earlier cache."""
    a = f"{arch}."
    n = _layers(kv, arch)
    heads = _list(kv, a + "attention.head_count_kv", n)
    sliding = _list(kv, a + "attention.sliding_window_pattern", n)
    window = _number(kv, a + "attention.sliding_window")
    full = _number(kv, a + "attention.key_length")
    swa = _number(kv, a + "attention.key_length_swa", full)
    shared = _number(kv, a + "attention.shared_kv_layers", 0)
    return tuple(
        CacheShape(int(heads[i]), swa if sliding[i] else full, window if sliding[i] else None)
        for i in range(max(0, n - shared))
    )


def _read_once(file: GGUF, kv: Mapping[str, Any], arch: str) -> float:
    """Return the fraction of the weights that one token reads: no inactive experts, no per-layer
    token tables."""
    total = sum(t.nbytes for t in file.tensors.values())
    experts = sum(t.nbytes for name, t in file.tensors.items() if "_exps" in name)
    tables = sum(t.nbytes for name, t in file.tensors.items() if "per_layer_token_embd" in name)
    n, used = kv.get(f"{arch}.expert_count", 0), kv.get(f"{arch}.expert_used_count", 0)
    idle = experts * (1 - used / n) if isinstance(n, int) and n and isinstance(used, int) else 0.0
    return (total - idle - tables) / total if total else 1.0


def _size_like(facts: Facts, hidden: int, layers: int) -> SizeFact | None:
    return next(
        (s for s in facts.all(SizeFact) if s.hidden == hidden and s.sliding + s.full == layers),
        None,
    )


def _gguf_target(facts: Facts, path: Path, given: str) -> TargetModel:
    with GGUF(path) as file:
        arch = file.get("general.architecture")
        if arch is None:
            raise InputError(
                f"{path}: not a model",
                expected="a GGUF file with general.architecture",
                fix="download or convert the file again",
            )
        if arch != "gemma4":
            raise InputError(
                f"{path}: not a Gemma 4 target",
                expected="architecture gemma4",
                found=arch,
                fix="give a draft with -md, and its target with -m",
            )
        kv = file.kv
        n = _layers(kv, "gemma4")
        size = _size_like(facts, _number(kv, "gemma4.embedding_length"), n)
        every = [t for t in file.tensors.values() if len(t.shape) > 1] or [*file.tensors.values()]
        large = [t for t in every if math.prod(t.shape) > 1 << 20] or every
        names = [t.format.name for t in large]
        common = max(set(names), key=names.count).upper() if names else "none"
        nbytes = sum(t.nbytes for t in file.tensors.values())
        option = WeightFormat(
            common, nbytes, ("llama.cpp", "g4spec"), own=runtime_support.weight_bytes(file)
        )
        return TargetModel(
            title=f"{path.name} (Gemma 4 {size.name if size else f'with {n} layers'})",
            size=size.id if size else "other",
            given=given,
            formats=(option,),
            caches=gguf_caches(kv, "gemma4"),
            context=_number(kv, "gemma4.context_length"),
            hub=size.hub if size else "",
            active=_read_once(file, kv, "gemma4"),
            moe=bool(kv.get("gemma4.expert_count")),
            is_gguf=True,
            is_local=True,
            refusal=runtime_support.refusal(file, models.kinds()["gemma4"]),
            notes=tuple(
                note
                for note in (runtime_support.mix_note(file), runtime_support.repacked_note(file))
                if note
            ),
        )


def _row(facts: Facts, kind: str, maker: str, size: str) -> DraftFact | None:
    rows = [d for d in facts.all(DraftFact) if d.kind == kind and d.model == size]
    return next((d for d in rows if d.maker == maker), None)


def _check_sizes(
    facts: Facts, path: Path, sizes: tuple[Any, Any], of: TargetModel, *, trained: bool = False
) -> None:
    """Raise InputError if a draft was made for a target of another size than `of`. A target of no
    published size is not compared. Arguments: see `pairing.check_sizes`."""
    size = facts.find(SizeFact, of.size)
    if size is not None:
        pairing.check_sizes(path, sizes, size.sliding + size.full, size.hidden, trained=trained)


def _gguf_draft(facts: Facts, path: Path, given: str, of: TargetModel) -> DraftModel:
    with GGUF(path) as file:
        _check_sizes(facts, path, pairing.recorded_sizes(file), of)
        kv, arch = file.kv, str(file.get("general.architecture"))
        nbytes = sum(t.nbytes for t in file.tensors.values())
        own_head = "output.weight" in file.tensors
        draft = _new_draft(path, given, of, nbytes, gguf=True)
        known = models.find_kind(arch, file.tensors)
        if known is not None:
            draft = replace(draft, refusal=runtime_support.refusal(file, known))
        if arch == "gemma4-assistant":
            return _with_row(
                replace(draft, kind="mtp", head=512, llamacpp_n=4),
                _row(facts, "mtp", "google", of.size),
            )
        if arch in models.TARGETS:
            raise models.wrong_role(path, models.kinds()[arch])
        if known is None:
            raise InputError(
                f"{path}: not a draft that engines know",
                found=arch,
                expected="architecture dflash, eagle3 or gemma4-assistant",
                fix="see what it is with `g4spec inspect`; `g4spec convert` writes such a file",
            )
        kind = getattr(known, "NAME", known.ARCH)
        prefix = arch if f"{arch}.block_count" in kv else "dflash"
        block = _number(kv, f"{prefix}.block_size", 16) if kind != "eagle3" else 0
        n = _layers(kv, prefix)
        window = _number(kv, f"{prefix}.attention.sliding_window", 0)
        sliding = kv.get(f"{prefix}.attention.sliding_window_pattern") or [False] * n
        head = _number(kv, f"{prefix}.attention.key_length", 128)
        row_bytes = 2 * SHORT * int(_list(kv, f"{prefix}.attention.head_count_kv", n)[0]) * head
        full = sum(not s for s in sliding) if window else n
        draft = replace(
            draft,
            kind=kind,
            engines=("g4spec",) if arch.endswith(REFUSED_SUFFIX) else (),
            block=block,
            head=head,
            causal=kind == "eagle3",
            kv_token=full * row_bytes,
            kv_fixed=(n - full) * window * row_bytes,
            vllm_n=block if own_head else max(block - 1, 0),
            sglang_n=block,
            llamacpp_n=EAGLE3_LENGTH if kind == "eagle3" else max(block - 1, 0),
        )
        return _with_row(draft, _row(facts, kind, "redhat" if own_head else "zlab", of.size))


def _new_draft(path: Path, given: str, of: TargetModel, nbytes: int, gguf: bool) -> DraftModel:
    return DraftModel(
        title=path.name,
        kind="",
        given=given,
        hub="",
        ids=(),
        model=of.size,
        nbytes=nbytes,
        gguf_bytes=nbytes if gguf else 0,
        is_gguf=gguf,
        is_local=True,
    )


def _with_row(made: DraftModel, row: DraftFact | None) -> DraftModel:
    """Fill in what the file does not say from the row of the similar published draft."""
    if row is None:
        return made
    return replace(
        made,
        ids=(row.id,),
        hub=row.hub,
        accepted=row.accepted,
        maker=row.maker,
        title=f"{made.title} (like {row.name})",
        vllm_n=made.vllm_n or row.vllm_n,
        sglang_n=made.sglang_n or row.sglang_n,
        llamacpp_n=made.llamacpp_n or row.llamacpp_n,
        head=made.head or row.head,
    )


# ---- checkpoint folders


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(regular_files.read_regular(path))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: not a checkpoint",
            expected="a config.json in it",
            fix=folder_hint(folder),
        ) from None
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path}: not JSON ({problem})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: not a JSON object")
    return raw


def _weights(folder: Path, pattern: str = "*.safetensors") -> int:
    return sum(p.stat().st_size for p in folder.glob(pattern))


def _integer(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = text.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"config.json: {key}", expected="a number", found=value)
    return value


def folder_caches(text: Mapping[str, Any]) -> tuple[CacheShape, ...]:
    """Return the cache shapes of a Gemma 4 text configuration."""
    types = text.get("layer_types")
    if not isinstance(types, list):
        raise InputError("config.json: layer_types", expected="a list", found=types)
    shared = text.get("num_kv_shared_layers") or 0
    heads = _integer(text, "num_key_value_heads")
    full_heads = text.get("num_global_key_value_heads") or heads
    head = _integer(text, "head_dim", named_models.HEAD_SLIDING)
    full_head = text.get("global_head_dim") or named_models.HEAD_FULL
    window = _integer(text, "sliding_window", 1024)
    # transformers writes what differs from layer to layer under per_layer_config when it saves.
    per_layer = {int(k): v for k, v in (text.get("per_layer_config") or {}).items()}
    out = []
    for i, kind in enumerate(types[: len(types) - int(shared)]):
        full, mine = kind == "full_attention", per_layer.get(i, {})
        n = mine.get("num_key_value_heads", full_heads if full else heads)
        size = mine.get("head_dim", full_head if full else head)
        out.append(CacheShape(int(n), int(size), None if full else window))
    return tuple(out)


def _folder_format(raw: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the name of the weight format, and notes about it."""
    quant = raw.get("quantization_config")
    if not isinstance(quant, dict):
        return str(raw.get("dtype") or raw.get("torch_dtype") or "BF16").upper(), ()
    name = " ".join(str(quant.get(k)) for k in ("quant_method", "format", "bits") if quant.get(k))
    notes: tuple[str, ...] = ()
    if quant.get("kv_cache_scheme"):
        notes = (
            "its configuration asks for an fp8 cache (kv_cache_scheme), which crashes a "
            "DFlash draft on capability 8.9: pass --kv-cache-dtype bfloat16",
        )
    return name or "quantized", notes


def _is_target(architecture: str) -> bool:
    return "Gemma4For" in architecture


def _folder_target(facts: Facts, folder: Path, given: str) -> TargetModel:
    raw = _config(folder)
    text = raw.get("text_config") or raw
    if not any(_is_target(str(a)) for a in raw.get("architectures") or ()):
        raise InputError(
            f"{folder}: not a Gemma 4 target",
            expected="Gemma4ForConditionalGeneration",
            found=raw.get("architectures"),
            fix="give a draft with -md, and its target with -m",
        )
    hidden = _integer(text, "hidden_size")
    size = _size_like(facts, hidden, len(text.get("layer_types") or ()))
    name, notes = _folder_format(raw)
    return TargetModel(
        title=f"{folder.name} (Gemma 4 {size.name if size else 'of another size'})",
        size=size.id if size else "other",
        given=given,
        formats=(WeightFormat(name, _weights(folder), ENGINES),),
        caches=folder_caches(text),
        context=_integer(text, "max_position_embeddings", 131072),
        hub=size.hub if size else "",
        active=size.active / size.params if size else 1.0,
        moe=bool(text.get("enable_moe_block")),
        is_local=True,
        notes=notes,
    )


def _folder_draft(facts: Facts, folder: Path, given: str, of: TargetModel) -> DraftModel:
    raw = _config(folder)
    draft = _new_draft(folder, given, of, _weights(folder), gguf=False)
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and draft.nbytes:
        draft = replace(
            draft,
            gguf_bytes=ggufs[0].stat().st_size,
            notes=(
                f"{folder.name} holds {ggufs[0].name} and safetensors of "
                f"{draft.nbytes / 1e9:.2f} GB: name the file that you mean, loaders may take the "
                "larger one",
            ),
        )
    claimed = [name for name, m in models.kinds().items() if m.claims(Checkpoint(raw, {}))]
    if "gemma4" in claimed:
        raise models.wrong_role(folder, models.kinds()["gemma4"])
    if not claimed:
        found = raw.get("speculators_model_type") or raw.get("architectures")
        raise InputError(
            f"{folder}: not a draft that g4spec knows",
            found=found,
            expected="a DFlash, DFlash2, DSpark or EAGLE-3 draft or a Gemma 4 assistant",
        )
    _check_sizes(facts, folder, pairing.checkpoint_sizes(raw), of, trained=True)
    if "gemma4-assistant" in claimed:
        return _with_row(
            replace(draft, kind="mtp", head=512), _row(facts, "mtp", "google", of.size)
        )
    kind, nested = claimed[0], "speculators_model_type" in raw
    inner = {} if nested else raw.get("dflash_config") or {}
    block = int(inner.get("block_size") or raw.get("block_size") or (16 if inner else 0))
    n = max(block - (kind != "dspark"), 0)
    if nested:
        methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
        n = int(methods[0].get("speculative_tokens") or 0)
    layer = (raw.get("transformer_layer_config") or {}) if nested else raw
    window = 0
    if inner.get("use_swa"):  # a window for all layers
        window = int(inner.get("swa_window_size") or raw.get("sliding_window") or 0)
    draft = _block_draft(draft, layer, block, n, window)
    draft = replace(draft, kind=kind, causal=kind == "eagle3")
    if kind == "eagle3":
        draft = replace(draft, llamacpp_n=EAGLE3_LENGTH)
    target = Path(of.given) if of.is_local else facts.find(SizeFact, of.size)
    if target is not None and runtime_support.refused_upstream(folder, target):
        draft = replace(draft, engines=("vllm", "sglang", "g4spec"))
    return _with_row(draft, _row(facts, kind, "redhat" if nested else "zlab", of.size))


def _block_draft(
    draft: DraftModel, layer: Mapping[str, Any], block: int, n: int, window: int
) -> DraftModel:
    """Fill in draft lengths and cache sizes from the draft's own layer configuration. `window`:
    that of all layers; 0: each layer's own."""
    if "global_head_dim" in layer:
        shapes = folder_caches(layer)
    else:
        heads = int(layer.get("num_key_value_heads") or layer.get("num_attention_heads") or 0)
        head = int(layer.get("head_dim") or 128)
        own = layer.get("sliding_window") if layer.get("use_sliding_window") else None
        count = int(layer.get("num_hidden_layers") or 0)
        if not 0 <= count <= MAX_LAYERS:
            raise InputError("config.json: layers", expected=f"0 to {MAX_LAYERS}", found=count)
        types = [*(layer.get("layer_types") or []), *[None] * count][:count]
        slides = (own if t == "sliding_attention" else None for t in types)
        shapes = tuple(CacheShape(heads, head, w or None) for w in slides)
    rows = [(window or c.window, 2 * SHORT * c.n_kv * c.head_dim) for c in shapes]
    return replace(
        draft,
        block=block,
        head=max((c.head_dim for c in shapes), default=0),
        vllm_n=n,
        sglang_n=block,
        llamacpp_n=max(block - 1, 0),
        kv_token=sum(size for w, size in rows if w is None),
        kv_fixed=sum(size * w for w, size in rows if w is not None),
    )
