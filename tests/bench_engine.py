"""An engine in memory for benchmark tests: random target, any draft, one token a character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from g4spec.core import Draft
from g4spec.measure.prompts import Prompt
from g4spec.models import ngram
from g4spec.runtime.engine import Engine
from g4spec.runtime.memory import MemoryPlan
from tests import memory_models


class Characters:
    """A tokenizer without a file: code points modulo the vocabulary, which starts after 10."""

    template = "yes"
    stop_ids = frozenset({1})
    suppress_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        return [2] * bos + [10 + ord(c) % (memory_models.V - 10) for c in text]

    def chat(self, messages: Sequence[Any]) -> list[int]:
        return [2, 5, *self.encode(messages[0]["content"], bos=False), 6]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        return "".join(chr(32 + i % 90) for i in ids)

    def stream(self) -> Any:
        class Stream:
            def push(_, ids: Iterable[int]) -> str:
                return self.decode(ids)

            def finish(_) -> str:
                return ""

        return Stream()


class Liar:
    """A draft that always proposes the same token."""

    name, taps, max_tokens = "liar", (), 15

    def reset(self) -> None: ...
    def commit(self, step: Any) -> None: ...
    def propose(self, anchor: int, position: int, count: int, chooser: Any) -> list[int]:
        return [3] * count


def engine(draft: Draft | None = None, n_ctx: int = 512) -> Engine:
    """A random target with `draft`, n-gram lookup by default."""
    target = memory_models.target(n_ctx=n_ctx)
    plan = MemoryPlan(n_ctx, 1 << 20, 1 << 19, 0, 0, 1 << 18)
    return Engine(target, draft or ngram.Drafter(), Characters(), plan)  # type: ignore[arg-type]


def prompts(count: int = 2) -> list[Prompt]:
    """`count` short prompts in each of two categories."""
    return [
        Prompt(f"{c}-{i}", c, f, f"{c} {i} abcabc")
        for c, f in (("code", "raw"), ("chat", "chat"))
        for i in range(count)
    ]
