"""Refusals: a status and one sentence."""

from __future__ import annotations

from typing import Any

from g4spec.errors import EnvironmentProblem, G4Error, PromptTooLong
from g4spec.ops.sampling import NotFinite

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


ANTHROPIC = {**TYPES, 413: "request_too_large"}
"""Types of errors in Anthropic's API, which has `api_error` for others."""


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP. param: the field that is to blame. code: a word for programs.
        retry_after: seconds after which it may be worth another try.
        more: other fields of the error, or other values of those that all have.
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
        """Convert an error of the engine."""
        if isinstance(error, NotFinite):
            return cls(500, str(error), code="model_error")
        if isinstance(error, EnvironmentProblem):
            return cls(503, str(error), code="unavailable")
        if isinstance(error, PromptTooLong):  # as OpenAI's and llama.cpp's clients know it
            said = (
                f"the prompt does not fit: {error.found} exceeds the available context size of "
                f"{error.n_ctx} tokens"
            )
            more = {
                "type": "exceed_context_size_error",
                "n_prompt_tokens": error.tokens,
                "n_ctx": error.n_ctx,
            }
            return cls(400, said, code="context_length_exceeded", more=more)
        return cls(400, str(error))

    def json(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it."""
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
        """Return the body as Anthropic's API has it."""
        kind = ANTHROPIC.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}
