"""Limits and defaults of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from g4spec.ops.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and defaults of a server.

    Attributes:
        model: name of the model.
        aliases: other names that requests may use for it.
        tags: tags of the model, shown by /v1/models.
        queue: maximum number of waiting texts; more are rejected with 429.
        max_texts: maximum number of texts per request (`n` times prompts).
        time_limit: seconds after which a request is aborted.
        stall_limit: seconds without a finished step after which /health is 503.
        ping: seconds between SSE comments on an idle stream.
        send_limit: seconds that a client may take to accept a chunk of a stream.
        sampler: default sampling parameters.
        seed: default seed; None: random for each request.
        n_predict: default limit of new tokens; None: the rest of the context.
        draft_max: default of the maximum draft length.
        reasoning: default of reasoning; None: on if the chat template has it.
        prefill_assistant: continue the last message of a chat if it is the assistant's.
        sleep_seconds: seconds without requests after which the engine sleeps; None: never.
    """

    model: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    queue: int = 64
    max_texts: int = 128
    time_limit: float = 600.0
    stall_limit: float = 60.0
    ping: float = 15.0
    send_limit: float = 60.0
    sampler: Sampler = field(default_factory=lambda: Sampler(temperature=1.0))
    seed: int | None = None
    n_predict: int | None = None
    draft_max: int | Literal["auto"] = "auto"
    reasoning: bool | None = False
    prefill_assistant: bool = False
    sleep_seconds: float | None = None
