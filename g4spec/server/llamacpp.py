"""The endpoint /completion of llama.cpp's server.

Unsupported samplers are rejected, in OpenAI's endpoints too, unless their value turns them off.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Container
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import AliasChoices, Field

from g4spec.server import completions, fields, grammar, options, response_parts
from g4spec.server.fields import Body, Json, LlamaCpp, Model, Sampling
from g4spec.server.generation import Token
from g4spec.server.output_parser import TextEvent
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.sse import Events, event

DISABLED_VALUES: dict[str, tuple[float, ...]] = {
    "typical_p": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "n_keep": (0, -1),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "min_keep": (0, 1),
    "adaptive_target": (-1,),
    "repeat_penalty": (1,),
}
"""Fields that a body without them may have, with the values that turn them off."""

IGNORED_FIELDS = (
    "repeat_last_n",
    "mirostat_tau",
    "mirostat_eta",
    "dynatemp_exponent",
    "xtc_threshold",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "n_cache_reuse",
    "adaptive_decay",
    "backend_sampling",
    "speculative.n_min",
    "speculative.p_min",
)
"""Ignored fields: parameters of unsupported samplers, and hints."""

MAX_BIAS_CHARACTERS = 1 << 16
"""Maximum length of all texts in `logit_bias` together."""


class TextPrompt(Body):
    """A prompt as an object."""

    prompt_string: str


class CompletionBody(Sampling, LlamaCpp):
    """A body of /completion."""

    prompt: str | TextPrompt | list[int | str | list[int | str] | TextPrompt]
    n_predict: int | None = Field(None, ge=-1)
    max_tokens: int | None = Field(None, ge=-1)
    stream: bool | None = None
    n_probs: int | None = Field(None, ge=0, le=100)
    post_sampling_probs: bool | None = None
    grammar: str | None = None
    json_schema: Json | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(None, ge=-1)
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    cache_prompt: bool | None = None
    model: str | None = None
    logit_bias: dict[str, Any] | list[list[Any]] | None = None  # type: ignore[assignment]
    draft_max: fields.DraftMax = Field(
        None, validation_alias=AliasChoices("draft_max", "speculative.n_max")
    )


def drop_disabled_samplers(value: Json, known: Container[str]) -> Json:
    """Remove unsupported fields that are off; raise RequestError for one that is on.

    Args:
        known: fields that the body may have.
    """
    out = {}
    for key, found in value.items():
        if key in known:
            out[key] = found
        elif key in DISABLED_VALUES:
            if found is not None and found not in DISABLED_VALUES[key]:
                wanted = " or ".join(map(str, DISABLED_VALUES[key]))
                raise RequestError(
                    400, f"{key}: only {wanted} (off) is supported; leave it out", param=key
                )
        elif key not in IGNORED_FIELDS:
            out[key] = found
    return out


def read(model: type[Model], body: bytes) -> Model:
    """Parse and validate a body like `fields.read`; accept unsupported samplers that are off."""
    known = model.model_fields
    return fields.check(model, drop_disabled_samplers(fields.parse(body), known))


async def build_job(service: Service, body: CompletionBody) -> Job:
    """Build the job of a request."""
    service.check_model(body.model)
    penalty, last = body.repeat_penalty, body.repeat_last_n
    if penalty not in (None, 1) and last not in (0, -1):
        raise RequestError(
            400,
            "repeat_penalty always covers the whole context: set repeat_last_n to -1",
            param="repeat_last_n",
        )
    if body.grammar and body.json_schema is not None:
        raise RequestError(
            400, "grammar and json_schema exclude each other; set only one", param="grammar"
        )
    wanted = None
    if body.json_schema is not None:
        answer = grammar.json_answer(body.json_schema, strict=True)
        wanted = grammar.whole_text(None, answer=answer)
    elif body.grammar:
        lark = await asyncio.to_thread(grammar.to_lark, body.grammar)
        wanted = grammar.whole_text(None, user=lark)
    if wanted is not None and body.ignore_eos:
        raise RequestError(
            400, "ignore_eos cannot be combined with a grammar; leave it out", param="ignore_eos"
        )
    first, *others = [await _prompt(service, each) for each in completions.prompts(body.prompt)]
    options.check_n_texts(service, 1 + len(others), "prompt")
    n_predict = body.n_predict if body.n_predict is not None else body.max_tokens
    room = max(options.room(service, ids) for ids in (first, *others))
    bias, banned = await asyncio.to_thread(_bias, service, body.logit_bias or {})
    if body.ignore_eos:  # in llama.cpp: stop tokens are never sampled
        banned += sorted(service.engine.stop_ids)
    changed = {
        "logit_bias": bias,
        "repetition_penalty": None if last == 0 else penalty,
    }
    job_options = options.options(
        service,
        body.model_copy(update=changed),
        room if n_predict in (None, -1) else n_predict,
        logprobs=body.n_probs or None,
        banned=tuple(banned),
    )
    job_options = replace(
        job_options,
        progress=bool(body.stream and body.return_progress),
        sampled_logprobs=bool(body.post_sampling_probs),
    )
    return Job(first, job_options, 1, wanted, live=body.live, others=tuple(others))


def _bias(
    service: Service, requested: dict[str, Any] | list[list[Any]]
) -> tuple[dict[str, float], list[int]]:
    """Return the biases by token id, and the banned ids.

    Args:
        requested: biases by token id or text; a text's bias applies to all of its tokens, and false
            bans them.
    """
    bias: dict[str, float] = {}
    banned: list[int] = []
    n_characters = 0
    for pair in requested.items() if isinstance(requested, dict) else requested:
        where, value = pair if len(pair) == 2 else (None, None)
        if isinstance(where, str):
            an_id = re.fullmatch(r"-?[0-9]{1,12}", where)
            n_characters += 0 if an_id else len(where)
            if n_characters > MAX_BIAS_CHARACTERS:
                raise RequestError(
                    400,
                    f"logit_bias: expected at most {MAX_BIAS_CHARACTERS} characters in all texts",
                    param="logit_bias",
                )
            ids = [int(where)] if an_id else service.tokenizer.encode(where, bos=False)
        else:
            ids = [where] if type(where) is int else [-1]
        number = value if isinstance(value, (int, float)) and value is not True else math.nan
        if not -100 <= number <= 100:  # integers of any size; False is 0
            raise RequestError(
                400,
                "logit_bias: expected a bias from -100 to 100 per token, or false to ban it",
                param="logit_bias",
            )
        if bad := [i for i in ids if not 0 <= i < service.engine.config.n_vocab]:
            raise RequestError(
                400, f"logit_bias: {bad[0]} is not a token id of this model", param="logit_bias"
            )
        if value is False:
            banned += ids
        else:
            bias |= dict.fromkeys(map(str, ids), float(number))
    return bias, banned


async def _prompt(service: Service, prompt: str | TextPrompt | list[Any]) -> list[int]:
    """Tokenize a prompt: a str, token ids, or a mixed list."""
    if isinstance(prompt, TextPrompt):
        prompt = prompt.prompt_string
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        return await completions.prompt_ids(service, prompt)
    if not all(isinstance(part, (int, str)) for part in prompt):
        raise RequestError(
            400,
            "prompt: expected a list of strings and token ids, or a list of prompts",
            param="prompt",
        )
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += await asyncio.to_thread(
                service.tokenizer.encode, part, bos=not ids, n_ctx=service.engine.n_ctx
            )
    return ids


def _probabilities(service: Service, tokens: list[Token], *, sampled: bool) -> list[dict[str, Any]]:
    """Return `completion_probabilities`.

    Args:
        sampled: the log-probabilities are those of `Options.sampled_logprobs`.
    """

    def entry(id: int, logprob: float) -> dict[str, Any]:
        out = {"id": id, **response_parts.chat_logprob(service.tokenizer, id, logprob)}
        if sampled:
            del out["logprob"]
            out["prob"] = math.exp(logprob)
        return out

    top = "top_probs" if sampled else "top_logprobs"
    return [
        {**entry(t.id, t.logprob), top: [entry(i, value) for i, value in t.top]} for t in tokens
    ]


def _settings(text: Text, stream: bool) -> dict[str, Any]:
    """Return `generation_settings`: the sampling parameters of a text."""
    requested = text.request.options
    sampler = requested.sampler
    bias = [
        {"token": i, "bias": value if math.isfinite(value) else None}
        for i, value in sampler.logit_bias
    ]
    return {
        **{name: values[0] for name, values in DISABLED_VALUES.items()},
        "adaptive_decay": 0.0,
        "n_predict": requested.n_predict,
        "max_tokens": requested.n_predict,
        "seed": sampler.seed,
        "temperature": sampler.temperature,
        "top_k": sampler.top_k,
        "top_p": sampler.top_p,
        "min_p": sampler.min_p,
        "top_n_sigma": sampler.top_n_sigma,
        "repeat_last_n": -1,
        "repeat_penalty": sampler.repetition_penalty,
        "presence_penalty": sampler.presence_penalty,
        "frequency_penalty": sampler.frequency_penalty,
        "stop": list(requested.stop),
        "ignore_eos": requested.ignore_eos,
        "n_probs": requested.logprobs or 0,
        "post_sampling_probs": requested.sampled_logprobs,
        "logit_bias": bias,
        "stream": stream,
        "speculative.n_max": requested.draft_max,
    }


def _piece(
    generation: Generation, text: Text, words: str, tokens: list[Token], ids: list[int]
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "index": text.index,
        "content": words,
        "tokens": ids,
        "stop": False,
        "id_slot": -1,
    }
    if tokens:
        sampled = text.request.options.sampled_logprobs
        out["completion_probabilities"] = _probabilities(
            generation.service, tokens, sampled=sampled
        )
    return out


def _last(generation: Generation, text: Text, stream: bool) -> dict[str, Any]:
    """Return the fields of the last chunk only."""
    stats = text.request.stats
    reason = stats.stop_reason
    kinds = {"stop string": "word", "length": "limit", "context": "limit"}
    service = generation.service
    full = stats.prompt_tokens + stats.tokens >= service.engine.n_ctx
    return {
        "stop": True,
        "model": service.settings.model,
        "tokens_predicted": stats.tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "tokens_cached": stats.cached_tokens,
        "generation_settings": _settings(text, stream),
        "prompt": service.tokenizer.decode(text.request.prompt, special=True),
        "truncated": reason == "context" or (reason == "length" and full),
        "stop_type": kinds.get(reason, "eos"),
        "stopping_word": text.stop or "",
        "has_new_line": "\n" in text.request.text,
        "timings": response_parts.timings(text),
    }


def _selected(answer: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """Return only the fields in `names`; `a/b` selects the nested field b of a."""
    if not names:
        return answer
    out = {}
    for name in names:
        found: Any = answer
        for part in name.split("/"):
            found = found.get(part, _selected) if isinstance(found, dict) else _selected
        if found is not _selected:
            out[name] = found
    return out


async def full_response(generation: Generation, body: CompletionBody) -> Any:
    """Return the complete response body; a list for several prompts."""
    words = [""] * len(generation.texts)
    tokens: list[list[Token]] = [[] for _ in words]
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            words[text.index] += "".join(p.text for p in delta.events if isinstance(p, TextEvent))
            tokens[text.index] += delta.tokens
    out = []
    for text in generation.texts:
        ids = list(text.request.ids) if body.return_tokens else []
        piece = _piece(generation, text, words[text.index], tokens[text.index], ids)
        whole = {**piece, **_last(generation, text, stream=False)}
        out.append(_selected(whole, body.response_fields))
    return out if completions.several(body.prompt) else out[0]


async def stream_response(generation: Generation, body: CompletionBody) -> Events:
    """Yield the response as events, without `[DONE]`, as llama.cpp does."""
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            words = "".join(p.text for p in delta.events if isinstance(p, TextEvent))
            piece = _piece(generation, text, words, delta.tokens, delta.ids)
            if body.timings_per_token:
                piece["timings"] = response_parts.timings(text, delta.progress)
            if delta.progress is not None:
                piece["prompt_progress"] = response_parts.progress(text, delta.progress)
            if delta.finish:
                piece |= _last(generation, text, stream=True)
            yield event(_selected(piece, body.response_fields))
