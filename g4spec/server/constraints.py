"""Constraints on answers, under the names of OpenAI, llama.cpp, vLLM and SGLang."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import llguidance

from g4spec.server import grammar
from g4spec.server.fields import Constraints, ResponseFormat, StructuredOutputs
from g4spec.server.request_errors import RequestError

_KINDS = {
    "response_format": "format",
    "json_schema": "lenient json",
    "grammar": "gbnf",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Fields of a request that are constraints, with the kinds of their values."""

_OUTPUTS = {
    "json_": "json",
    **{kind: kind for kind in ("regex", "choice", "grammar", "json_object")},
}
"""The same for the fields of `structured_outputs`."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Constraint on an answer.

    Attributes:
        field: path of the field that says it; empty: there is none.
        answer, user: see `grammar.whole_text`; at most one is not None.
    """

    field: str = ""
    answer: str | None = None
    user: str | None = None

    def __bool__(self) -> bool:
        return bool(self.field)


def of(request: Constraints) -> Wanted:
    """Return the constraint of a request. Large schemas and grammars take seconds.

    Raises:
        RequestError: there are several, or options that do not apply to it.
        InputError: it is invalid.
        Unsupported: it cannot be enforced exactly.
    """
    values = [(name, kind, getattr(request, name)) for name, kind in _KINDS.items()]
    outputs = request.structured_outputs
    if outputs is not None:
        values += [
            (f"structured_outputs.{kind}", kind, getattr(outputs, name))
            for name, kind in _OUTPUTS.items()
        ]
    sent = [each for each in values if not _is_none(each[2])]
    if outputs is not None and not any(name.startswith("structured_") for name, *_ in sent):
        raise RequestError(
            400,
            f"structured_outputs: expected {', '.join(list(_OUTPUTS.values())[:-1])} or "
            "json_object, found none of them; set one, or leave it out",
            param="structured_outputs",
        )
    if len(sent) > 1:
        names = [name for name, *_ in sent]
        first = f"{', '.join(names[:-1])} and {names[-1]}"
        raise RequestError(400, f"{first} exclude each other; set only one", param=names[0])
    (field, kind, value), *_ = [*sent, ("", "", None)]
    space = _white_space(request, outputs, kind)
    return Wanted(field, *_rules(kind, value, space))


def _is_none(value: Any) -> bool:
    """Return True for a field that was not sent, or that says that there is no constraint."""
    if isinstance(value, ResponseFormat):
        return value.type == "text"
    return value is None or value is False or value == ""


def _white_space(request: Constraints, outputs: StructuredOutputs | None, kind: str) -> str:
    """Return the regular expression of the white space in JSON, empty for compact JSON."""
    name, space = "guided_whitespace_pattern", request.guided_whitespace_pattern
    if outputs is not None and outputs.whitespace_pattern:
        if space or outputs.disable_any_whitespace:
            other = name if space else "disable_any_whitespace"
            raise RequestError(
                400,
                f"structured_outputs.whitespace_pattern and {other} exclude each other; set only "
                "one",
                param="structured_outputs.whitespace_pattern",
            )
        name, space = "structured_outputs.whitespace_pattern", outputs.whitespace_pattern
    if space and kind not in ("json", "lenient json", "json_object", "format"):
        raise RequestError(
            400, f"{name}: it applies only with a JSON schema; leave it out", param=name
        )
    return space or ""


def _rules(kind: str, value: Any, space: str) -> tuple[str | None, str | None]:
    """Return (Lark rule of the answer, grammar of the user)."""
    if kind == "format":
        return _format(value, space), None
    if kind in ("json", "lenient json"):
        return grammar.json_answer(value, strict=kind == "json", space=space), None
    if kind == "json_object":
        return grammar.json_answer({"type": "object"}, strict=True, space=space), None
    if kind == "regex":  # digits and words are those of ASCII, as in JSON schemas
        return f"answer: /{llguidance.regex_to_lark(value, 'dw')}/", None
    if kind == "choice":
        return f"answer: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}", None
    if kind == "grammar" and "::=" not in value and not value.lstrip().startswith("%llguidance"):
        value = f"%llguidance {{}}\n{value}"  # Lark: each rule of EBNF has `::=`
    return None, grammar.to_lark(value) if value is not None else None


def _format(form: ResponseFormat, space: str) -> str:
    """Return the Lark rule of a `response_format`."""
    if form.type == "json_object":
        wanted = form.schema_ if form.schema_ is not None else {"type": "object"}
        return grammar.json_answer(wanted, strict=form.schema_ is None, space=space)
    if form.json_schema is None:
        raise RequestError(
            400,
            "response_format.json_schema: missing; required by the type json_schema",
            param="response_format",
        )
    named = form.json_schema
    return grammar.json_answer(named.schema_ or {}, strict=bool(named.strict), space=space)
