"""Refusals: a status and one sentence."""

from __future__ import annotations

from typing import Any

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.ops.sampling import NotFinite

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
         405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error",
         429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip


ANTHROPIC = {**TYPES, 413: "request_too_large"}
"""Types of errors in Anthropic's API, which has `api_error` for others."""


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP. param: the field that is to blame. code: a word for programs.
        retry_after: seconds after which it may be worth another try.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: G4Error) -> Refused:
        """Convert an error of the engine."""
        if isinstance(error, NotFinite):
            return cls(500, str(error), code="model_error")
        if isinstance(error, EnvironmentProblem):
            return cls(503, str(error), code="unavailable")
        code = "context_length_exceeded" if "fit into the context" in error.what else None
        return cls(400, str(error), code=code)

    def json(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param,
                          "code": self.code}}  # fmt: skip

    def anthropic(self) -> dict[str, Any]:
        """Return the body as Anthropic's API has it."""
        kind = ANTHROPIC.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}
