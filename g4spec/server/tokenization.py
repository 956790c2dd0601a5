"""The endpoints of llama.cpp's server that convert texts and tokens: /tokenize, /apply-template and
others."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from g4spec.server import chat
from g4spec.server.fields import Body, ChatRequest
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Service

MAX_CHARACTERS = 4 << 20
"""Maximum length of a text for /tokenize: the library needs 120 bytes per character."""

MAX_PARTS = 1 << 16
"""Maximum number of texts and tokens that make up a text for /tokenize."""

MAX_TOKENS = 1 << 20
"""Maximum number of tokens for /detokenize."""


class TokenizeBody(Body):
    """A body of /tokenize."""

    content: str | list[str | int]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: str | None = None


class DetokenizeBody(Body):
    """A body of /detokenize."""

    tokens: list[int] = Field(max_length=MAX_TOKENS)
    model: str | None = None


def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Answer /tokenize."""
    service.check_model(body.model)
    if not body.parse_special:
        raise RequestError(
            400,
            "parse_special: only true is supported; leave it out",
            param="parse_special",
        )
    ids = _ids(service, body)
    if not body.with_pieces:
        return {"tokens": ids}
    out = []
    for i in ids:
        piece = service.tokenizer.piece(i, special=True)
        try:
            out.append({"id": i, "piece": piece.decode()})
        except UnicodeDecodeError:
            out.append({"id": i, "piece": list(piece)})
    return {"tokens": out}


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    """Return the tokens of a text, or of a list of texts and tokens, of which only the first may
    get BOS."""
    parts = [body.content] if isinstance(body.content, str) else body.content
    for n, most, what in (
        (len(parts), MAX_PARTS, "parts"),
        (
            sum(len(part) if isinstance(part, str) else 1 for part in parts),
            MAX_CHARACTERS,
            "characters",
        ),
    ):
        if n > most:
            raise RequestError(
                400, f"content: expected at most {most} {what}, found {n}", param="content"
            )
    ids = list[int]()
    for i, part in enumerate(parts):
        if isinstance(part, str):
            ids += service.tokenizer.encode(part, bos=body.add_special and i == 0)
        else:
            service.tokenizer.piece(part)  # refuses what is no token
            ids.append(part)
    return ids


async def chat_tokens(service: Service, body: ChatRequest) -> dict[str, Any]:
    """Answer /chat/completions/input_tokens."""
    service.check_model(body.model)
    prompt = await chat.build_prompt(service, body, generates=False)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Answer /detokenize."""
    service.check_model(body.model)
    return {"content": service.tokenizer.decode(body.tokens, special=True)}


async def apply_template(service: Service, body: ChatRequest) -> dict[str, Any]:
    """Answer /apply-template."""
    service.check_model(body.model)
    return {"prompt": (await chat.build_prompt(service, body, generates=False)).text}
