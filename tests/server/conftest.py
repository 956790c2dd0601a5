"""The bundled family, converted once, and engines over it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from g4spec import convert
from g4spec.gguf import GGUF
from g4spec.runtime.engine import Engine
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server import engine_client
from tests.server import forked_engines
from tests.server.running_server import Served
from tests.support.coarse_timing import coarse_timing  # noqa: F401

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target.gguf and dflash.gguf."""
    folder = tmp_path_factory.mktemp("family")
    target = folder / "target.gguf"
    convert.convert(TINY / "target", target)
    convert.convert(TINY / "dflash", folder / "dflash.gguf", target=target)
    return folder


@pytest.fixture(scope="session")
def tokenizer(family: Path) -> Tokenizer:
    with GGUF(family / "target.gguf") as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="session")
def engines(family: Path) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes engines. They are closed at the end; the same arguments return
    the same engine."""
    made: dict[Any, Engine] = {}

    def make(draft: str | None = None, **more: Any) -> Engine:
        key = (draft, *sorted(more.items()))
        if key not in made:
            path = family / draft if draft and draft.endswith(".gguf") else draft
            made[key] = Engine.load(family / "target.gguf", path, **more)
        return made[key]

    yield make
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="session")
def plain(engines: Callable[..., Engine]) -> Iterator[Served]:
    """A server that runs one request at a time, without a draft."""
    served = Served(engines(None, n_ctx=2048))
    yield served
    served.stop()


@pytest.fixture(scope="session")
def busy(engines: Callable[..., Engine]) -> Iterator[Served]:
    """A server with three slots, a draft, a prefix cache and little memory."""
    served = Served(engines("dflash.gguf", n_ctx=2048, parallel=3, prefix_cache=64 << 20))
    yield served
    served.stop()


@pytest.fixture(autouse=True)
def repeatable_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the same ones in each run."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start engine processes without importing torch in each."""
    monkeypatch.setattr(engine_client, "start_process", forked_engines.start_process)
