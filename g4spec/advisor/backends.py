"""Decides which attention backends of an engine can run Gemma 4 and its drafts on one card."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.facts import Facts
from g4spec.advisor.named_models import DraftModel
from g4spec.advisor.schema import CapabilityFact
from g4spec.advisor.software_facts import BackendFact, ReleaseFact
from g4spec.advisor.versions import holds, parse

KIB = 1024
WIDE = 512
"""Head size of the target's global attention layers."""


@dataclass(frozen=True, slots=True)
class BackendVerdict:
    """The verdict on one attention backend for one card.

    Attributes:
        heads: supported head sizes among 128, 256 and 512.
        target: True if it can run the whole target (head sizes 256 and 512, sliding window).
        draft: True if it can run a non-causal draft; None if unknown.
        sliding: "yes", "no", "condition" or "unknown": support for sliding windows.
        kv: cache types available on this card.
        why: reasons for everything it cannot run. `fix`: what to do about it.
        fact: id of the backend's row.
    """

    name: str
    heads: tuple[int, ...]
    target: bool
    draft: bool | None
    sliding: str
    kv: tuple[str, ...]
    why: str
    fix: str
    fact: str


def _kv(backend: BackendFact, cc: tuple[int, int]) -> tuple[str, ...]:
    """Return the cache types that the card supports."""
    limits = {}
    for entry in backend.kv_min:
        kind, _, least = entry.partition(">=")
        limits[kind] = parse(least)
    return tuple(k for k in backend.kv if cc >= limits.get(k, (0,)))


def shared_memory(facts: Facts, cc: tuple[int, int]) -> int | None:
    """Return the opt-in shared memory per thread block in bytes; None for an unknown capability."""
    name = f"{cc[0]}.{cc[1]}"
    found = next((c for c in facts.all(CapabilityFact) if name in c.cc), None)
    return found.smem_block * KIB if found is not None else None


def backend_names(facts: Facts) -> list[str]:
    """Return vLLM's names for its backends, without the generation in parentheses."""
    names = [
        b.name.split(" (")[0].split(", ") for b in facts.all(BackendFact) if b.engine == "vllm"
    ]
    return sorted({name for group in names for name in group})


def judge_backends(
    facts: Facts, engine: str, version: str, cc: tuple[int, int]
) -> list[BackendVerdict]:
    """Return a verdict on every backend of that engine version for compute capability `cc`."""
    out = []
    for b in facts.all(BackendFact):
        if b.engine != engine or not holds(b.versions, parse(version)):
            continue
        if not holds(b.cc, cc):
            continue
        out.append(_judge(facts, b, cc))
    return out


def _judge(facts: Facts, b: BackendFact, cc: tuple[int, int]) -> BackendVerdict:
    reasons = []
    heads = b.heads
    memory = shared_memory(facts, cc)
    if b.smem and memory is not None and memory < b.smem:
        heads = tuple(h for h in heads if h < WIDE)
        reasons.append(
            f"head size 512 needs {b.smem:,} bytes of shared memory per block, "
            f"this GPU has {memory:,}"
        )
    elif WIDE not in heads and b.head_why:
        reasons.append(f"head size 512: {b.head_why}")
    if b.noncausal == "no":
        reasons.append(f"non-causal: {b.noncausal_why or 'not supported'}")
    elif b.noncausal == "unknown":
        reasons.append(f"non-causal: {b.noncausal_why or 'unknown'}")
    kv = _kv(b, cc)
    for missing in sorted(set(b.kv) - set(kv)):
        least = next(e.partition(">=")[2] for e in b.kv_min if e.startswith(missing + ">="))
        reasons.append(f"{missing} cache: needs capability {least}")
    target = WIDE in heads and 256 in heads and b.sliding == "yes"
    draft = {"yes": True, "no": False}.get(b.noncausal)
    fix = b.fix
    if kv != b.kv and WIDE in heads and b.noncausal == "yes":
        fix = "a bf16 cache"
    why = "; ".join(reasons)
    return BackendVerdict(
        b.name, heads, target, draft, b.sliding, kv, why, fix if why else "", b.id
    )


def find_release(facts: Facts, version: str) -> ReleaseFact | None:
    """Return the row of the upgrade table for a vLLM version, or None."""
    return next((r for r in facts.all(ReleaseFact) if holds(r.versions, parse(version))), None)


def default_backends(
    facts: Facts, version: str, cc: tuple[int, int], draft: DraftModel | None
) -> tuple[str, str]:
    """Return the backends that vLLM selects by default for target and draft; "" if none fits."""
    row = find_release(facts, version)
    if row is None:
        return "", ""
    hopper = (9, 0) <= cc < (10, 0)
    target = row.target_hopper if hopper else row.target_triton
    if (10, 0) <= cc < (11, 0) and parse(version) >= (0, 24):
        target = "FLASHINFER"
    if draft is None:
        return target, ""
    if draft.kind == "mtp":
        return target, target.split(" ")[0] if row.mtp != "no" else ""
    return target, row.dflash_backend
