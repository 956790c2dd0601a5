"""Convert the sampling fields of a request to engine options."""

from __future__ import annotations

import math
import re
import secrets
from typing import Any

from g4spec.ops.sampling import Sampler
from g4spec.runtime.request import Options
from g4spec.server.fields import OpenAI, Sampling
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Service

MAX_STOPS = 16
"""Maximum number of stop strings per request."""


def sampler(service: Service, fields: Sampling, *, banned: tuple[int, ...] = ()) -> Sampler:
    """Return the sampler of a request; missing fields take the server's defaults, as does the
    seed -1.

    Args:
        banned: token ids that are never sampled.
    """
    default = service.settings.sampler
    n_vocab = service.engine.config.n_vocab
    bias: dict[int, float] = {}
    for key, value in (fields.logit_bias or {}).items():
        if not re.fullmatch("[0-9]{1,12}", key) or int(key) >= n_vocab:
            raise RequestError(
                400,
                f"logit_bias: expected token ids from 0 to {n_vocab - 1}, found {key!r:.60}",
                param="logit_bias",
            )
        bias[int(key)] = value
    bias |= dict.fromkeys(banned, -math.inf)
    seed = service.settings.seed if fields.seed in (None, -1) else fields.seed
    top_k = _or(fields.top_k, default.top_k)
    return Sampler(
        temperature=_or(fields.temperature, default.temperature),
        top_k=max(top_k, 0),
        top_p=max(
            _or(fields.top_p, default.top_p), 1e-9
        ),  # 0 means the single best token, as 1e-9 does
        min_p=_or(fields.min_p, default.min_p),
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        logit_bias=tuple(sorted(bias.items())),
        repetition_penalty=_or(fields.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(fields.frequency_penalty, default.frequency_penalty),
        top_n_sigma=max(_or(fields.top_n_sigma, default.top_n_sigma), 0),
    )


def options(
    service: Service,
    fields: Sampling,
    n_predict: int,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    banned: tuple[int, ...] = (),
) -> Options:
    """Return the engine options of a request.

    Args:
        n_predict: maximum number of new tokens.
        logprobs, prompt_logprobs: see `Options`.
    """
    stops = fields.stop if isinstance(fields.stop, list) else [fields.stop or ""]
    stops = [stop for stop in stops if stop]
    if len(stops) > MAX_STOPS:
        raise RequestError(
            400, f"stop: expected at most {MAX_STOPS} texts, found {len(stops)}", param="stop"
        )
    return Options(
        n_predict,
        sampler(service, fields, banned=banned),
        service.settings.draft_max if fields.draft_max is None else fields.draft_max,
        tuple(stops),
        bool(fields.ignore_eos),
        logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def count(service: Service, fields: OpenAI) -> int:
    """Return `n` of a request; raise RequestError if it is too large."""
    n = fields.n or 1
    check_n_texts(service, n, "n")
    return n


def check_n_texts(service: Service, count: int, param: str) -> None:
    """Raise RequestError if a request has too many texts; `param` is named in the error."""
    if count > service.settings.max_texts:
        raise RequestError(
            400,
            f"{param}: at most {service.settings.max_texts} texts per request, found {count}",
            param=param,
        )


def room(service: Service, prompt: list[int]) -> int:
    """Return the default limit of new tokens after a prompt."""
    left = max(1, service.engine.n_ctx - len(prompt))
    return min(left, service.settings.n_predict or left)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
