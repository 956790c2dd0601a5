"""Errors that a request is answered with: an HTTP status and one sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable
from typing import Any

from g4spec.errors import EnvironmentProblem, G4Error, PromptTooLong, spell
from g4spec.ops.sampling import NotFinite

log = logging.getLogger("g4spec.server")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "overloaded_error",
}

FIELDS = {
    name: name
    for name in (
        *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "n", "logprobs", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "top_n_sigma"),
        "draft_max",
    )
} | {"n_predict": "max_tokens"}
"""Parameter of the engine -> field of a request, for messages (see `g4spec.errors.spell`)."""

ANTHROPIC = {**TYPES, 413: "request_too_large"}
"""Error types of Anthropic's API by HTTP status; all others are `api_error`."""


class RequestError(Exception):
    """An error response to a request.

    Args:
        status: HTTP status.
        message: one sentence that says what is wrong and what to do.
        param: name of the invalid field.
        code: machine-readable error code.
        retry_after: value of the Retry-After header, in seconds.
        more: additional fields of the error object, which override the standard ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.more = retry_after, more or {}

    @classmethod
    def of(cls, error: G4Error) -> RequestError:
        """Convert an error raised by the engine."""
        message = spell(str(error), FIELDS)
        if isinstance(error, NotFinite):
            return cls(500, message, code="model_error")
        if isinstance(error, EnvironmentProblem):
            return cls(503, message, code="unavailable")
        if isinstance(error, PromptTooLong):  # the code of OpenAI, the type of llama.cpp
            message = (
                f"the prompt does not fit: {error.found} exceeds the available context size of "
                f"{error.n_ctx} tokens"
            )
            more = {
                "type": "exceed_context_size_error",
                "n_prompt_tokens": error.tokens,
                "n_ctx": error.n_ctx,
            }
            return cls(400, message, code="context_length_exceeded", more=more)
        name = re.match(r"`(\w+)`", error.what)
        return cls(400, message, param=FIELDS.get(name[1]) if name else None)

    def json(self) -> dict[str, Any]:
        """Return the response body in OpenAI's format."""
        kind = TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                **self.more,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """Return the response body in Anthropic's format, which has no error codes but in
        `details`: clients know by Anthropic's message that a prompt is too long."""
        kind, message = ANTHROPIC.get(self.status, "api_error"), self.message
        if self.code == "context_length_exceeded":
            sizes = self.more
            message = (
                f"prompt is too long: {sizes['n_prompt_tokens']} tokens > {sizes['n_ctx']} maximum"
            )
        error = {"type": kind, "message": message}
        if "details" in self.more:
            error["details"] = self.more["details"]
        return {"type": "error", "error": error}


INTERNAL = "internal server error; see the server's log"
"""Message of an unexpected error."""


def internal(error: BaseException) -> RequestError:
    """Log an unexpected error; return the one that the client gets (500)."""
    log.error("internal server error", exc_info=error)
    return RequestError(500, INTERNAL)


def unknown_model(name: str, known: Iterable[str]) -> RequestError:
    """Return the error for a request that names none of the served models."""
    return RequestError(
        404,
        f"the model {name!r:.80} is not served here, only {', '.join(known)}",
        param="model",
        code="model_not_found",
    )


def check_query(query: Iterable[str], known: Container[str]) -> None:
    """Raise RequestError (400) for a query parameter that is not known."""
    for name in query:
        if name not in known:
            raise RequestError(
                400,
                f"unknown query parameter {name:.80}; remove it",
                param=name,
                code="unknown_field",
            )
