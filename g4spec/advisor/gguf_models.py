"""Reads sizes and shapes of targets and drafts from the headers of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec import models
from g4spec.advisor import runtime_support
from g4spec.advisor.facts import Facts
from g4spec.advisor.like_published import (
    EAGLE3_LENGTH,
    SHORT,
    check_sizes,
    new_draft,
    published_draft,
    size_like,
    with_row,
)
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.core import CacheShape
from g4spec.errors import InputError
from g4spec.gguf import GGUF
from g4spec.models import ollama, pairing
from g4spec.models.dflash_backbone import FROM_ANCHOR
from g4spec.models.fields import MAX_LAYERS
from g4spec.models.upstream import REFUSED_SUFFIX

OLLAMA_NOTE = (
    "Ollama wrote the file: llama.cpp refuses its vision and audio, and reads its tokenizer "
    "otherwise; llama.cpp loads what `g4spec quantize` makes of it, with a loss "
    "(`--allow-requantize`) if it is quantized"
)


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


def gguf_caches(kv: Mapping[str, Any]) -> tuple[CacheShape, ...]:
    """Return the cache shapes of a gemma4 file, without layers that share an earlier cache."""
    a = "gemma4.attention."
    n = _layers(kv, "gemma4")
    heads = _list(kv, a + "head_count_kv", n)
    sliding = _list(kv, a + "sliding_window_pattern", n)
    window = _number(kv, a + "sliding_window")
    full = _number(kv, a + "key_length")
    swa = _number(kv, a + "key_length_swa", full)
    shared = _number(kv, a + "shared_kv_layers", 0)
    return tuple(
        CacheShape(int(heads[i]), swa if sliding[i] else full, window if sliding[i] else None)
        for i in range(max(0, n - shared))
    )


def read_once(file: GGUF, kv: Mapping[str, Any]) -> float:
    """Return the fraction of the weights that one token reads: no inactive experts, no per-layer
    token tables."""
    tensors = ollama.text_tensors(file)
    total = sum(t.nbytes for t in tensors.values())
    experts = sum(t.nbytes for name, t in tensors.items() if "_exps" in name)
    tables = sum(t.nbytes for name, t in tensors.items() if "per_layer_token_embd" in name)
    n, used = kv.get("gemma4.expert_count", 0), kv.get("gemma4.expert_used_count", 0)
    idle = experts * (1 - used / n) if isinstance(n, int) and n and isinstance(used, int) else 0.0
    return (total - idle - tables) / total if total else 1.0


def gguf_target(facts: Facts, path: Path, given: str) -> TargetModel:
    """Read a target from a GGUF file."""
    with GGUF(path) as file:
        arch = file.get("general.architecture")
        models.refuse_other_files(path, file)
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
        size = size_like(facts, _number(kv, "gemma4.embedding_length"), n)
        tensors = ollama.text_tensors(file).values()
        every = [t for t in tensors if len(t.shape) > 1] or [*tensors]
        large = [t for t in every if math.prod(t.shape) > 1 << 20] or every
        names = [t.format.name for t in large]
        common = max(set(names), key=names.count).upper() if names else "none"
        nbytes = sum(t.nbytes for t in tensors)
        theirs = ollama.wrote(file)
        engines = ("g4spec",) if theirs else ("llama.cpp", "g4spec")
        option = WeightFormat(common, nbytes, engines, own=runtime_support.weight_bytes(file))
        return TargetModel(
            title=f"{path.name} (Gemma 4 {size.name if size else f'with {n} layers'})",
            size=size.id if size else "other",
            given=given,
            formats=(option,),
            caches=gguf_caches(kv),
            context=_number(kv, "gemma4.context_length"),
            hub=size.hub if size else "",
            active=read_once(file, kv),
            moe=bool(kv.get("gemma4.expert_count")),
            is_gguf=True,
            is_local=True,
            refusal=runtime_support.refusal(file, models.kinds()["gemma4"]),
            notes=tuple(
                note
                for note in (
                    runtime_support.mix_note(file),
                    runtime_support.repacked_note(file),
                    OLLAMA_NOTE if theirs else "",
                )
                if note
            ),
        )


def gguf_draft(facts: Facts, path: Path, given: str, of: TargetModel) -> DraftModel:
    """Read a draft of target `of` from a GGUF file."""
    with GGUF(path) as file:
        models.refuse_other_files(path, file)
        check_sizes(facts, path, pairing.recorded_sizes(file), of)
        kv, arch = file.kv, str(file.get("general.architecture"))
        nbytes = sum(t.nbytes for t in file.tensors.values())
        own_head = "output.weight" in file.tensors
        draft = new_draft(path, given, of, nbytes, gguf=True)
        known = models.find_kind(arch, file.tensors)
        if known is not None:
            draft = replace(draft, refusal=runtime_support.refusal(file, known))
        if arch == "gemma4-assistant":
            return with_row(
                replace(draft, kind="mtp", head=512, llamacpp_n=4),
                published_draft(facts, "mtp", "google", of.size),
            )
        if arch in models.TARGETS:
            raise models.wrong_role(path, models.kinds()[arch])
        if known is None:
            drafts = [a for a in models.architectures() if a not in models.TARGETS]
            raise InputError(
                f"{path}: not a draft that engines know",
                found=arch,
                expected=f"architecture {', '.join(drafts)}",
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
        whole = kind == "dspark" and kv.get(f"{prefix}.{FROM_ANCHOR}", True)
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
            llamacpp_n=EAGLE3_LENGTH if kind == "eagle3" else max(block - (not whole), 0),
        )
        return with_row(
            draft, published_draft(facts, kind, "redhat" if own_head else "zlab", of.size)
        )
