"""Ask an engine in this process, by the path that a server's requests take."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from g4spec.errors import InputError
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Stats
from g4spec.server.gemma import Event, Parser, Text, Thought
from g4spec.server.generation import Assembler, Plain, Reader
from g4spec.server.live import Colours
from g4spec.server.prompt import Prompter
from g4spec.server.refusals import Refused
from g4spec.server.talk import Message, Piece, Told, coloured


class Local:
    """Answers with an engine.

    Args:
        sampler: its seed is given by each answer. n_predict: most tokens, or None for all there is
            room for. thinking: let the model think first. colours: tell where tokens come from.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        *,
        n_predict: int | None = None,
        draft_max: int | Literal["auto"] = "auto",
        thinking: bool = False,
        colours: bool = False,
    ) -> None:
        self._engine, self._sampler = engine, sampler
        self._n_predict, self._draft_max = n_predict, draft_max
        self._thinking, self._colours = thinking, colours
        self._prompter = Prompter(engine.tokenizer, engine.n_ctx)

    async def answer(
        self, messages: Sequence[Message], seed: int, told: Told
    ) -> AsyncGenerator[Piece, None]:
        """See `Voice`."""
        tokenizer, marks = self._engine.tokenizer, self._prompter.marks
        try:
            prompt = await self._prompter.chat(messages, thinking=self._thinking)
        except Refused as refused:
            raise InputError(refused.message) from None
        room = max(1, self._engine.n_ctx - len(prompt.ids))
        options = Options(
            self._n_predict or room, replace(self._sampler, seed=seed), self._draft_max
        )
        reader: Reader = Plain(tokenizer)
        special = tokenizer.control_ids
        if marks is not None:
            inside = prompt.thinking == "open"
            reader = Parser(tokenizer, marks, calls=False, thinking=inside)
            special |= {marks.channel, marks.channel_end}
        assembler, colours = Assembler(reader, special=special), Colours(tokenizer)
        request = self._engine.submit(prompt.ids, options)
        async with aclosing(request.__aiter__()) as cycles:
            async for cycle in cycles:
                delta = assembler.cycle(cycle)
                told.content += _content(delta.events)
                told.timings, told.notes = _timings(request.stats), request.notes
                pieces = _plain(delta.events)
                if self._colours:
                    told_of = colours.pieces(cycle, assembler.parts)
                    pieces = coloured(told_of, colours.rejected(cycle))
                for piece in pieces:
                    yield piece
        delta = assembler.finish(request.stats)
        told.content += _content(delta.events)
        told.finish = delta.finish or ""
        for piece in [] if self._colours else _plain(delta.events):
            yield piece

    async def close(self) -> None:
        """See `Voice`."""
        await self._prompter.close()


def _content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def _plain(events: Sequence[Event]) -> list[Piece]:
    """Turn events into pieces: there are no functions that could be called."""
    return [
        Piece(e.text, "text" if isinstance(e, Text) else "thought")
        for e in events
        if isinstance(e, Text | Thought)
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
