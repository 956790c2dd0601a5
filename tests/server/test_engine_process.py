"""The engine in its own process: the same texts, and recovery from failures."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from g4spec.errors import (
    EnvironmentProblem,
    G4Error,
    InputError,
    KernelCompileError,
    PromptTooLong,
    UsageError,
)
from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.ops.simple import SimpleOps
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from g4spec.server import engine_client
from g4spec.server.engine_client import EngineClient
from g4spec.server.engine_process import RequestRelay, Worker, pickle_options
from g4spec.server.model_folder import Model
from g4spec.server.remote_request import EngineLost
from g4spec.server.settings import Settings
from tests.server import faulty_engines as faulty
from tests.server.conftest import TINY
from tests.server.running_server import Served, wait
from tests.support.selection import sample

ROOT = TINY.parents[1]
SETUP: dict[str, Any] = {"n_ctx": 2048, "parallel": 3, "prefix_cache": 64 << 20}


@pytest.fixture(scope="module")
def client(family: Path) -> Iterator[EngineClient]:
    with EngineClient(
        family / "target.gguf", family / "dflash.gguf", make=faulty.load, **SETUP
    ) as made:
        yield made


@pytest.fixture(scope="module")
def local(family: Path) -> Iterator[Served]:
    """The same engine in this process, with the same number of threads: logits depend on it."""
    torch.set_num_threads(1)
    with Engine.load(family / "target.gguf", family / "dflash.gguf", **SETUP) as engine:
        served = Served(engine)
        yield served
        served.stop()


@pytest.fixture(scope="module")
def remote(client: EngineClient) -> Iterator[Served]:
    served = Served(client)
    yield served
    served.stop()


until = partial(wait, seconds=60)


@pytest.mark.usefixtures("forked")
def test_an_idle_engine_sleeps_and_wakes(family: Path, busy: Served) -> None:
    """A sleeping engine has no process; GET requests leave it asleep, any POST wakes it."""
    with EngineClient(
        family / "target.gguf", family / "dflash.gguf", make=faulty.load, **SETUP
    ) as engine:
        served = Served(engine, Settings("tiny", sleep_seconds=0.4))

        def asleep() -> bool:
            return bool(served.http.get("/props").json()["is_sleeping"])

        try:
            ask: dict[str, Any] = {"prompt": "def area(r):", "max_tokens": 9, "seed": 3}
            answer = served.post("/v1/completions", **ask)
            awake = served.http.get("/metrics").text, served.http.get("/metrics").text
            first = engine.process
            until(asleep)
            assert first is not None
            until(lambda: not Path(f"/proc/{first}").exists() or sys.platform != "linux")
            for path in ("/health", "/slots", "/v1/models"):
                assert served.http.get(path).status_code == 200
            assert served.http.get("/metrics").text == awake[1] and asleep()
            again = served.post("/v1/completions", **ask)
            assert again["choices"] == answer["choices"] and not asleep()
            assert engine.process != first and engine.failed is None
            until(asleep)
            served.post("/tokenize", content="x")
            assert not asleep()
            until(asleep)
            second = engine.process
            engine.wake()
            until(lambda: engine.process not in (None, second))
            assert engine.sleep(), "while it is loading, too"
            again = served.post("/v1/completions", **ask)
            assert again["choices"] == answer["choices"]
        finally:
            served.stop()
    assert not engine.sleep(), "it is closed"


@pytest.mark.usefixtures("forked")
def test_health_stays_green_while_a_sleeping_engine_wakes(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a probe ends the server at the first request. A failure or hang then is reported."""
    make = partial(faulty.load_or_exit, tmp_path / "broken")
    with EngineClient(family / "target.gguf", None, make=make, n_ctx=256) as engine:
        served = Served(engine, Settings("tiny"))

        def health() -> int:
            return served.http.get("/health").status_code

        def wake() -> set[int]:
            """Return the statuses until the engine runs, or one that is not 200."""
            seen: list[int] = []
            assert engine.sleep() and health() == 200
            engine.wake()
            until(lambda: seen.append(health()) or engine._channel or seen[-1] != 200)
            return set(seen)

        try:
            assert wake() == {200} and engine._channel is not None and health() == 200
            (tmp_path / "slow").write_text("")
            with monkeypatch.context() as patched:
                patched.setattr(engine_client, "WAKE_SECONDS", 0.1)
                assert 503 in wake()
                until(lambda: health() == 200)
            (tmp_path / "broken").write_text("")
            assert wake() == {200, 503}
            (tmp_path / "slow").unlink()
            (tmp_path / "broken").unlink()
            until(lambda: health() == 200)
            assert engine.process is not None
            os.kill(engine.process, signal.SIGKILL)
            until(lambda: health() == 503)
        finally:
            served.stop()


def test_requests_give_the_same_answers(remote: Served, local: Served) -> None:
    """With draft lengths, seeds, stop strings, log-probabilities, grammars, thoughts and tool
    calls."""
    hello = [{"role": "user", "content": "Say hello to the class."}]
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "def area(r):", "seed": 3, "draft_max": 4}),
        ("/v1/completions", {"prompt": "The cat", "seed": 4, "n": 2, "logprobs": 2}),
        ("/v1/completions", {"prompt": "The cat", "seed": 4, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "import os\n", "stop": ["\n\n", "e"], "temperature": 0}),
        ("/completion", {"prompt": "1 2 3", "grammar": 'root ::= "a" [0-9]+ "b"', "seed": 1}),
        ("/v1/chat/completions", {"messages": hello, "seed": 5, "stop": ["e"]}),
        (
            "/v1/chat/completions",
            {"messages": hello, "seed": 6, "tools": [tool], "tool_choice": "required"},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": hello,
                "seed": 7,
                "thinking_budget_tokens": 4,
                "chat_template_kwargs": {"enable_thinking": True},
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": hello,
                "seed": 8,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {
                            "type": "object",
                            "properties": {"a": {"type": "boolean"}},
                            "required": ["a"],
                            "additionalProperties": False,
                        },
                    },
                },
            },
        ),
    ]
    seen = 0
    for path, fields in asked:
        body = {**fields, "max_tokens" if path.startswith("/v1") else "n_predict": 24}
        answers = [served.post(path, **body) for served in (local, remote)]
        for answer in answers:
            for name in ("id", "created", "timings", "id_slot", "usage", "tokens_cached"):
                answer.pop(name, None)
            for choice in answer.get("choices", []):
                for call in choice.get("message", {}).get("tool_calls") or []:
                    call.pop("id")
        assert answers[0] == answers[1], body
        seen += len(str(answers[0]))
    assert seen > 1500
    events = remote.stream("/v1/completions", prompt="def area(r):", seed=3, max_tokens=24)
    whole = local.post("/v1/completions", prompt="def area(r):", seed=3, max_tokens=24)
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]


def test_timings_and_refusals_are_passed_on(remote: Served, client: EngineClient) -> None:
    remote.refused("/v1/completions", {"prompt": "a " * 4000})
    error = remote.refused("/completion", {"prompt": "a", "grammar": "root ::= ("})
    assert "GBNF" in error["message"]
    error = remote.refused("/completion", {"prompt": "a", "grammar": 'root ::= "\\q" x'})
    for options, prompt, wanted in (
        (Options(), [], InputError),
        (Options(), [10**6], InputError),
        (Options(), [2] * 2049, PromptTooLong),
        (Options(sampler=Sampler(logit_bias=((10**6, 1.0),))), [2], UsageError),
    ):
        with pytest.raises(wanted):
            client.submit(prompt, options)
    request = client.submit([2, 9], Options(n_predict=400, ignore_eos=True))
    until(lambda: client.stats().running == 1 and client.stats().slots[0].tokens)
    slots = remote.http.get("/slots").json()
    assert sum(slot["is_processing"] for slot in slots) == 1 and len(slots) == 3
    metrics = remote.http.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 1.0' in metrics
    request.cancel()
    list(request)
    assert request.stats.stop_reason == "cancelled" and 0 < len(request.ids) < 400
    until(lambda: client.stats().idle)
    assert client.stats().pages_free + 8 > client.stats().pages


def test_ops_without_a_kernel_are_noted(engines: Callable[..., Engine]) -> None:
    """The server did not say which ops of a file run in torch on a GPU."""
    request = engines(None, n_ctx=2048).submit([2, 9], Options(n_predict=1))
    list(request)
    sent, ops = list[tuple[Any, ...]](), SimpleOps()
    ops.without_kernel |= {"linear (float32)", "attend"}
    channel = SimpleNamespace(send=lambda *message: sent.append(message), send_now=print)
    worker: Any = SimpleNamespace(channel=channel, requests={1: request})
    RequestRelay(1, request, False, worker, ops)()
    name, _, _, notes, *_ = sent[-1]
    assert name == "done"
    assert notes == ["ran as torch ops on the GPU, slower than a kernel: attend, linear (float32)"]


def text_of(engine: Engine, prompt: list[int], options: Options) -> list[int]:
    return list(engine.submit(prompt, options).tokens())


PHASES = {
    "reading raises": ([2, faulty.READING, faulty.RAISES], "CUDA error"),
    "killed": ([2, 31], "SIGKILL"),
    "hangs": ([2, 31, faulty.HANGS], "no step has ended for 3 seconds"),
}


@pytest.mark.parametrize("phase", sample(PHASES, 2))
def test_a_failure_ends_only_running_requests(
    phase: str,
    remote: Served,
    client: EngineClient,
    engines: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests in the three slots end with an error, waiting ones run as usual.
    `benchmarks/serve_process.py` tests every phase, many times."""
    plain, options = engines(None, n_ctx=2048), Options(n_predict=6, ignore_eos=True)
    before, prompts = client.process, [[2, i] for i in range(20, 26)]
    long = Options(n_predict=1500, ignore_eos=True)
    lines, ended = [], threading.Event()

    def stream() -> None:
        with remote.http.stream(
            "POST",
            "/v1/completions",
            json={
                "prompt": "The cat",
                "max_tokens": 1500,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0,
                "draft_max": 0,
            },
        ) as response:
            for line in response.iter_lines():
                lines.append(line)
        ended.set()

    until(lambda: client.stats().idle)
    thread = threading.Thread(target=stream)
    thread.start()
    until(lambda: lines)  # an error before the first token is sent as a response
    failing, why = PHASES[phase]
    if phase == "hangs":
        monkeypatch.setattr(client, "hang_limit", 3.0)
    running = [client.submit(prompt, long) for prompt in ([2, 30], failing)]
    waiting = [client.submit(prompt, options) for prompt in prompts]
    if phase == "killed":
        until(lambda: client.stats().running == 3)
        assert client.process is not None
        os.kill(client.process, signal.SIGKILL)
    until(lambda: not client.is_healthy(60) or client.process != before)
    red = remote.http.get("/health").status_code
    for request in running:
        with pytest.raises(EngineLost, match=why):
            list(request)
    assert ended.wait(30)
    assert any("engine_failed" in line for line in lines[-4:]), lines[-4:]
    for request, prompt in zip(waiting, prompts, strict=True):
        assert list(request.tokens()) == text_of(plain, prompt, options)
    assert client.process != before and client.failed is None
    assert red == 503 and remote.http.get("/health").status_code == 200
    assert remote.post("/v1/completions", prompt="x", max_tokens=2)
    thread.join()


def test_the_wait_of_texts_that_never_begin_is_observed(
    remote: Served, client: EngineClient
) -> None:
    """Clients that gave up under load made the time in the queue look short."""
    metrics = remote.service.metrics

    def waited() -> float:
        (found,) = metrics.queue_time.collect()
        return sum(sample.value for sample in found.samples if sample.name.endswith("_sum"))

    until(lambda: client.stats().idle)
    long = Options(n_predict=1500, ignore_eos=True)
    running = [client.submit([2, i], long) for i in (30, 31, 32)]
    until(lambda: client.stats().running == 3)
    before, queries = waited(), metrics.value(metrics.queries)
    with pytest.raises(httpx.ReadTimeout):
        remote.http.post("/v1/completions", json={"prompt": "The cat"}, timeout=1)
    until(lambda: remote.service.open == 0)
    assert waited() - before > 0.9
    assert metrics.value(metrics.queries) == queries
    for request in running:
        request.cancel()
    read = client.submit([2, *range(100, 1600)], long)
    until(lambda: read.stats.queue_seconds)
    assert not read.ids, "known from the beginning of prefill on"
    read.cancel()


@pytest.mark.usefixtures("forked")
def test_repeated_failures_end_the_engine(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_FAILURES", 2)
    make = partial(faulty.load_once, tmp_path / "flag")
    with EngineClient(family / "target.gguf", None, make=make, n_ctx=256) as client:
        served = Served(client)
        request = client.submit([2, 9, faulty.CRASHES], Options(n_predict=9, ignore_eos=True))
        with pytest.raises(EngineLost):
            list(request)
        until(lambda: client.failed is not None)
        assert "the file is gone" in str(client.failed)
        with pytest.raises(EnvironmentProblem, match="2 times in a row"):
            client.submit([2])
        assert served.http.get("/health").status_code == 503
        error = served.refused("/v1/completions", {"prompt": "x"}, 503)
        assert "the file is gone" in error["message"]
        described = Model(
            "tiny", family / "target.gguf", service=served.service, status="loaded"
        ).json()
        assert (
            described["status"]["value"] == "failed" and "is gone" in described["status"]["error"]
        )
        served.stop()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ends", ["sleeps", "crashes", "loads"])
def test_another_file_in_place_of_the_target_ends_the_engine(
    ends: str, family: Path, tmp_path: Path
) -> None:
    """A new process loaded it, while this one kept the tokenizer and context of the old file."""
    target, other = tmp_path / "target.gguf", tmp_path / "other.gguf"
    for path in (target, other):
        shutil.copy(family / "target.gguf", path)
    make = partial(faulty.load_or_exit, tmp_path / "broken")
    with EngineClient(target, None, make=make, n_ctx=256) as engine:
        served = Served(engine, Settings("tiny"))
        try:
            first = engine.process
            if ends == "crashes":
                other.replace(target)
                os.kill(first or 0, signal.SIGKILL)
                until(lambda: engine.failed is not None)
            else:
                assert engine.sleep()
            if ends == "loads":
                engine.wake()
                until(lambda: engine.process != first)
            if ends != "crashes":
                other.replace(target)
            for _ in range(2):
                error = served.refused("/v1/completions", {"prompt": "x", "max_tokens": 2}, 503)
                assert "target.gguf was changed or removed after it was loaded" in error["message"]
                assert error["message"].count("Restart the server") == 1
            assert served.http.get("/health").status_code == 503
            assert (engine.process != first) == (ends == "loads"), "no other file is loaded"
        finally:
            served.stop()


@pytest.mark.usefixtures("forked")
def test_loading_fails_as_it_does_in_one_process(family: Path, tmp_path: Path) -> None:
    target = family / "target.gguf"
    with pytest.raises(UsageError, match="`parallel`: expected 1 to"):
        EngineClient(target, parallel=0)
    with pytest.raises(InputError, match="no such file"):
        EngineClient(tmp_path / "none.gguf")
    with pytest.raises(EnvironmentProblem, match="ended while it loaded: found exit code 9"):
        EngineClient(target, make=faulty.end)
    with pytest.raises(EnvironmentProblem, match="cannot be loaded: found OutOfMemoryError: GPU"):
        EngineClient(target, make=faulty.no_memory)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("-c", expected=1, found=[2], fix="use 1"),
        PromptTooLong(9, 4, "9 or more"),
        KernelCompileError("a.cu", ("-O3",), "no", fix="update"),
        NotFinite("not finite"),
        InputError("x"),
        EnvironmentProblem("y"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: G4Error) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again) == vars(error) and again.args == error.args


def test_without_memory_for_a_request_others_go_on() -> None:
    """The process ended, and with it all requests."""
    sent = list[Any]()

    def submit(*_: Any) -> Request:
        raise torch.OutOfMemoryError("GPU 0 has a total capacity of 1 GiB")

    engine: Any = SimpleNamespace(step_lock=nullcontext, submit=submit, failed=None)
    worker = object.__new__(Worker)
    worker._shared, worker.channel = {}, SimpleNamespace(send=lambda *m: sent.append(m))  # type: ignore[assignment]
    worker._submit(engine, 3, [2, 9], pickle_options(Options(4)))
    ((name, number, _, _, error, *_),) = sent
    assert (name, number) == ("done", 3) and isinstance(error, EnvironmentProblem)
    assert "total capacity" in str(error)


def test_ctrl_c_in_the_terminal_does_not_reach_it(client: EngineClient) -> None:
    """While it imported torch, it printed a traceback."""
    assert os.getsid(client.process) == client.process != os.getsid(0)


def test_it_ends_with_the_server(family: Path) -> None:
    """Also when the server is killed, and when a step hangs."""
    program = (
        "import sys, time; from pathlib import Path; "
        "from g4spec.server.engine_client import EngineClient; "
        "client = EngineClient(Path(sys.argv[1]), n_ctx=256, device='cpu'); "
        "print(client.process, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(family / "target.gguf")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        process = int(server.stdout.readline())
        os.kill(process, signal.SIGINT)  # Ctrl-C is for the server
        time.sleep(0.2)
        os.kill(process, 0)
        os.kill(process, signal.SIGSTOP)  # it cannot see the end of the socket
        server.kill()
        server.wait()

        def gone() -> bool:
            try:
                state = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0]
            except FileNotFoundError:
                return True
            return state == "Z"

        until(gone, seconds=10)


def test_many_readers_at_once(client: EngineClient) -> None:
    """Asyncio, threads, and requests abandoned in the middle."""

    async def read(request: Request) -> int:
        return sum([len(cycle.tokens) async for cycle in request])

    async def all_of() -> list[int]:
        short = Options(n_predict=8, ignore_eos=True)
        requests = [client.submit([2, i], short) for i in range(20, 28)]
        return await asyncio.gather(*map(read, requests))

    assert asyncio.run(all_of()) == [8] * 8
    for _ in client.submit([2, 9], Options(n_predict=900, ignore_eos=True)):
        break
    until(lambda: client.stats().idle)


def test_a_finalizer_may_cancel_a_request(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs it in any thread, also in one that has the client's lock: all
    requests waited for good."""
    left, made = client.submit([2, 9], Options(n_predict=900, ignore_eos=True)), list[Request]()
    assert client._channel is not None
    send = client._channel.send

    def collect(*message: Any) -> None:
        monkeypatch.undo()
        left.cancel()
        send(*message)

    monkeypatch.setattr(client._channel, "send", collect)
    thread = threading.Thread(
        target=lambda: made.append(client.submit([2, 9], Options(2))), daemon=True
    )
    thread.start()
    thread.join(20)
    assert made and len(list(made[0].tokens())) <= 2
    list(left)
    assert left.stats.stop_reason == "cancelled"


def test_a_reader_notices_the_end_that_another_one_read(client: EngineClient) -> None:
    """It waited for good if the other one took the news before it waited."""
    request = client.submit([2, 9], Options(n_predict=2, ignore_eos=True))
    other = threading.Thread(target=lambda: list(request))
    other.start()
    client.advance(request)
    assert request.has_news or not other.is_alive()
    other.join()
    assert list(request) == [] and request.done
