"""Schemas of OpenAI-style request bodies. Unknown fields are rejected by name."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, from_json

from g4spec.core import MAX_DRAFT
from g4spec.server import field_errors
from g4spec.server.field_errors import spelled
from g4spec.server.request_errors import RequestError

Text = Annotated[str, Field(max_length=1 << 26)]
Json = dict[str, Any]


def _blocks(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "expected a string or a list of content blocks")
    return content


Content = Annotated[
    list[Any],
    BeforeValidator(_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
"""Content blocks, to be validated by `variant`; a str is converted to one text block."""

Parsed = Annotated[Any, Field(exclude=True)]
"""Ignored: fields that helpers of OpenAI's SDKs (`parse`, `stream`) add to an answer, which clients
send back."""


class Body(BaseModel):
    """A request body or part of one: no unknown fields, no type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Loose(BaseModel):
    """A part of a body that may have additional fields, which are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)


Model = TypeVar("Model", bound=BaseModel)


def variant(models: Mapping[str, type[Body]], value: Any, where: str, default: str = "") -> Body:
    """Validate a part of a body by its `type` field.

    Args:
        models: schemas by type.
        value: the part.
        where: path of the part, for errors.
        default: type of a part without the field.
    """
    if not isinstance(value, dict):
        raise RequestError(
            400, f"{where}: expected a JSON object, found {spelled(value)}", param=where
        )
    kind = value.get("type") or default
    model = models.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            400,
            f"{where}.type: {kind!r:.60} is not supported here, only {', '.join(models)}",
            param=f"{where}.type",
        )
    return check(model, value, where)


def read(model: type[Model], body: bytes) -> Model:
    """Parse and validate a body; raise RequestError naming the invalid field."""
    return check(model, parse(body))


def parse(body: bytes) -> Json:
    """Parse a body, with a byte order mark or not; raise RequestError unless it is an object."""
    try:
        value = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(
            400, f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise RequestError(400, "the request body is not a JSON object", code="invalid_json")
    return value


def check(model: type[Model], value: Json, where: str = "") -> Model:
    """Validate a parsed body, or the part of it at path `where`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise field_errors.refused(error, value, where, tuple(model.model_fields)) from None


def _draft_max(value: object, check: ValidatorFunctionWrapHandler) -> int | str | None:
    """Validate a draft length, with one error instead of one for each type of the union."""
    try:
        found: int | str | None = check(value)
    except ValidationError:
        raise PydanticCustomError(
            "draft_max", 'expected "auto" or 0 to {most}', {"most": MAX_DRAFT}
        ) from None
    return found


DraftMax = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_DRAFT)] | None, WrapValidator(_draft_max)
]


class Sampling(Body):
    """Sampling parameters of all requests.

    top_k, min_p, repetition_penalty and ignore_eos are vLLM's, top_n_sigma is llama.cpp's. Specific
    to g4spec are draft_max, the maximum draft length, and live, a secret that allows reading the
    text at /v1/live.
    """

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_n_sigma: float | None = Field(None, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    live: str | None = Field(None, min_length=16, max_length=64)
    draft_max: DraftMax = None


class ModelRequest(Loose):
    """A body that names a model."""

    model: str


class StreamOptions(Body):
    """Options of a stream; continuous_usage_stats is vLLM's."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Hints(Body):
    """Fields that are accepted and have no effect."""

    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_prompt: bool | None = None


class LlamaCpp(Body):
    """Fields of llama.cpp's server.

    timings_per_token, return_progress and sse_ping_interval, in seconds, apply to streams; id_slot
    has no effect.
    """

    timings_per_token: bool | None = None
    return_progress: bool | None = None
    sse_ping_interval: int | None = Field(None, ge=-1, le=86_400)
    id_slot: int | None = None
    verbose: bool | None = None


def _schema(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        found = from_json(value, allow_inf_nan=False) if value else None
    except ValueError:
        found = False
    if not isinstance(found, dict | None):
        raise PydanticCustomError("schema", "expected a JSON schema, as an object or its text")
    return found


Schema = Annotated[
    Json | None,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]
"""A JSON schema, or its text; an empty text is none."""

Choices = Annotated[list[Text], Field(min_length=1)]


class StructuredOutputs(Body):
    """Constraint on an answer as vLLM names it: one of the first five fields.

    JSON is compact without whitespace_pattern, so disable_any_whitespace has no effect.
    """

    json_: Schema = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: Text | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None


class NamedSchema(Body):
    """A JSON schema for the answer."""

    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of answers. `schema` is llama.cpp's, which TGI and its clients call `value`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Json | None = Field(None, validation_alias=AliasChoices("schema", "value"))


class Constraints(Body):
    """Constraint on an answer: one of these fields (see `constraints.of`).

    structured_outputs is vLLM's, guided_json to guided_decoding_backend are those of vLLM before
    0.12, regex and ebnf are SGLang's, json_schema is llama.cpp's and SGLang's.
    """

    response_format: ResponseFormat | None = None
    json_schema: Schema = None
    grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    guided_decoding_backend: Literal["auto", "guidance"] | None = None
    regex: Text | None = None
    ebnf: Text | None = None


class OpenAI(Sampling, Hints, LlamaCpp, Constraints):
    """Common fields of chat completions and completions."""

    model: str | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# ---- chat completions


class Part(Loose):
    """A part of a message's content; one of type text must have `text`, and no unknown fields.

    cache_control and annotations have no effect: every prefix is cached, and annotations are not
    part of the text.
    """

    type: str
    text: str | None = None
    cache_control: Json | None = None
    annotations: list[Any] | None = None


class CalledFunction(Body):
    """Name and arguments (JSON text or object) of a tool call."""

    name: str
    arguments: str | Json | None = None
    parsed_arguments: Parsed = None


class ToolCall(Body):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """A chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Parsed = None


class FunctionDeclaration(Body):
    """The declaration of a function."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDeclaration


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that requires a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class TemplateOptions(Body):
    """Variables of the chat template."""

    enable_thinking: bool | None = None


MaxTokens = Annotated[
    int | None, Field(ge=1), BeforeValidator(lambda value: None if value == -1 else value)
]
"""A limit of new tokens; -1 is none, as in llama.cpp."""


class ChatRequest(OpenAI):
    """A body of /v1/chat/completions.

    reasoning_format and reasoning_control are llama.cpp's: reasoning is always returned as
    reasoning_content, and the second has no effect.
    """

    messages: list[Message] = Field(min_length=1)
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    reasoning_format: Literal["auto", "deepseek"] | None = None
    reasoning_control: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking_budget_tokens: int | None = Field(None, ge=0)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None
