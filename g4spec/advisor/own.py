"""Ask g4spec's own runtime what it makes of a file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from g4spec import models
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.quant import formats, readable
from g4spec.runtime.cuda.cache.cuda_kv_size import KINDS

_SLOW = (
    "g4spec has no CUDA kernels for {types} yet: on a GPU it computes these tensors with torch in "
    "float32, slowly"
)


def refusal(file: GGUF, kind: ModuleType) -> str:
    """Why the runtime cannot run a GGUF of this kind, or "": tensor types without code, or what its
    parser does not take. Other damage is for `g4spec validate`."""
    forms = {t.format for t in file.tensors.values()}
    unread = sorted(f.name.upper() for f in forms if f.decode is None and f.stored is None)
    if unread:
        return f"it has no code for tensors in {', '.join(unread)}"
    try:
        kind.parse_gguf(file.kv, file.shapes())
    except Unsupported as problem:
        return str(problem)
    except InputError:
        return ""
    return ""


def drafts() -> tuple[str, ...]:
    """List the kinds of drafts that this version runs, by the words of the facts."""
    return tuple("mtp" if name == "gemma4-assistant" else name for name in models.drafts())


def cache_types() -> tuple[str, ...]:
    """List the cache types of a GPU."""
    return tuple(KINDS)


def with_kernels() -> frozenset[str]:
    """List the tensor types that CUDA kernels know: plain ones, and those with a `.cuh` file."""
    folder = Path(formats.__file__).parent
    plain = (f.name for f in readable().values() if f.block == 1)
    return frozenset((*(path.stem for path in folder.glob("*.cuh")), *plain))


def without_kernels(file: GGUF) -> str:
    """Say which of a file's tensors a GPU runs as torch in float32, slowly, or ""."""
    forms = {t.format for t in file.tensors.values()}
    slow = sorted(f.name.upper() for f in forms if f.decode and f.name not in with_kernels())
    return _SLOW.format(types=", ".join(slow)) if slow else ""


def named(type: str) -> tuple[str, ...]:
    """Say the same of a weight format by its name: `IQ4_XS`, `Q3_K_M`."""
    low = type.lower().split("-")[-1]
    known = {low, low.rsplit("_", 1)[0]} & with_kernels()
    return () if known else (_SLOW.format(types=type),)


def mix(file: GGUF) -> str:
    """Say what a mixed file holds, as `12.3 GB Q4_K, 2.1 GB Q6_K`; "" for one of a single type."""
    held: dict[str, int] = {}
    for t in file.tensors.values():
        held[t.format.name.upper()] = held.get(t.format.name.upper(), 0) + t.nbytes
    large = [(n, name) for name, n in held.items() if n > max(held.values()) / 100]
    if len(large) < 2:
        return ""
    return "it holds " + ", ".join(f"{n / 1e9:.2f} GB {name}" for n, name in sorted(large)[::-1])
