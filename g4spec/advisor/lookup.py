"""Resolves -m and -md: a file, a folder, a hub id, or a short name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from g4spec import quant
from g4spec.advisor import model_files, runtime_support
from g4spec.advisor.facts import Facts
from g4spec.advisor.memory_needs import GGUF, NGRAM
from g4spec.advisor.named_models import (
    DraftModel,
    TargetModel,
    WeightFormat,
    find_size,
    from_row,
    named_target,
)
from g4spec.advisor.schema import DraftFact, SizeFact, WeightsFact
from g4spec.convert.hub_id import HubId
from g4spec.errors import InputError, UsageError, did_you_mean, similar_files
from g4spec.gguf.parts import has_suffix
from g4spec.quant import policy

QAT = "qat"
"""Part of the names of files from quantization-aware training."""


def find_target(facts: Facts, text: str) -> TargetModel:
    """Return the target that -m names; raise UsageError for an unknown name."""
    given = os.path.expanduser(text)  # accepts unknown user names
    path = Path(given)
    if path.exists():
        return model_files.read_target(facts, path, given)
    id = HubId.parse(text)
    if has_suffix(text) and (id is None or id.file is None):
        raise _missing(path, "a size such as 31b or 31b:q4_k_m")
    name, _, wanted = text.partition(":")
    name = name.partition("@")[0]
    if has_suffix(wanted):
        wanted = type_of(wanted) or wanted[: -len(".gguf")]
    size = find_size(facts, name)
    if size is None:
        sizes = ", ".join(s.id for s in facts.all(SizeFact))
        raise UsageError(
            f"-m {text!r}: not a file, and not a Gemma 4 size",
            found=text,
            expected=f"a GGUF file, a checkpoint folder, a known hub id, or one of {sizes}, "
            "with a quant type if you like, as 31b:q4_k_m",
        )
    whole = named_target(facts, size, text)
    rest = wanted or (name if name.lower() not in (size.id, *size.aliases) else "")
    if wanted and "/" in name and QAT in text.lower():
        rest = f"{QAT}-{wanted}"
    formats = _named_formats(whole, rest, facts) if rest else whole.formats
    notes: tuple[str, ...] = ()
    if wanted and len(formats) == len(whole.formats):
        formats = (estimated(size, wanted, whole),)
        notes = (
            f"{formats[0].format}: no file of this size is in the data; "
            f"{formats[0].nbytes / 1e9:.1f} GB are computed, files differ by a few per cent; check "
            f"that {formats[0].gguf.rpartition(':')[0]} has this type",
        )
    elif rest and len(formats) == len(whole.formats):
        notes = (f"the name {name} does not say its weight format; every format is considered",)
    gguf = "/" in name and "gguf" in text.lower()
    if gguf:
        formats = tuple(o for o in formats if set(GGUF) & set(o.engines)) or formats
    where = name if "/" in name and not gguf else size.hub
    if len(formats) == 1 and formats[0].hub:
        where = formats[0].hub
    return TargetModel(
        whole.title,
        whole.size,
        text,
        formats,
        whole.caches,
        whole.context,
        where,
        whole.active,
        whole.moe,
        notes=notes,
        gguf_hub=text if gguf else "",
    )


def type_of(name: str) -> str:
    """Return the quant type that a file name contains, as Q4_K_M or Q4_K_XL; "" if none."""
    words = [w for w in re.split(r"[-./]", name) if runtime_support.base_type(w)]
    return words[-1].upper() if words else ""


def estimated(size: SizeFact, wanted: str, whole: TargetModel) -> WeightFormat:
    """Estimate the size of a weight format that no known file has, as `g4spec quantize` would write
    it, or from its bits per weight. Raise UsageError for a type that the runtime does not know
    either."""
    low = wanted.lower().removeprefix("ud-")
    base = runtime_support.base_type(low)
    if not base:
        known = [o.format.lower().replace(" ", "-") for o in whole.formats]
        types = dict.fromkeys([*known, *policy.names(), *quant.readable()])
        similar = [f"{size.id}:{name}" for name in known if low in name][:3]
        raise UsageError(
            f"-m {size.id}:{wanted}: unknown quant type {wanted}",
            expected=f"one of {', '.join(types)}",
            fix=f"did you mean {' or '.join(similar)}?" if similar else did_you_mean(low, types),
        )
    form = quant.get(base)
    nbytes = int(size.params * 1e9 * form.block_bytes / form.block)
    if low in policy.names():
        nbytes = runtime_support.file_bytes(size, low) or nbytes
    gguf = next(o.gguf for o in whole.formats if o.gguf).rpartition(":")[0]
    return WeightFormat(
        wanted.upper(),
        nbytes,
        GGUF,
        own=runtime_support.gpu_bytes(wanted, nbytes),
        gguf=f"{gguf}:{wanted.upper()}",
    )


def draft_names(row: DraftFact) -> tuple[str, ...]:
    """Return the names of a published draft for -md, the shortest common one first."""
    return tuple(dict.fromkeys((*row.aliases, row.id)))


def ngram_lookup(of: TargetModel) -> DraftModel:
    """Return n-gram lookup as a draft of a target: it has no file and takes no GPU memory."""
    return DraftModel("n-gram lookup", NGRAM, NGRAM, "", (), of.size, 0, 0)


def _row_of(facts: Facts, text: str, size: str) -> DraftFact | None:
    low = text.lower()
    rows = [d for d in facts.all(DraftFact) if d.model == size]
    for row in rows:
        if low in (row.id, row.hub.lower(), row.hub.lower().split("/")[-1], *row.aliases):
            return row
    return next((r for r in rows if r.hub.lower().split("/")[-1] in low), None)


def _missing(path: Path, instead: str) -> InputError:
    """Return the error for a GGUF file that does not exist; names a similar file beside it."""
    fix = similar_files(path) or f"check the path, or name {instead}"
    return InputError(f"{path}: no such file", fix=fix)


def find_draft(facts: Facts, text: str, of: TargetModel) -> DraftModel:
    """Return the draft that -md names for a target; raise UsageError for an unknown name."""
    given = os.path.expanduser(text)  # accepts unknown user names
    path = Path(given)
    if path.exists():
        return model_files.read_draft(facts, path, given, of)
    if text.lower() == NGRAM:
        return ngram_lookup(of)
    if has_suffix(text):
        raise _missing(path, "a published draft such as mtp")
    row = _row_of(facts, text, of.size)
    if row is not None:
        return from_row(row, text)
    others = [
        d
        for d in facts.all(DraftFact)
        if text.lower() in (d.id, d.hub.lower(), d.hub.lower().split("/")[-1], *d.aliases)
    ]
    rows = [d for d in facts.all(DraftFact) if d.model == of.size]
    names = [*(name for d in rows for name in draft_names(d)), NGRAM]
    known = ", ".join([*(draft_names(d)[0] for d in rows), NGRAM])
    whose = of.title if of.size == "other" else f"the {of.size}"
    if others:
        raise UsageError(
            f"-md {text!r} is a draft for {' and '.join(f'the {d.model} ({d.id})' for d in others)}"
            f", not for {whose}",
            expected=f"a file, a folder, or one of {known}",
            fix=f"ask about it with -m {others[0].model}",
        )
    raise UsageError(
        f"-md {text!r}: not a file, and not a draft known for {whose}",
        expected=f"a GGUF file, a checkpoint folder, a known hub id, or one of {known}",
        fix=did_you_mean(text, [draft_names(d)[0] for d in rows]) or did_you_mean(text, names),
    )


def _named_formats(target: TargetModel, text: str, facts: Facts) -> tuple[WeightFormat, ...]:
    """Return the formats of a size that a name mentions; all if it mentions none."""
    low = text.lower().replace("_", "-")
    by_hub = tuple(o for o in target.formats if o.hub and o.hub.lower() == text.lower())
    if by_hub:
        return by_hub
    rows = {w.id: w for w in facts.all(WeightsFact)}
    hits: list[tuple[int, WeightFormat]] = []
    for option in target.formats:
        if "/" in target.given and option.format.lower().startswith(QAT) and QAT not in low:
            continue
        parts = [n.replace("_", "-") for n in rows[option.fact].names]
        longest = max((len(p) for p in parts if _names_type(low, p)), default=0)
        if longest:
            hits.append((longest, option))
    if hits:
        best = max(n for n, _ in hits)
        return tuple(o for n, o in hits if n == best)
    if "/" in text and "gguf" not in low:  # a checkpoint whose name says nothing is in BF16
        return tuple(o for o in target.formats if o.format == "BF16")
    return target.formats


def _names_type(name: str, part: str) -> bool:
    """Return True if a name contains a type, not one with another suffix: Q4_K_S is not Q4_K."""
    suffix = r"-(xxs|xs|s|m|l|xl)(?![a-z0-9])"
    return re.search(rf"{re.escape(part)}(?!{suffix})", name) is not None
