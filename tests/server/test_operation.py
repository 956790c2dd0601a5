"""Operation of the server: access, limits, metrics, signals, and invalid bodies."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec.cli import _http_options, _template_options
from g4spec.cli._serve_options import split_commas
from g4spec.errors import EnvironmentProblem, InputError, UsageError
from g4spec.runtime.engine import Engine
from g4spec.server import addresses, middleware, response_parts, run, tokenization
from g4spec.server.app import create_app
from g4spec.server.middleware import JsonLogFormatter
from g4spec.server.service import Service
from g4spec.server.settings import Settings
from tests.server.running_server import Served, wait
from tests.support.selection import sample

ROOT = Path(__file__).resolve().parents[2]
POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/completion",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
]
DEEP = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
BODIES = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe",
    DEEP,
    b'{"prompt": NaN}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": 1e999}',
    b'"x"',
    b'{"messages": null}',
    b'{"prompt": {}}',
    b'{"prompt": [[]]}',
    b'{"tokens": [-1]}',
    b'{"tokens": [1e3]}',
    b'{"content": 3}',
    b'{"messages": [{}]}',
    b'{"messages": [[]]}',
    b'{"prompt":"x","max_tokens":-2}',
    b'{"prompt":"x","max_tokens":1e3}',
    b'{"prompt":"x","seed":1e30}',
    b'{"prompt":"x","stop":""}'[:-1],
    b'{"prompt":"x","logit_bias":{"-1":1}}',
    b'{"prompt":"x","grammar":"root ::= \\u0000"}',
    b'{"prompt":"x","json_schema":{"$ref":"#"}}',
    b'{"tokens":[99999999999999999999]}',
]


@pytest.mark.parametrize("path", POSTS)
def test_wrong_bodies_are_refused(busy: Served, path: str) -> None:
    for body in BODIES:
        response = busy.http.post(path, content=body)
        assert response.status_code == 400, (path, body[:60], response.text[:200])
        assert response.json()["error"]["message"]
    assert busy.idle()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "x", "auto", "function", "object", "$ref"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "function",
                    "name",
                    "parameters",
                    "properties",
                    "schema",
                    "items",
                    "anyOf",
                    "enum",
                    "$ref",
                    "pattern",
                    "text",
                    "json_schema",
                    "strict",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
FIELDS = [
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "response_format",
    "stop",
    "logit_bias",
    "n",
    "temperature",
    "grammar",
    "json_schema",
    "stream_options",
    "logprobs",
    "seed",
    "top_logprobs",
    "n_probs",
    "content",
    "tokens",
    "reasoning_effort",
    "input",
    "system",
    "text",
    "thinking",
    "reasoning",
    "output_config",
    "include",
]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(POSTS),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.booleans(),
)
def test_bodies_of_any_kind_never_break_the_server(
    busy: Served, path: str, body: dict[str, Any], sound: bool
) -> None:
    if sound:  # the body is valid, the rest is not
        main = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
        named = "messages" if path in (POSTS[0], *POSTS[5:8]) else "prompt"
        named = "input" if "responses" in path else named
        body = {named: main[named], **{k: v for k, v in body.items() if k not in main}}
        body["max_output_tokens" if named == "input" else "max_tokens"] = 1
    content = json.dumps(body).encode()
    response = busy.http.post(path, content=content)
    assert response.status_code in (200, 400), (response.status_code, response.text)


def test_paths_and_methods(busy: Served) -> None:
    wrong = [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)]
    for method, path, status in wrong:
        response = busy.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"] and "x-request-id" in response.headers
        assert ("allow" in response.headers) == (status == 405)
    assert busy.http.options("/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/infill", "infilling"),
        ("/v1/embeddings", "no embeddings"),
        ("/embedding", "no embeddings"),
        ("/v1/rerank", "does not rank"),
    ],
)
def test_endpoints_of_llama_cpp_that_are_missing_say_why(busy: Served, path: str, why: str) -> None:
    error = busy.refused(path, {"input": "x"}, 501)
    assert error["type"] == "not_supported_error" and why in error["message"]


def test_messages_repeat_only_the_beginning_of_long_names(busy: Served) -> None:
    long = "x" * 5000
    for path in (f"{long}", f"v1/models/{long}", f"v1/responses/{long}", f"v1/stream?{long}=1"):
        response = busy.http.get(f"/{path}")
        assert response.status_code in (400, 404)
        assert "xxx" in response.json()["error"]["message"]
        assert len(response.json()["error"]["message"]) < 300, path
    error = busy.refused("/tokenize", {"content": "x", "model": "x" * 10**6}, 404)
    assert len(error["message"]) < 200


def exchange(served: Served, sent: bytes) -> bytes:
    """Send bytes; return the answer until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", served.listeners[0].getsockname()[1])) as client:
        client.settimeout(20)
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))


POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /health HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "sent,why",
    [
        (b"garbage\r\n\r\n", "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "illegal request line"),
        (POST + b"Content-Length: abc\r\n\r\n", "bad Content-Length"),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", "conflicting Content-Length"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "illegal chunk header"),
        (GET + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "illegal chunk header"),
        (GET + b"\r\n", "Missing mandatory Host: header"),
    ],
)
def test_what_is_not_http_gets_an_error_in_json(
    busy: Served, caplog: pytest.LogCaptureFixture, sent: bytes, why: str
) -> None:
    head, body = exchange(busy, sent).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert error["message"].startswith(f"the request is not valid HTTP: {why}")
    assert "bytearray" not in error["message"] and error["type"] == "invalid_request_error"
    assert busy.http.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_leaves_before_its_body_ends_is_no_error(
    busy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("g4spec.server").setLevel(logging.INFO)
    with socket.create_connection(("127.0.0.1", busy.listeners[0].getsockname()[1])) as client:
        client.sendall(POST + b"Content-Length: 50\r\n\r\n{}")
        wait(lambda: len(busy.server.server_state.tasks))
    wait(lambda: not busy.server.server_state.tasks)
    lines = [json.loads(JsonLogFormatter().format(record)) for record in caplog.records]
    assert [line["status"] for line in lines] == [499]


def test_bodies_and_headers_have_a_limit(engines: Callable[..., Engine]) -> None:
    served = Served(engines(None, parallel=2), body_limit=1000)
    try:
        error = served.refused("/tokenize", {"content": "x" * 1000}, 413)
        assert error["code"] == "too_large"

        def chunks() -> Any:
            for _ in range(50):
                yield b" " * 100

        assert served.http.post("/tokenize", content=chunks()).status_code == 413
        assert served.post("/tokenize", content="x" * 900)
        flood = {f"x-{i}": "y" * 900 for i in range(1000)}  # more than one read takes
        with contextlib.suppress(httpx.TransportError):  # disconnected, before or after the answer
            assert served.http.get("/health", headers=flood).status_code in (400, 431)
        assert served.http.get("/health").status_code == 200
    finally:
        served.stop()


def test_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key that was asked for is lost: a server without keys is open."""
    file = tmp_path / "keys"
    file.write_bytes("\ufeffone\r\n\ntwo\n".encode())
    monkeypatch.delenv("G4SPEC_API_KEY", raising=False)
    assert _http_options.keys(None, None) == []
    assert _http_options.keys(["a b"], file) == ["a b", "one", "two"]
    monkeypatch.setenv("G4SPEC_API_KEY", "a b")
    assert _http_options.keys(None, None) == ["a b"]
    assert _http_options.keys(["c"], None) == ["c"]
    monkeypatch.setenv("G4SPEC_API_KEY", "  ")
    for typed in (None, [" "], ["schlüssel"], ["a\nb"]):
        with pytest.raises(UsageError):
            _http_options.keys(typed, None)
    file.write_text("\n")
    with pytest.raises(InputError):
        _http_options.keys(None, file)
    with pytest.raises(InputError, match="an empty file"):
        _template_options.template(file)


def test_a_body_that_stops_is_refused(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends half a body and waits is answered and disconnected, one that sends it
    slowly is served."""
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.5)
    served = Served(engines(None, parallel=2))
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n"
    try:
        with socket.create_connection(served.listeners[0].getsockname()[:2], timeout=20) as client:
            client.sendall(head + b'{"content":')
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408") and b"of the request body arrived" in answer
        assert b"x-should-retry" not in answer, "it cost nothing: clients may send it again"

        def slowly() -> Any:
            for part in (b'{"content"', b': "abc"', b"}"):
                time.sleep(0.3)
                yield part

        assert served.http.post("/tokenize", content=slowly()).status_code == 200
    finally:
        served.stop()


def test_keys_origins_and_the_log(
    engines: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(
        engines(None, parallel=2), keys=["secret-one", "two"], origins=["http://page.example"]
    )
    logging.getLogger("g4spec.server").setLevel(logging.INFO)
    try:
        get = served.http.get
        assert get("/health").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer secret"},
            {"authorization": "two"},
            {"authorization": "Bearer " + "x" * 5000},
            {"x-api-key": "é"},
        ):
            raw = {k: v.encode() for k, v in headers.items()}
            response = get("/v1/models", headers=raw)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"authorization": "Bearer secret-one"}, {"x-api-key": "two"}):
            assert get("/v1/models", headers=headers).status_code == 200
        body = {"prompt": "SECRET TEXT", "max_tokens": 2}
        own = {"x-api-key": "two", "origin": "http://page.example"}
        answer = served.http.post("/v1/completions", json=body, headers=own)
        readable = set(answer.headers["access-control-expose-headers"].split(", "))
        assert readable >= {"x-speculation", "x-request-id"}, "pages cannot read other headers"
        of_some = {"retry-after", "x-should-retry", "process-start-time-unix"}
        assert readable - of_some <= set(answer.headers)
        asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
        allowed = served.http.options("/v1/models", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        # Browsers ask for it where a page of the internet sends to this machine.
        asked["access-control-request-private-network"] = "true"
        allowed = served.http.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-private-network"] == "true"
    finally:
        served.stop()
    lines = [JsonLogFormatter().format(record) for record in caplog.records]
    found = [json.loads(line) for line in lines]
    last = next(f for f in found if f.get("path") == "/v1/completions")
    assert last["status"] == 200 and last["completion_tokens"] == 2 and last["prompt_tokens"] > 1
    assert re.fullmatch("[0-9a-f]{8}", last["key"]) and last["finish"] == ["length"]
    assert not any(word in line for line in lines for word in ("SECRET", "secret-one", 'two"'))


def test_all_errors_have_the_headers_of_other_responses(
    engines: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pages of other origins can read them, and each has the number of its line in the log."""

    class PanicException(BaseException):
        """Stand for the panic of a Rust library."""

    raised: list[type[BaseException]] = [ValueError, PanicException]

    def broken(*_: Any) -> Any:
        raise raised.pop()("SECRET")

    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(tokenization, "tokenize", broken)
    logging.getLogger("g4spec.server").setLevel(logging.INFO)
    served = Served(engines(None, parallel=2), origins=["http://page.example"], body_limit=1000)

    def stops() -> Any:
        yield b'{"content":'
        time.sleep(1.5)

    def chunks() -> Any:
        yield from [b" " * 100] * 50

    try:
        seen = {}
        for status, content in (
            (500, b'{"content": "x"}'),
            (500, b'{"content": "x"}'),
            (413, b" " * 2000),
            (413, chunks()),
            (408, stops()),
            (400, b"{"),
        ):
            response = served.http.post(
                "/tokenize", content=content, headers={"origin": "http://page.example"}
            )
            assert response.status_code == status and "SECRET" not in response.text
            assert response.headers["access-control-allow-origin"] == "http://page.example"
            seen[response.headers["x-request-id"]] = status
    finally:
        served.stop()
    lines = [json.loads(JsonLogFormatter().format(record)) for record in caplog.records]
    logged = {line["id"]: line["status"] for line in lines if line["event"] == "request"}
    assert logged == seen and len(seen) == 6
    errors = [line["error"] for line in lines if line["event"] == "internal server error"]
    assert len(errors) == 2 and all("SECRET" in error for error in errors)


def test_cross_origin_requests_are_refused_by_default(busy: Served) -> None:
    response = busy.http.get("/health", headers={"origin": "http://x"})
    assert not any(name.startswith("access-control") for name in response.headers)


def test_origins_of_this_machine_and_disabled_paths(engines: Callable[..., Engine]) -> None:
    """`localhost` allows pages of this machine; errors of disabled paths name the option."""
    disabled = {"/slots": "--no-slots", "/metrics": "--no-metrics", "/": "--no-ui"}
    served = Served(
        engines(None, parallel=2),
        Settings("tiny", tags=("chat", "small")),
        origins=["localhost", "https://page.example"],
        disabled=disabled,
    )

    def asked(origin: str) -> httpx.Response:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        return served.http.options("/completions", headers=headers)

    try:
        for origin in ("http://localhost", "http://127.0.0.1:3000", "https://[::1]:1"):
            assert asked(origin).headers["access-control-allow-origin"] == origin
        assert asked("https://page.example").headers["access-control-allow-origin"]
        for origin in ("http://notlocalhost", "http://localhost.evil.com", "localhost", "http://x"):
            refused = asked(origin)
            assert refused.status_code == 200
            assert "access-control-allow-origin" not in refused.headers
        for path, option in disabled.items():
            response = served.http.get(path)
            assert response.status_code == (404 if path == "/" else 501)
            assert option in response.json()["error"]["message"]
        (model,) = served.http.get("/v1/models").json()["data"]
        assert model["tags"] == ["chat", "small"]
    finally:
        served.stop()


def test_metrics(busy: Served) -> None:
    def read() -> dict[str, float]:
        text = busy.http.get("/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = read()
    answer = busy.post(
        "/v1/completions", prompt="def main():", max_tokens=20, temperature=0, draft_max=3
    )
    after = read()
    label = '{model_name="tiny"}'

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    timings = answer["timings"]
    assert grown(f"vllm:spec_decode_num_draft_tokens_total{label}") == timings["draft_n"] > 0
    accepted = grown(f"vllm:spec_decode_num_accepted_tokens_total{label}")
    assert accepted == timings["draft_n_accepted"]
    assert 0 < grown(f"vllm:spec_decode_num_drafts_total{label}") <= timings["draft_n"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by = [grown(f'{name}{{model_name="tiny",position="{i}"}}') for i in range(15)]
    assert sum(by) == accepted
    name = "g4spec:spec_decode_num_draft_tokens_per_pos_total"
    by = [grown(f'{name}{{model_name="tiny",position="{i}"}}') for i in range(15)]
    assert by[:3] == timings["draft_n_per_pos"] and not any(by[3:])
    draft_seconds = grown(f"g4spec:draft_seconds_total{label}")
    assert draft_seconds == pytest.approx(timings["draft_ms"] / 1e3)
    seconds = draft_seconds + grown(f"g4spec:verify_seconds_total{label}")
    assert seconds == pytest.approx(timings["predicted_ms"] / 1e3)
    assert 0 < grown(f"g4spec:decode_steps_total{label}") < 20
    assert grown(f"vllm:generation_tokens_total{label}") == 20
    assert grown(f"vllm:time_to_first_token_seconds_count{label}") == 1
    assert grown(f"vllm:inter_token_latency_seconds_count{label}") == 19
    assert grown(f"vllm:e2e_request_latency_seconds_count{label}") == 1
    assert grown('vllm:request_success_total{finished_reason="length",model_name="tiny"}') == 1
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
    ):
        assert f"vllm:{name}{label}" in after
    assert grown("llamacpp:tokens_predicted_total") == 20
    assert grown("llamacpp:prompt_tokens_total") == timings["prompt_n"]
    assert grown("llamacpp:prompt_tokens_cached_total") == timings["cache_n"]
    assert grown("llamacpp:prompt_seconds_total") == pytest.approx(timings["prompt_ms"] / 1e3)
    seconds = grown("llamacpp:tokens_predicted_seconds_total")
    assert seconds == pytest.approx(timings["predicted_ms"] / 1e3)
    assert 0 < grown("llamacpp:n_decode_total") < 20
    assert after["llamacpp:n_tokens_max"] >= answer["usage"]["total_tokens"]
    assert after["llamacpp:n_busy_slots_per_decode"] >= 1
    speed = after["llamacpp:predicted_tokens_seconds"]
    assert speed == pytest.approx(timings["predicted_per_second"])
    assert read()["llamacpp:predicted_tokens_seconds"] == 0, (
        "counts only texts since the last scrape"
    )
    assert grown("llamacpp:spec_decode_num_accepted_tokens_total") == accepted
    assert after["llamacpp:requests_processing"] == 0
    refused = 'g4spec:request_refused_total{model_name="tiny",status="400"}'
    before = after
    busy.refused("/v1/completions", {"fo": 1})
    after = read()
    assert grown(refused) == 1


def test_a_slash_at_the_end_of_a_path_redirects_nowhere(busy: Served) -> None:
    """The address of the redirection lacked the prefix and the https of a proxy."""
    for path in ("/health/", "/v1/live/"):
        answer = busy.http.get(path)
        assert answer.status_code == 404 and "location" not in answer.headers
        assert f"no endpoint at {path}; GET /openapi.json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fix"),
    [("/api/chat", "use a client of OpenAI's API"), ("/v1/v1/messages", "base URL without /v1")],
)
def test_a_path_of_a_wrong_setting_says_what_to_set(busy: Served, path: str, fix: str) -> None:
    assert fix in busy.refused(path, {}, 404)["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_compressed_bodies_are_refused_by_name(busy: Served, encoding: str) -> None:
    """They were "not valid JSON"."""
    head = {"content-encoding": encoding}
    content = gzip.compress(b'{"content": "x"}')
    for path in ("/tokenize", "/v1/messages"):
        answer = busy.http.post(path, content=content, headers=head)
        assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
        message = answer.json()["error"]["message"]
        assert message.startswith(f"Content-Encoding: {encoding!r} is not supported"), message
        assert answer.json()["error"]["type"] == "invalid_request_error" or "messages" in path
    plain = {"content-encoding": "Identity"}
    answer = busy.http.post("/tokenize", content=b'{"content": "x"}', headers=plain)
    assert answer.status_code == 200


def test_every_error_is_counted_once(
    engines: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Include those of middleware (wrong keys, large bodies, too many streams, broken handlers),
    and those after an answer of 200. Broken handlers are in the log once."""

    def broken(*_: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(tokenization, "tokenize", broken)
    monkeypatch.setattr(middleware, "MAX_FOLLOWERS", 0)
    served = Served(
        engines(None, parallel=2), keys=["k"], body_limit=1000, disabled={"/slots": "--no-slots"}
    )
    key = {"x-api-key": "k"}
    try:
        assert served.http.get("/v1/models").status_code == 401
        for path, status in (("/v1/live", 429), ("/slots", 501), ("/none", 404)):
            assert served.http.get(path, headers=key).status_code == status
        assert served.http.get("/props", headers=key).json()["endpoint_slots"] is False
        for content, status in ((b"{", 400), (b" " * 2000, 413), (b'{"content": "x"}', 500)):
            answer = served.http.post("/tokenize", content=content, headers=key)
            assert answer.status_code == status
        metrics = served.service.metrics
        for status in (400, 401, 404, 413, 429, 500, 501):
            assert metrics.value(metrics.errors, str(status)) == 1, status
        monkeypatch.setattr(response_parts, "timings", broken)
        ask = {"prompt": "x", "max_tokens": 2, "stream": True}
        for head in (key, {**key, "x-conversation-id": "x"}):
            answer = served.http.post("/v1/completions", json=ask, headers=head)
            assert answer.text.rstrip().endswith('"code":null}}') and "server_error" in answer.text
        body = {"input": "x", "max_output_tokens": 2, "background": True}
        assert served.http.post("/v1/responses", json=body, headers=key).status_code == 200
        wait(lambda: metrics.value(metrics.errors, "500") == 4)
        written = [r.message for r in caplog.records if r.exc_info and run.is_news(r)]
        assert written == ["internal server error"] * 4, "not by uvicorn, too"
    finally:
        served.stop()


def test_health_is_green_only_while_steps_make_progress(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(engines(None, parallel=2), Settings("tiny", stall_limit=0.05))
    goes_on = threading.Event()
    cycle = served.engine.scheduler._cycle

    def stuck(after_prefill: bool) -> None:
        goes_on.wait(20)
        cycle(after_prefill)

    try:
        assert served.http.get("/health").json() == {"status": "ok"}
        monkeypatch.setattr(served.engine.scheduler, "_cycle", stuck)
        done = []
        thread = threading.Thread(
            target=lambda: done.append(served.post("/v1/completions", prompt="x", max_tokens=2))
        )
        thread.start()
        end = time.monotonic() + 20
        while (response := served.http.get("/health")).status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert response.status_code == 503 and response.json()["status"] == "error"
        goes_on.set()
        thread.join()
        assert done and served.http.get("/health").status_code == 200
    finally:
        goes_on.set()
        served.stop()


def test_exposed_addresses(capfd: pytest.CaptureFixture[str]) -> None:
    assert not addresses.is_exposed(addresses.ServerAddress()) and not addresses.is_exposed(
        addresses.ServerAddress(("localhost", "127.0.0.2"))
    )
    assert not addresses.is_exposed(addresses.ServerAddress(("::1",)))
    assert not addresses.is_exposed(addresses.ServerAddress(("/run/g4.sock", "127.0.0.1")))
    assert addresses.is_exposed(addresses.ServerAddress(("0.0.0.0",))) and addresses.is_exposed(
        addresses.ServerAddress(("::1", "my.host"))
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"cannot listen on 127.0.0.1:{port}"):
            addresses.listen(addresses.ServerAddress(port=port))


def test_a_template_that_does_not_compile_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for")
    with pytest.raises(InputError, match="not a chat template: found unexpected 'end of templ"):
        _template_options.template(file)
    file.write_text("{{ messages }}")
    assert _template_options.template(file) == "{{ messages }}"


def test_options_with_commas() -> None:
    """Hosts, names and tags may be separated by commas; disabled paths have their option."""
    assert _http_options.hosts("127.0.0.1, ::1") == ("127.0.0.1", "::1")
    assert _http_options.hosts("[::1]") == ("::1",)
    with pytest.raises(UsageError, match="--host"):
        _http_options.hosts(" , ")
    assert split_commas(["a,b", "c", ""]) == ("a", "b", "c") and split_commas(None) == ()
    assert _http_options.disabled_paths(slots=True, metrics=True, page=True) == {}
    assert _template_options.template(None) is None
    off = _http_options.disabled_paths(slots=False, metrics=False, page=False)
    assert off == {"/slots": "--no-slots", "/metrics": "--no-metrics", "/": "--no-ui"}


def test_several_hosts_share_a_port(engines: Callable[..., Engine]) -> None:
    """A server with an IPv4 and an IPv6 host answers on both, on the same port."""
    address = addresses.ServerAddress(("127.0.0.1", "::1"), port=0)
    try:
        listeners = addresses.listen(address)
    except EnvironmentProblem:
        pytest.skip("this machine has no IPv6")
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    service, ready = Service(engines(None, parallel=2), Settings("tiny")), threading.Event()
    server = run.create_server(create_app(service), service, address, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
    thread.start()
    try:
        assert ready.wait(20)
        port = listeners[0].getsockname()[1]
        assert addresses.url(address, listeners) == f"http://127.0.0.1:{port}"
        for host in ("127.0.0.1", "[::1]"):
            assert httpx.get(f"http://{host}:{port}/health").status_code == 200
    finally:
        server.should_exit = True
        thread.join(20)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"cannot listen on ::1:{port}"):
            addresses.listen(addresses.ServerAddress(("127.0.0.1", "::1"), port=port))
    with socket.create_server(("127.0.0.1", port)):
        pass  # the first socket was closed again


def test_a_unix_socket_is_served_and_removed(
    engines: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind("g4.sock")  # nobody listens: the file of a server that was killed
    served = Served(engines(None, parallel=2), hosts=("127.0.0.1", "g4.sock"))
    path = tmp_path / "g4.sock"
    try:
        assert addresses.url(addresses.ServerAddress(), served.listeners[1:]) == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
            ask = {"prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
            answer = client.post("http://x/v1/completions", json=ask).json()
            assert answer["usage"]["completion_tokens"] == 2
        assert served.http.get("/health").status_code == 200
        with pytest.raises(EnvironmentProblem, match=r"g4\.sock: found Address already in use"):
            addresses.listen(addresses.ServerAddress(("g4.sock",)))
        assert path.is_socket()
    finally:
        served.stop()
    assert not path.exists()


def test_no_file_is_replaced_by_a_unix_socket(tmp_path: Path) -> None:
    file = tmp_path / "notes.sock"
    file.write_text("mine")
    for host in (str(file), str(tmp_path / "no" / "g4.sock"), str(tmp_path / f"{'x' * 200}.sock")):
        with pytest.raises(EnvironmentProblem, match="Choose another `host`"):
            addresses.listen(addresses.ServerAddress(("127.0.0.1", host), port=0))
    assert file.read_text() == "mine"


def start(family: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    """Start `g4spec serve` without a draft in its own process and return its address."""
    command = [
        sys.executable,
        "-m",
        "g4spec",
        "serve",
        "-m",
        str(family / "target.gguf"),
        "--port",
        "0",
        "--device",
        "cpu",
        *more,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"target is served at (http://127.0.0.1:\d+)$", line.strip()):
            return process, found[1]
    raise AssertionError(process.wait())


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGHUP], 1))
def test_the_first_signal_drains_and_the_second_stops(number: int, family: Path) -> None:
    process, url = start(family, "-a", "target")
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            params = client.get("/props").json()["default_generation_settings"]["params"]
            assert (params["temperature"], params["top_k"]) == (1.0, 64)  # recommended by the file
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data:")
                process.send_signal(number)
                rest = [line for line in lines if line]
                assert rest[-1] == "data: [DONE]"  # running requests are finished
            with pytest.raises(httpx.TransportError):
                client.get("/health")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()

    process, url = start(family)
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            long = {**body, "max_tokens": 6000}
            with client.stream("POST", "/v1/completions", json=long) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(number)
                with pytest.raises(httpx.TransportError):
                    while True:  # until connections are refused
                        httpx.get(f"{url}/health", verify=False)
                process.send_signal(number)
                with pytest.raises(httpx.TransportError):
                    list(lines)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0
        assert {json.loads(line)["level"] for line in log.splitlines()} == {"info"}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("hard", "limit", "told"), [(4096, 4096, False), (300, 300, True), (-1, 1 << 20, False)]
)
def test_the_limit_of_open_files_is_raised(
    hard: int,
    limit: int,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each connection needs one; many systems start programs with 256 or 1024."""
    resource = pytest.importorskip("resource")
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: made.append(limits))
    with caplog.at_level(logging.WARNING, "g4spec.server"):
        run.raise_file_limit(1000)
    assert made == [(limit, hard)]
    assert [record.facts["needed"] for record in caplog.records] == [1128] * told
