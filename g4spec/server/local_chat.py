"""Chat backend on an engine in this process, with the server's prompt and output parsing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from g4spec.errors import InputError
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Stats
from g4spec.server.chat_client import Message, Reply, TextPiece, with_rejected
from g4spec.server.generation import Assembler, PlainReader, Reader
from g4spec.server.live import TokenOrigins
from g4spec.server.output_parser import Event, Parser, TextEvent, ThoughtEvent, answer_text
from g4spec.server.prompt import Prompter
from g4spec.server.request_errors import RequestError


class LocalChat:
    """Chat with an engine in this process.

    Args:
        sampler: sampling parameters; each answer sets its own seed.
        n_predict: maximum number of new tokens; None: what is left of the context.
        thinking: enable reasoning.
        show_origins: label each token as accepted, corrected or the target's own.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        *,
        n_predict: int | None = None,
        draft_max: int | Literal["auto"] = "auto",
        thinking: bool = False,
        show_origins: bool = False,
    ) -> None:
        self._engine, self._sampler = engine, sampler
        self._n_predict, self._draft_max = n_predict, draft_max
        self._thinking, self._show_origins = thinking, show_origins
        self._prompter = Prompter(engine.tokenizer, engine.n_ctx)

    async def answer(
        self, messages: Sequence[Message], seed: int, reply: Reply
    ) -> AsyncGenerator[TextPiece, None]:
        """See `ChatBackend`."""
        tokenizer, marks = self._engine.tokenizer, self._prompter.marks
        try:
            prompt = await self._prompter.chat(messages, thinking=self._thinking)
        except RequestError as refused:
            raise InputError(refused.message) from None
        room = max(1, self._engine.n_ctx - len(prompt.ids))
        options = Options(
            self._n_predict or room, replace(self._sampler, seed=seed), self._draft_max
        )
        reader: Reader = PlainReader(tokenizer)
        special = tokenizer.control_ids
        if marks is not None:
            inside = prompt.thinking == "open"
            reader = Parser(tokenizer, marks, calls=False, thinking=inside)
            special |= {marks.channel, marks.channel_end}
        assembler, show_origins = Assembler(reader, special=special), TokenOrigins(tokenizer)
        request = self._engine.submit(prompt.ids, options)
        async with aclosing(request.__aiter__()) as cycles:
            async for cycle in cycles:
                delta = assembler.cycle(cycle)
                reply.content += answer_text(delta.events)
                reply.timings = _timings(request.stats)
                reply.notes = request.notes + self._engine.target.ops.kernel_notes()
                pieces = _plain(delta.events)
                if self._show_origins:
                    with_origins = show_origins.pieces(cycle, assembler.parts)
                    pieces = with_rejected(with_origins, show_origins.rejected(cycle))
                for piece in pieces:
                    yield piece
        delta = assembler.finish(request.stats)
        reply.content += answer_text(delta.events)
        reply.finish = delta.finish or ""
        for piece in [] if self._show_origins else _plain(delta.events):
            yield piece

    async def close(self) -> None:
        """See `ChatBackend`."""
        await self._prompter.close()


def _plain(events: Sequence[Event]) -> list[TextPiece]:
    """Convert text and reasoning events; no tools are declared, so there are no calls."""
    return [
        TextPiece(e.text, "text" if isinstance(e, TextEvent) else "thought")
        for e in events
        if isinstance(e, TextEvent | ThoughtEvent)
    ]


def _timings(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_n": stats.prompt_tokens - stats.cached_tokens,
        "cache_n": stats.cached_tokens,
        "predicted_n": stats.tokens,
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }
