"""Ask g4spec's own runtime what it makes of a file."""

from __future__ import annotations

from types import ModuleType

from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF


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
