"""Response fields that several APIs share: usage, timings, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from g4spec import __version__
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.fields import StreamOptions
from g4spec.server.generation import Token
from g4spec.server.service import Generation, Text


def usage(generation: Generation) -> dict[str, Any]:
    """Return OpenAI's `usage` of a finished generation; it does not depend on the draft."""
    texts = generation.texts
    prompt = sum(map(len, generation.job.prompts))
    completion = sum(text.request.stats.tokens for text in texts)
    cached = sum(text.request.stats.cached_tokens for text in texts[:: generation.job.n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(text.assembler.thoughts for text in texts)
        },
    }


def chunk_usage(options: StreamOptions | None, text: Text) -> dict[str, Any]:
    """Return the field `usage` of a chunk: null, or with vLLM's `continuous_usage_stats` the tokens
    of its text so far; nothing without `include_usage`."""
    if options is None or not options.include_usage:
        return {}
    if not options.continuous_usage_stats:
        return {"usage": None}
    prompt, completion = len(text.request.prompt), text.request.stats.tokens
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"usage": {**counts, "total_tokens": prompt + completion}}


def timings(text: Text, read: int | None = None) -> dict[str, Any]:
    """Return llama.cpp's `timings` of a text, with drafted and accepted token counts.

    Args:
        read: prompt tokens processed at the time of the event; default: those processed so far.
    """
    stats = text.request.stats
    read = (stats.read_tokens if read is None else read) - stats.cached_tokens
    per = {
        "prompt": (read, stats.prefill_seconds if read else 0.0),
        "predicted": (stats.tokens, stats.seconds),
    }
    out: dict[str, Any] = {"cache_n": stats.cached_tokens}
    for name, (count, seconds) in per.items():
        timed = count - 1 if name == "predicted" else count  # prefill computes the first one
        out |= {
            f"{name}_n": count,
            f"{name}_ms": seconds * 1000,
            f"{name}_per_token_ms": seconds * 1000 / timed if timed > 0 else 0.0,
            f"{name}_per_second": timed / seconds if timed > 0 and seconds else 0.0,
        }
    out |= {
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "draft_ms": stats.draft_seconds * 1000,
        "queue_ms": stats.queue_seconds * 1000,
    }
    drafted, accepted = _by_position([text])
    if drafted:
        out |= {"draft_n_per_pos": drafted, "draft_n_accepted_per_pos": accepted}
    return out | ({"notes": text.request.notes} if text.request.notes else {})


def timings_of_one(texts: Sequence[Text]) -> dict[str, Any]:
    """Return the field `timings` of a response with one text; nothing with several."""
    return {"timings": timings(texts[0])} if len(texts) == 1 else {}


def _by_position(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Return how many tokens were drafted and accepted at each position, over all texts; without
    the positions after the longest draft."""
    stats = [text.request.stats for text in texts]
    drafted = [sum(n) for n in zip(*(s.drafted_by_position for s in stats), strict=True)]
    accepted = [sum(n) for n in zip(*(s.accepted_by_position for s in stats), strict=True)]
    used = len(drafted) - drafted.count(0)  # a draft has no gaps
    return drafted[:used], accepted[:used]


def speculation_header(generation: Generation) -> dict[str, str]:
    """Return the header `x-speculation` of a complete response: the drafting figures of all its
    texts, as a dictionary of RFC 9651. Streams, whose headers are sent first, have `timings`."""
    drafted, accepted = _by_position(generation.texts)
    stats = [text.request.stats for text in generation.texts]
    figures = {
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "drafted_per_pos": f"({' '.join(map(str, drafted))})",
        "accepted_per_pos": f"({' '.join(map(str, accepted))})",
        "draft_ms": f"{sum(s.draft_seconds for s in stats) * 1000:.3f}",
        "predicted_ms": f"{sum(s.seconds for s in stats) * 1000:.3f}",
    }
    return {"x-speculation": ", ".join(f"{name}={value}" for name, value in figures.items())}


def progress(text: Text, read: int) -> dict[str, Any]:
    """Return llama.cpp's `prompt_progress` after `read` prompt tokens."""
    stats = text.request.stats
    return {
        "total": stats.prompt_tokens,
        "cache": stats.cached_tokens,
        "processed": read,
        "time_ms": int(stats.prefill_seconds * 1000),
    }


SYSTEM_FINGERPRINT = f"build-g4spec-{__version__}"
"""OpenAI's `system_fingerprint`. Answers depend only on the version and the model files."""


def chat_logprob(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    """Return one entry of OpenAI's `logprobs.content`."""
    piece = tokenizer.piece(id, special=True)
    return {
        "token": piece.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Return OpenAI's `logprobs.content`."""
    return [
        {
            **chat_logprob(tokenizer, t.id, t.logprob),
            "top_logprobs": [chat_logprob(tokenizer, i, value) for i, value in t.top],
        }
        for t in tokens
    ]


def finite(logprob: float) -> float:
    """Replace -inf by -9999: JSON has no infinity."""
    return logprob if math.isfinite(logprob) else -9999.0


class CompletionLogprobs:
    """Builds the `logprobs` objects of /v1/completions for one text, part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._text, self._offset = tokenizer, tokenizer.stream(), 0

    def of(
        self, tokens: Sequence[Token], *, first: int | None = None, echo: str | None = None
    ) -> dict[str, list[Any]]:
        """Return the object of the next tokens.

        `text_offset` is the number of characters that are complete before each token, and
        `top_logprobs` has the token besides the most likely ones.

        Args:
            first: the first token of a prompt, which has no log-probability; it precedes `tokens`.
            echo: the prompt if it is a text, whose control tokens are part of it.
        """
        begin = [] if first is None else [first]
        text = self._text if echo is None else self._tokenizer.stream(special=True)
        starts = []
        for id in [*begin, *(t.id for t in tokens)]:
            starts.append(self._offset)
            if echo is None or starts[1:] or echo.startswith(self._name(id)):  # else an added BOS
                self._offset += len(text.push([id]))
        self._offset = self._offset if echo is None else len(echo)
        tops = [dict([*t.top, (t.id, t.logprob)]) for t in tokens]
        return {
            "tokens": [self._name(id) for id in [*begin, *(t.id for t in tokens)]],
            "token_logprobs": [*(None for _ in begin), *(finite(t.logprob) for t in tokens)],
            "top_logprobs": [
                *(None for _ in begin),
                *({self._name(i): finite(value) for i, value in top.items()} for top in tops),
            ],
            "text_offset": starts,
        }

    def _name(self, id: int) -> str:
        """Return the text of a token; for a part of a character, its bytes as OpenAI writes them:
        `bytes:\\xf0\\x9f`."""
        piece = self._tokenizer.piece(id, special=True)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
