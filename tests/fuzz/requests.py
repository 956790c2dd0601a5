"""Random requests to `serve` from a grammar, sent to the application without a socket."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from g4spec.runtime.engine import Engine
from g4spec.server.app import create_app
from g4spec.server.service import Service
from g4spec.server.settings import Settings
from tests.fuzz.coverage import Lines
from tests.fuzz.mutation import ODD, mutate_bytes, mutate_json
from tests.fuzz.watching import CONTROL, Outcome, watched
from tests.support.tiny_tokenizer import TEMPLATE

Rng = random.Random
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {},
    True,
    {"type": "string", "pattern": "(a+)+$"},
    {"$ref": "#"},
    {"enum": []},
    {"type": "x"},
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "null"}}},
    {"type": "string", "minLength": 1 << 40},
    {"anyOf": [{"const": "\x1b"}] * 40},
    {"patternProperties": {"(": {}}},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "http://x/y"},
]
GRAMMARS = [
    'root ::= "a" | "b"',
    "root ::= root",
    "root ::= [a-z]{1,99999}",
    "",
    "x",
    "root ::= (",
    'root ::= "\\x1b]0;x"',
    'start: "a"',
    "root ::= " + "(" * 300,
    'root ::= ("a"*)*',
]
TEXTS = [
    "",
    "a",
    "in the a",
    "<|turn>user\n",
    "\x1b]0;t\x07",
    "é😀" * 30,
    "\x00",
    "a" * 4000,
    "\u202e",
    "<|tool_call>call:f{}<tool_call|>",
    "{{ x }}",
]
FIELDS: dict[str, list[Any]] = {
    "temperature": [0, 1, 0.5, 100, -1, 1e308, "x"],
    "top_p": [0, 1, 0.5, 2],
    "top_k": [0, 1, -1, 1 << 40],
    "min_p": [0, 1, 0.1, -1],
    "top_n_sigma": [-1, 0, 1.5, 1e308, "x"],
    "seed": [0, 7, -1, 1 << 63, 1 << 64, 1.5],
    "stop": ["a", ["a", ""], [], [""] * 9, "\ud7ff"],
    "max_tokens": [1, 2, 3, 0, -1, 1 << 40, None],
    "n": [1, 2, 3, 0, 1 << 30],
    "stream": [True, False, 1],
    "stream_options": [
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
        {},
        {"x": 1},
    ],
    "logit_bias": [{"5": 1}, {"x": 1}, {"-1": 1}, {"99999": 3}],
    "presence_penalty": [0, 2, -3],
    "frequency_penalty": [0, -2, 9],
    "repetition_penalty": [1, 0, 1e9],
    "ignore_eos": [True, 1],
    "draft_max": [0, 2, "auto", 99],
    "model": ["tiny", "x", ""],
    "grammar": GRAMMARS,
    "logprobs": [True, False, 0, 3, 21],
    "top_logprobs": [0, 5, 20, 99],
    "echo": [True],
    "best_of": [1, 2],
    "suffix": ["", "x"],
    "user": TEXTS,
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "reasoning_effort": ["none", "low", "x"],
    "chat_template_kwargs": [{"enable_thinking": True}, {"x": 1}],
    "n_predict": [0, 1, 2, -1, 1 << 40],
    "n_probs": [0, 1, 99],
    "json_schema": SCHEMAS,
    "repeat_penalty": [1.1, 0],
    "repeat_last_n": [-1, 0, 1 << 40],
    "return_tokens": [True],
    "timings_per_token": [True],
    "cache_prompt": [False],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": {"name": "s", "schema": s}} for s in SCHEMAS),
    ],
    "tools": [
        [{"type": "function", "function": {"name": n, "parameters": s}}]
        for n in ("f", "", "\x1b")
        for s in SCHEMAS
    ],
    "prompt": [
        *TEXTS,
        [1, 2],
        [TEXTS[1], TEXTS[2]],
        [[2, 3], [4]],
        [-1],
        [1 << 70],
        ["a", 3],
        [],
        [[]],
        None,
    ],
    "content": TEXTS,
    "tokens": [[2, 3], [-1], [1 << 70], ["x"], []],
    "add_special": [True],
    "with_pieces": [True],
    "input": [
        *TEXTS,
        [{"role": "user", "content": "a"}],
        [{"type": "function_call_output"}],
        [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "\x1b"},
        ],
        [{"type": "item_reference", "id": "x"}],
        [{"type": "reasoning", "summary": []}],
        [7],
    ],
    "max_output_tokens": [1, 2, 0, 1 << 40],
    "instructions": TEXTS,
    "background": [True],
    "previous_response_id": ["resp_x", "", "\x1b"],
    "include": [["reasoning.encrypted_content"]],
    "text": [{"format": {"type": "json_schema", "name": "s", "schema": s}} for s in SCHEMAS],
    "reasoning": [{"effort": "low"}, {"x": 1}],
    "truncation": ["disabled", "auto"],
    "system": [*TEXTS, [{"type": "text", "text": "a"}], [{"type": "image"}]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "x"}],
    "stop_sequences": [["a"], [""], ["a"] * 99],
    "output_config": [{"format": SCHEMAS[0]}, {}],
    "continue_final_message": [True],
    "thinking_budget_tokens": [0, 1, -1],
    "mirostat": [0, 2],
    "samplers": [[]],
    "id_slot": [-1, 5],
    "regex": ["[a-c]+", "(", "(?=a)", "a" * 4000],
    "ebnf": GRAMMARS,
    "structured_outputs": [{"choice": ["a", ""]}, {"regex": "[0-9]{1,3}"}, {"json": 1}, {}],
    "guided_json": SCHEMAS,
    "guided_regex": ["(a|b)*", "[", 7],
    "guided_choice": [["a", "b"], [], [""]],
    "guided_grammar": GRAMMARS,
    "guided_whitespace_pattern": [" ?", "(", "a*"],
    "guided_decoding_backend": ["auto", "x"],
    "parallel_tool_calls": [True, False],
    "max_completion_tokens": [1, 3, -1, 1 << 40],
    "modalities": [["text"], ["audio"]],
    "reasoning_format": ["auto", "none"],
    "reasoning_control": [True],
    "add_generation_prompt": [True, False],
    "post_sampling_probs": [True],
    "response_fields": [["content", "timings/predicted_n"], ["x/y/z", ""]],
    "return_progress": [True],
    "sse_ping_interval": [1, -1, 0, 1 << 40],
    "verbose": [True],
    "live": ["a" * 16, "a" * 64, "\x00" * 16, "a"],
    "store": [True, False],
    "metadata": [{}, {"a": "\x1b"}, 7],
    "service_tier": ["auto", 1],
    "safety_identifier": TEXTS,
    "prompt_cache_key": TEXTS,
    "prompt_cache_retention": ["24h"],
    "cache_control": [{"type": "ephemeral"}, 1],
    "context_management": [{"edits": []}, {"edits": [{"type": "x"}]}],
    "speed": ["standard", "fast"],
    "thread": [{"id": "x"}],
    "client_metadata": [{"a": "b"}],
    "conversation": ["x"],
    "max_tool_calls": [1],
}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}],
    [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            ],
        }
    ],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "{}"},
    ],
    [],
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES[0], "max_tokens": 2},
    "/v1/completions": {"prompt": "in the", "max_tokens": 2},
    "/completion": {"prompt": "in the", "n_predict": 2},
    "/tokenize": {"content": "in the a"},
    "/detokenize": {"tokens": [2, 3, 300]},
    "/apply-template": {"messages": MESSAGES[0]},
    "/v1/messages": {"messages": MESSAGES[0], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES[0]},
    "/v1/responses": {"input": "in the", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES[0]},
}
GETS = [
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/%1b%5d",
    "/health",
    "/metrics",
    "/props",
    "/slots",
    "/slots?fail_on_no_slot=1",
    "/",
    "/nothing",
    "/v1/../etc/passwd",
    "//",
    "/docs",
    "/v1/responses/x",
    "/v1/responses/%1b",
    "/v1/responses/x/input_items",
    "/v1/responses/x/cancel",
    "/completion",
    "/openapi.json",
    "/v1/stream?conv_id=x&from=1",
]
HEADERS = [
    (b"content-type", b"text/plain"),
    (b"content-length", b"-1"),
    (b"content-length", b"x"),
    (b"authorization", b"Bearer \xff"),
    (b"origin", b"http://x\r\ny: z"),
    (b"host", b"evil"),
    (b"transfer-encoding", b"chunked"),
    (b"x-request-id", b"\x1b]0;x\x07" * 40),
    (b"accept", b"\xff"),
]


class RandomHttpRequest:
    """A request made from numbers: the first chooses its path and body, each further one changes
    the request.

    Attributes:
        tree: the body as JSON, unless `body` has its bytes.
        leaves: True if the client disconnects before the response.
        made_by, kinds: see `tests.fuzz.cases.Case`.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.made_by, self.kinds = numbers, set[str]()
        rng = Rng(numbers[0])
        self.method, self.headers = "POST", [(b"content-type", b"application/json")]
        if rng.random() < 0.08:
            self.method, self.path, self.tree = rng.choice(["GET", "HEAD"]), rng.choice(GETS), {}
        else:
            self.path = rng.choice(list(BODIES))
            self.tree = json.loads(json.dumps(BODIES[self.path]))
        self.body: bytes | None = None
        self.leaves = False
        for number in numbers[1:]:
            self._change(Rng(number))

    def _change(self, rng: Rng) -> None:
        kind = rng.random()
        if kind < 0.6 and self.body is None and isinstance(self.tree, dict):
            name = rng.choice(list(FIELDS))
            self.tree[name] = rng.choice(FIELDS[name])
            what = "fields"
        elif kind < 0.7 and self.body is None and isinstance(self.tree, dict):
            self.tree["messages"] = rng.choice(MESSAGES)
            what = "messages"
        elif kind < 0.75:
            self.headers = [*self.headers, rng.choice(HEADERS)]
            what = "headers"
        elif kind < 0.78:
            self.method = rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "\x1b"])
            what = "method"
        elif kind < 0.81:
            self.path = rng.choice([*GETS, *BODIES])
            what = "path"
        elif kind < 0.83:
            self.leaves, what = True, "a client that leaves"
        elif kind < 0.9 or self.body is not None:
            self.body = mutate_bytes(self.sent, rng, json.dumps(rng.choice(ODD[6:9])).encode())
            what = "bytes"
        else:
            changed, what = mutate_json(self.sent, rng, b""), "JSON"
            try:
                self.tree = json.loads(changed)
            except (ValueError, RecursionError):
                self.body = changed
        self.kinds.add(f"request: {what}")

    def json(self) -> dict[str, Any]:
        """Return everything needed to send the request again."""
        return {
            "method": self.method,
            "path": self.path,
            "leaves": self.leaves,
            "headers": [[b.decode("latin-1") for b in pair] for pair in self.headers],
            "body": base64.b64encode(self.sent).decode(),
            "numbers": self.made_by,
        }

    @classmethod
    def of_json(cls, tree: dict[str, Any]) -> RandomHttpRequest:
        """Return the request that `json` described."""
        sent = cls(tuple(tree["numbers"]))
        sent.method, sent.path, sent.leaves = tree["method"], tree["path"], tree["leaves"]
        sent.headers = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in tree["headers"]]
        sent.body = base64.b64decode(tree["body"])
        return sent

    @property
    def sent(self) -> bytes:
        """The bytes of the body."""
        if self.body is not None:
            return self.body
        return json.dumps(self.tree).encode() if self.tree or self.method == "POST" else b""

    def show(self) -> str:
        return f"{self.method} {self.path} {self.headers[1:]} {self.sent[:700]!r}"


class Serving:
    """The server application and its engine; requests are sent one after the other."""

    def __init__(self, base: Path, target: Path, draft: Path) -> None:
        self.base = base
        self.engine = Engine.load(target, draft, n_ctx=96, parallel=2, prefix_cache=8 << 20)
        self.engine.tokenizer.template = TEMPLATE
        # `time_limit` is generous: 16 texts of 96 tokens may take seconds on a busy core.
        settings = Settings("tiny", queue=8, time_limit=60, max_texts=16)
        self.service = Service(self.engine, settings)
        self.app = create_app(self.service, body_limit=1 << 20)
        self.loop = asyncio.new_event_loop()
        self._life = self.app.router.lifespan_context(self.app)
        self.loop.run_until_complete(self._life.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._life.__aexit__(None, None, None))
        self.loop.close()
        self.engine.close()

    def run(self, sent: RandomHttpRequest, lines: Lines | None = None) -> Outcome:
        outcome = Outcome()
        answer: list[dict[str, Any]] = []
        with watched(outcome, self.base, self.base / "nothing"):
            if lines is None:
                self.loop.run_until_complete(self._ask(sent, answer))
            else:
                with lines.watch():
                    self.loop.run_until_complete(self._ask(sent, answer))
        outcome.broken += self._wrong(sent, answer, outcome)
        return outcome

    async def _ask(self, sent: RandomHttpRequest, answer: list[dict[str, Any]]) -> None:
        path, _, query = sent.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": sent.method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": list(sent.headers),
            "state": {},
            "client": ("127.0.0.1", 9),
            "server": ("127.0.0.1", 8080),
        }
        waiting = [{"type": "http.request", "body": sent.sent, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.pop()
            if not sent.leaves:
                await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            answer.append(message)

        await self.app(scope, receive, send)
        end = time.monotonic() + 60  # a request whose client left ends after the current step
        while time.monotonic() < end:
            if self.engine.scheduler.idle and self.service.open == 0:
                return
            await asyncio.sleep(0.002)
        raise AssertionError("the server still holds resources of a request that has ended")

    def _wrong(
        self, sent: RandomHttpRequest, answer: list[dict[str, Any]], outcome: Outcome
    ) -> Iterator[str]:
        if not answer:
            if not sent.leaves and not outcome.broken:
                yield "no response"
            return
        outcome.code = answer[0]["status"]
        if outcome.code == 500:
            yield f"internal server error at {sent.path}"
        for name, value in answer[0].get("headers", []):
            if CONTROL.search((name + value).decode("latin-1")):
                yield f"control character in header {name!r}"
        body = b"".join(m.get("body", b"") for m in answer[1:])
        outcome.out = text = body.decode("utf-8", "surrogateescape")
        if any("\udc80" <= c <= "\udcff" for c in text):
            yield "a response that is not UTF-8"
        kind = dict(answer[0].get("headers", [])).get(b"content-type", b"")
        if kind.startswith(b"application/json") and sent.method != "HEAD":
            yield from _check_json(text)
        if kind.startswith(b"text/event-stream"):
            for line in text.split("\n"):
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _check_json(line[6:])
        if CONTROL.search(text.replace("\r\n", "\n")):
            yield f"control character in {kind.decode()}"


def _check_json(text: str) -> Iterator[str]:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        yield "a response that is not JSON"
