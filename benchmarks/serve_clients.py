"""Test client libraries against the server.

    pip install openai anthropic litellm langchain-openai langchain-anthropic instructor \\
        'pydantic-ai-slim[openai,anthropic]'
    python benchmarks/serve_clients.py [--only litellm ...]

Serves the bundled family over HTTP with a DFlash draft, four requests at a time. Each client uses
what it supports of each API: answers with and without streaming, tool calls and their results,
structured output. Greedy texts must equal those of the server without a draft; structured output
must match its schema. Clients that are not installed are listed. Writes dated JSON; the exit code
is 1 if a check fails.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.runtime.engine import Engine
from tests.server.running_server import Served

FAMILY = Path(__file__).parent.parent / "examples" / "tiny"
HELLO = "What is 2 + 3?"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
MOST = 12
"""New tokens of plain answers."""


class Weather(BaseModel):
    """Forecast for a place. Some clients drop bounds from schemas, so there are only choices."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]
    sure: bool


SCHEMA = Weather.model_json_schema()
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


class Checks:
    """The checks of one client.

    Args:
        url: of the server. expected: the greedy answer to `MESSAGES`, without a draft.
    """

    def __init__(self, url: str, expected: str) -> None:
        self.url, self.v1, self.expected = url, f"{url}/v1", expected
        self.done: dict[str, str] = {}

    def run(self, name: str, check: Callable[[], Any]) -> None:
        """Run one check; what it returns must be the greedy answer, a `Weather`, or True."""
        try:
            found = check()
            if isinstance(found, str):
                assert found == self.expected, f"{found!r}, expected {self.expected!r}"
            elif not isinstance(found, Weather):
                assert found is True, found
            self.done[name] = "passed"
        except Exception as error:  # noqa: BLE001 - whatever a client may raise is a result
            self.done[name] = f"failed: {type(error).__name__}: {error}"[:600]
            traceback.print_exc()
        print(f"  {name}: {self.done[name]}", flush=True)


def check_openai(c: Checks) -> None:
    """Check OpenAI's SDK with strict response validation."""
    import openai

    client = openai.OpenAI(
        base_url=c.v1, api_key="none", max_retries=0, _strict_response_validation=True
    )
    chat: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": MOST}
    respond: Any = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": HELLO,
        "temperature": 0,
        "max_output_tokens": MOST,
    }
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]

    def streamed() -> str:
        with client.chat.completions.stream(**chat) as stream:
            return str(stream.get_final_completion().choices[0].message.content)

    def parsed() -> Weather | None:
        answer = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Weather
        )
        return answer.choices[0].message.parsed

    def loop() -> bool:
        asked: Any = {"model": "tiny", "tools": [CHAT_TOOL], "max_tokens": 80}
        first = client.chat.completions.create(
            **asked, messages=MESSAGES, tool_choice="required", parallel_tool_calls=False
        )
        message = first.choices[0].message
        assert message.tool_calls
        call: Any = message.tool_calls[0]
        Weather.model_validate_json(call.function.arguments)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        client.chat.completions.create(**asked, messages=[*MESSAGES, message, result])
        return True

    def response_streamed() -> str:
        with client.responses.stream(**respond) as stream:
            for _ in stream:
                pass
            return stream.get_final_response().output_text

    def response_loop() -> bool:
        asked: Any = {"model": "tiny", "tools": tools, "max_output_tokens": 80}
        first = client.responses.create(
            **asked, input=HELLO, tool_choice="required", parallel_tool_calls=False
        )
        call: Any = first.output[0]
        Weather.model_validate_json(call.arguments)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        client.responses.create(**asked, input=[result], previous_response_id=first.id)
        client.responses.create(
            **asked, input=[{"role": "user", "content": HELLO}, *first.output, result]
        )
        return True

    c.run("chat", lambda: client.chat.completions.create(**chat).choices[0].message.content)
    c.run("chat, streamed", streamed)
    c.run("chat, parsed", parsed)
    c.run("chat, function and result", loop)
    c.run("responses", lambda: client.responses.create(**respond).output_text)
    c.run("responses, streamed", response_streamed)
    c.run(
        "responses, parsed",
        lambda: (
            client.responses.parse(model="tiny", input=HELLO, text_format=Weather).output_parsed
        ),
    )
    c.run("responses, function and result", response_loop)
    c.run("models", lambda: [m.id for m in client.models.list()] == ["tiny"])


def check_anthropic(c: Checks) -> None:
    """Check Anthropic's SDK with strict response validation."""
    import anthropic

    client = anthropic.Anthropic(
        base_url=c.url, api_key="none", max_retries=0, _strict_response_validation=True
    )
    user: Any = [{"role": "user", "content": HELLO}]
    asked: Any = {
        "model": "tiny",
        "system": "Be brief.",
        "messages": user,
        "max_tokens": MOST,
        "extra_body": {"temperature": 0},
    }

    def streamed() -> str:
        with client.messages.stream(**asked) as stream:
            return "".join(stream.text_stream)

    def loop() -> bool:
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        more: Any = {"model": "tiny", "tools": tools, "max_tokens": 80}
        first = client.messages.create(
            **more, messages=user, tool_choice={"type": "any", "disable_parallel_tool_use": True}
        )
        call: Any = first.content[0]
        Weather.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns: Any = [
            *user,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        with client.messages.stream(**more, messages=turns) as stream:
            stream.get_final_message()
        return True

    def parsed() -> Weather | None:
        answer = client.messages.parse(
            model="tiny", messages=user, max_tokens=100, output_format=Weather
        )
        return answer.parsed_output

    def counted() -> bool:
        count = client.messages.count_tokens(model="tiny", system="Be brief.", messages=user)
        usage = client.messages.create(**asked).usage
        return count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    c.run("messages", lambda: client.messages.create(**asked).content[0].text)
    c.run("messages, streamed", streamed)
    c.run("messages, parsed", parsed)
    c.run("messages, function and result", loop)
    c.run("count_tokens", counted)


def check_litellm(c: Checks) -> None:
    """Check litellm on all three APIs."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the network
    import litellm

    chat: Any = {
        "model": "openai/tiny",
        "api_base": c.v1,
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": MOST,
    }
    claude = {**chat, "model": "anthropic/tiny", "api_base": c.url}
    respond: Any = {
        "model": "openai/tiny",
        "api_base": c.v1,
        "api_key": "none",
        "input": HELLO,
        "instructions": "Be brief.",
        "temperature": 0,
        "max_output_tokens": MOST,
    }

    def text(asked: Any) -> str:
        return str(litellm.completion(**asked).choices[0].message.content)

    def streamed(asked: Any) -> str:
        chunks = litellm.completion(**asked, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def function(asked: Any) -> Weather:
        answer = litellm.completion(
            **{**asked, "max_tokens": 80}, tools=[CHAT_TOOL], tool_choice="required"
        )
        call = answer.choices[0].message.tool_calls[0]
        return Weather.model_validate_json(call.function.arguments)

    c.run("chat", lambda: text(chat))
    c.run("chat, streamed", lambda: streamed(chat))
    c.run("chat, function", lambda: function(chat))
    c.run("messages", lambda: text(claude))
    c.run("messages, streamed", lambda: streamed(claude))
    c.run("messages, function", lambda: function(claude))
    c.run("responses", lambda: litellm.responses(**respond).output_text)


def _langchain(c: Checks, name: str, model: Any, longer: Any) -> None:
    c.run(name, lambda: model.invoke(MESSAGES).text)
    c.run(f"{name}, streamed", lambda: "".join(m.text for m in model.stream(MESSAGES)))

    def function() -> Weather:
        bound = longer.bind_tools([Weather], tool_choice="Weather")
        return Weather.model_validate(bound.invoke(MESSAGES).tool_calls[0]["args"])

    c.run(f"{name}, function", function)
    structured = longer.with_structured_output(Weather, method="json_schema")
    c.run(f"{name}, structured", lambda: structured.invoke(MESSAGES))


def check_langchain_openai(c: Checks) -> None:
    """Check langchain-openai on chat completions and responses."""
    from langchain_openai import ChatOpenAI

    asked: Any = {
        "model": "tiny",
        "base_url": c.v1,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }
    for name in ("chat", "responses"):
        asked["use_responses_api"] = name == "responses"
        _langchain(c, name, *(ChatOpenAI(**asked, max_tokens=n) for n in (MOST, 100)))


def check_langchain_anthropic(c: Checks) -> None:
    """Check langchain-anthropic."""
    from langchain_anthropic import ChatAnthropic

    asked: Any = {
        "model": "tiny",
        "base_url": c.url,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }
    _langchain(c, "messages", *(ChatAnthropic(**asked, max_tokens=n) for n in (MOST, 100)))


def check_instructor(c: Checks) -> None:
    """Check instructor's modes of structured output."""
    import anthropic
    import instructor
    import openai

    def ask(client: Any) -> Weather:
        found: Weather = client.create(
            model="tiny", messages=MESSAGES, max_tokens=100, max_retries=1, response_model=Weather
        )
        return found

    chat = openai.OpenAI(base_url=c.v1, api_key="none", max_retries=0)
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        wrapped = instructor.from_openai(chat, mode=instructor.Mode[mode])
        c.run(f"chat, {mode}", partial(ask, wrapped))
    claude = anthropic.Anthropic(base_url=c.url, api_key="none", max_retries=0)
    c.run(
        "messages, ANTHROPIC_TOOLS",
        lambda: ask(instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS)),
    )


def check_pydantic_ai(c: Checks) -> None:
    """Check pydantic-ai's agents on all three APIs."""
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIProvider(base_url=c.v1, api_key="none")
    models: dict[str, Any] = {
        "chat": OpenAIChatModel("tiny", provider=chat),
        "responses": OpenAIResponsesModel("tiny", provider=chat),
        "messages": AnthropicModel(
            "tiny", provider=AnthropicProvider(base_url=c.url, api_key="none")
        ),
    }

    def answer(agent: Any) -> Any:
        return agent.run_sync(HELLO).output

    for name, model in models.items():
        plain: Any = Agent(
            model, system_prompt="Be brief.", model_settings={"temperature": 0, "max_tokens": MOST}
        )
        c.run(name, partial(answer, plain))

        def streamed(agent: Any = plain) -> str:
            result = agent.run_stream_sync(HELLO)
            return "".join(result.stream_text(delta=True))

        c.run(f"{name}, streamed", streamed)
        for kind in (ToolOutput, NativeOutput)[: 1 if name == "messages" else 2]:
            agent: Any = Agent(
                model,
                output_type=kind(Weather),
                system_prompt="Be brief.",
                model_settings={"max_tokens": 100},
            )
            c.run(f"{name}, {kind.__name__}", partial(answer, agent))


CLIENTS: dict[str, Callable[[Checks], None]] = {
    "openai": check_openai,
    "anthropic": check_anthropic,
    "litellm": check_litellm,
    "langchain-openai": check_langchain_openai,
    "langchain-anthropic": check_langchain_anthropic,
    "instructor": check_instructor,
    "pydantic-ai-slim": check_pydantic_ai,
}


def main() -> int:
    """Serve the family, run every client, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--out", type=Path, help="file of the result, instead of a dated one")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder) / "target.gguf", Path(folder) / "dflash.gguf"
        convert.convert(FAMILY / "target", target)
        convert.convert(FAMILY / "dflash", draft, target=target)
        with Engine.load(target, draft, n_ctx=4096, parallel=4, prefix_cache=64 << 20) as engine:
            served = Served(engine)
            asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": MOST, "draft_max": 0}
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60).json()
            expected = answer["choices"][0]["message"]["content"]
            for name in args.only:
                found[name] = run(name, Checks(served.url, expected))
            served.stop()
    write_result(args.out, "serve-clients", {"clients": found})
    print(json.dumps({name: entry["passed"] for name, entry in found.items()}))
    return 0 if all(entry["passed"] == entry["checks"] for entry in found.values()) else 1


def run(name: str, checks: Checks) -> dict[str, Any]:
    """Run one client's checks; returns what goes into the result."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(f"{name}: not installed", flush=True)
        return {"version": None, "checks": 0, "passed": 0, "results": "not installed"}
    print(f"{name} {version}", flush=True)
    CLIENTS[name](checks)
    passed = sum(result == "passed" for result in checks.done.values())
    beside = {
        other: importlib.metadata.version(other)
        for other in ("openai", "anthropic")
        if other in sys.modules
    }
    return {
        "version": version,
        "beside": beside,
        "checks": len(checks.done),
        "passed": passed,
        "results": checks.done,
    }


if __name__ == "__main__":
    sys.exit(main())
