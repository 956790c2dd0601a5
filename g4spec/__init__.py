"""g4spec: convert, validate, verify and run speculative-decoding drafts for Gemma 4.

    engine = g4spec.Engine.load(Path("target.gguf"), Path("draft.gguf"))
    request = engine.generate(engine.tokenizer.encode("Hello"), g4spec.Options(n_predict=100))
    for cycle in request: ...

These names are imported on first use, and torch with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from g4spec.core import Cycle
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.engine import Engine
    from g4spec.runtime.request import Options, Request

__version__ = "0.2.0"

__all__ = ["Cycle", "Engine", "Options", "Request", "Sampler", "__version__"]

_MODULES = {
    "Cycle": "g4spec.core",
    "Engine": "g4spec.runtime.engine",
    "Options": "g4spec.runtime.request",
    "Request": "g4spec.runtime.request",
    "Sampler": "g4spec.ops.sampling",
}


if not TYPE_CHECKING:  # to a type checker every misspelt name would be an Any

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
