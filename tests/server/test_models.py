"""Several models behind one port."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from g4spec import convert
from g4spec.errors import EnvironmentProblem, InputError
from g4spec.runtime.engine import Engine
from g4spec.server import addresses, middleware, run, sse
from g4spec.server.loaded_models import LoadedModels
from g4spec.server.model_folder import Load, Progress, find_models
from g4spec.server.model_router import ModelRouter, create_app
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Service
from g4spec.server.settings import Settings
from tests.server.conftest import TINY
from tests.server.running_server import Served, wait

ASK: dict[str, Any] = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0, "draft_max": 3}


@pytest.fixture(scope="module")
def folder(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two targets, a draft in the folder of one of them, and a draft of neither."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "sub").mkdir()
    shutil.copy(family / "target.gguf", folder / "first.gguf")
    shutil.copy(family / "dflash.gguf", folder / "sub" / "dflash.gguf")
    convert.convert(TINY / "target", folder / "sub" / "second.gguf", type="q4_0")
    (folder / "sub" / "notes.txt").write_text("no model")
    return folder


class ModelLoader:
    """Opens models while fewer than `most` are open and `gate` is set; counts opened models."""

    def __init__(self, most: int = 9) -> None:
        self.most, self.opened = most, []  # type: ignore[var-annotated]
        self.gate = threading.Event()
        self.gate.set()
        self.live: list[Engine] = []

    def __call__(
        self, names: list[str], target: Path, draft: Path | None, tell: Progress
    ) -> Service:
        assert self.gate.wait(30)
        self.live = [engine for engine in self.live if not engine._closed]
        if len(self.live) >= self.most:
            raise EnvironmentProblem("not enough memory")
        self.opened += names
        engine = Engine.load(target, draft, n_ctx=512, parallel=2, progress=tell)
        self.live.append(engine)
        return Service(engine, Settings(*names))


class ModelServer:
    """A folder of models behind HTTP."""

    def __init__(
        self,
        folder: Path,
        room: Load,
        *,
        autoload: bool = True,
        keys: Sequence[str] = (),
        **more: Any,
    ) -> None:
        self.models = LoadedModels(find_models(folder), room, **more)
        address, ready = addresses.ServerAddress(port=0), threading.Event()
        listeners = addresses.listen(address)
        self.router = ModelRouter(self.models, autoload=autoload)
        app = create_app(self.router, keys=keys)
        self.server = run.create_server(app, self.models, address, ready.set)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": listeners})
        self._thread.start()
        assert ready.wait(20)
        self.http = httpx.Client(
            base_url=addresses.url(address, listeners), timeout=120, verify=False
        )

    def status(self) -> dict[str, str]:
        data = self.http.get("/v1/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in data}

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def room() -> ModelLoader:
    return ModelLoader()


@pytest.fixture
def several(folder: Path, room: ModelLoader) -> Iterator[ModelServer]:
    served = ModelServer(folder, room, max_loaded=2)
    yield served
    served.stop()
    assert all(engine._closed for engine in room.live)


def test_each_target_finds_its_draft(folder: Path, family: Path) -> None:
    found = {model.name: [path.name for path in model.drafts] for model in find_models(folder)}
    assert found == {"first": ["dflash.gguf"], "second": ["dflash.gguf"]}
    for wrong, message in (
        (folder / "sub" / "notes.txt", "not a folder"),
        (folder / "none", "not a folder"),
    ):
        with pytest.raises(InputError, match=message):
            find_models(wrong)


def test_requests_choose_a_model(several: ModelServer, room: ModelLoader, plain: Served) -> None:
    http = several.http
    assert several.status() == {"first": "unloaded", "second": "unloaded"}
    before = http.get("/v1/models/second").json()
    assert before["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert http.get("/health").status_code == 200
    assert "/models/load" in http.get("/openapi.json").json()["paths"]
    assert several.status() == {"first": "unloaded", "second": "unloaded"}
    answer = http.post("/v1/completions", json={**ASK, "model": "first"}).json()
    assert answer["model"] == "first" and answer["timings"]["draft_n"] > 0
    assert answer["choices"] == plain.post("/v1/completions", **ASK)["choices"]
    assert http.post("/v1/completions", json=ASK).json()["model"] == "first"  # used last
    other = http.post("/v1/completions", json={**ASK, "model": "second"}).json()
    assert other["model"] == "second" and other["usage"] == answer["usage"]
    assert several.status() == {"first": "loaded", "second": "loaded"}
    assert room.opened == ["first", "second"]
    data = http.get("/v1/models/second").json()
    assert data["draft"] == "dflash.gguf" and data["meta"]["n_ctx"] == 512
    assert data["meta"] == {"n_ctx": 512, **before["meta"]} and before["meta"]["n_params"] > 0
    assert http.get("/props?model=first").json()["model_alias"] == "first"
    assert "vllm:" in http.get("/metrics?model=second").text
    for method, path, body in (
        ("POST", "/v1/completions", {**ASK, "model": "third"}),
        ("GET", "/v1/models/third", None),
        ("GET", "/props?model=third", None),
        ("POST", "/models/load", {"model": "third"}),
    ):
        refused = http.request(method, path, json=body)
        assert refused.status_code == 404, refused.text
        assert refused.json()["error"]["code"] == "model_not_found"
    for content, says in (  # all were "name the model to load or unload"
        (b"{}", "model: missing"),
        (b'{"model": 7}', "model: expected a string, found 7"),
        (b'{"model": "first"', "not valid JSON"),
        (b"model=first", "not valid JSON"),
    ):
        refused = http.post("/models/load", content=content)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
    assert http.post("/v1/completions", content=b"{").status_code == 400
    assert http.post("/v1/completions", content=b"[]").status_code == 400
    marked = b'\xef\xbb\xbf{"model": "first"}'  # as programs of Windows write it
    assert http.post("/models/unload", content=marked).json()["success"]
    assert http.post("/tokenize", content=b'\xef\xbb\xbf{"content": "a"}').status_code == 200
    assert several.status() == {"first": "unloaded", "second": "loaded"}


def test_events_report_loading(several: ModelServer) -> None:
    seen: list[dict[str, Any]] = []
    with several.http.stream("GET", "/models/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        thread = threading.Thread(
            target=several.http.post, args=("/models/load",), kwargs={"json": {"model": "first"}}
        )
        for line in stream.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
            if len(seen) == 2 and not thread.ident:
                thread.start()
            if seen and seen[-1]["status"]["value"] == "loaded":
                break
    thread.join()
    first = [m["status"] for m in seen if m["id"] == "first"]
    assert first[0] == {"value": "unloaded"} and first[-1] == {"value": "loaded"}
    read = [(s["bytes_read"], s["bytes"]) for s in first if "bytes" in s]
    assert read == sorted(read) and all(0 < n <= most for n, most in read)
    assert "loading" in {s["value"] for s in first}


def test_open_streams_have_a_limit_and_pings(
    folder: Path, room: ModelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MAX_FOLLOWERS", 2)
    monkeypatch.setattr(sse, "Settings", partial(Settings, ping=0.05))
    served = ModelServer(folder, room, max_loaded=2)
    try:
        events = partial(served.http.stream, "GET", "/models/events")
        with events() as first, events() as second:
            assert (first.status_code, second.status_code) == (200, 200)
            lines = first.iter_lines()  # its end would close the stream
            assert ": ping" in lines
            for path in ("/models/events", "/v1/stream?conv_id=x", "/v1/live"):
                refused = served.http.get(path)
                assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
                assert refused.json()["error"]["code"] == "too_many_streams"
            assert served.http.get("/v1/models").status_code == 200

        def is_free() -> bool:
            with events() as stream:
                return stream.status_code == 200

        wait(is_free)
    finally:
        served.stop()


@pytest.mark.parametrize("by", ["count", "memory"])
def test_the_least_recently_used_model_is_unloaded(folder: Path, by: str) -> None:
    room = ModelLoader(1 if by == "memory" else 9)
    served = ModelServer(folder, room, max_loaded=1 if by == "count" else 9)
    try:
        http, seen = served.http, set()
        with http.stream(
            "POST",
            "/v1/completions",
            json={
                **ASK,
                "model": "first",
                "max_tokens": 60,
                "ignore_eos": True,
                "stream": True,
            },
        ) as response:
            lines = response.iter_lines()
            next(lines)
            answers: list[Any] = []
            asks = threading.Thread(
                target=lambda: answers.append(
                    httpx.post(
                        f"{http.base_url}/v1/completions",
                        json={**ASK, "model": "second"},
                        timeout=60,
                    )
                )
            )
            asks.start()
            while not seen >= {"loading"}:  # it waits until the first model is no longer in use
                seen.add(served.status()["second"])
                time.sleep(0.01)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        asks.join()
        assert answers[0].json()["model"] == "second"
        assert served.status() == {"first": "unloaded", "second": "loaded"}
        assert http.post("/v1/completions", json={**ASK, "model": "first"}).status_code == 200
        assert room.opened == ["first", "second", "first"]
    finally:
        served.stop()


def test_the_live_view_does_not_keep_a_model_loaded(several: ModelServer) -> None:
    """The page needs no model, and the live view of a model ends when the model is unloaded."""
    http = several.http
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert several.status() == {"first": "unloaded", "second": "unloaded"}
    with http.stream("GET", "/v1/live?model=first") as watched:
        lines = watched.iter_lines()
        assert next(lines) == "event: hello"
        unloaded = httpx.post(f"{http.base_url}/models/unload", json={"model": "first"}, timeout=60)
        assert unloaded.json()["success"]
        assert "event: end" not in list(lines)
    assert several.status() == {"first": "unloaded", "second": "unloaded"}


def test_models_can_be_loaded_by_request_only_if_wanted(folder: Path) -> None:
    """Without autoload only /models/load loads; /props describes the router."""
    served = ModelServer(folder, ModelLoader(), max_loaded=2, autoload=False)
    try:
        refused = served.http.post("/v1/completions", json={**ASK, "model": "first"})
        assert refused.status_code == 400 and "/models/load" in refused.json()["error"]["message"]
        props = served.http.get("/props").json()
        assert (props["role"], props["max_instances"]) == ("router", 2)
        assert props["models_autoload"] is False and "model_alias" not in props
        assert served.http.post("/models/load", json={"model": "first"}).json()["success"]
        assert served.http.post("/v1/completions", json=ASK).json()["model"] == "first"
        assert served.http.get("/props").json()["model_alias"] == "first"
    finally:
        served.stop()


WITHOUT_MODEL = (
    ("GET", "/nope", 404),
    ("GET", "/favicon.ico", 404),
    ("POST", "/v1/nope", 404),
    ("POST", "/v1/nope?model=first", 404),
    ("POST", "/health", 405),
    ("POST", "/", 405),
    ("DELETE", "/v1/models/first", 405),
    ("OPTIONS", "/v1/chat/completions", 405),
    ("GET", "/v1/chat/completions", 405),
    ("HEAD", "/", 200),
    ("HEAD", "/health", 200),
    ("HEAD", "/props", 200),
    ("HEAD", "/openapi.json", 200),
    ("HEAD", "/v1/models", 200),
    ("HEAD", "/v1/models/first", 200),
    ("HEAD", "/models/events", 200),
    ("GET", "/health/", 404),
    ("GET", "/v1/responses/resp_x/", 404),
    ("GET", "/metrics", 200),
    ("HEAD", "/metrics", 200),
    ("GET", "/slots", 503),
    ("HEAD", "/slots", 503),
    ("GET", "/v1/live", 503),
    ("GET", "/v1/responses/resp_x", 404),
    ("DELETE", "/v1/responses/resp_x", 404),
    ("POST", "/v1/responses/resp_x/cancel", 404),
)
"""Requests that need no model, or one that is loaded: method, path, status."""


def test_a_body_that_ends_too_early_is_not_handed_on(
    folder: Path, room: ModelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client had left; what had arrived was handed on as if it were all of it."""
    served = ModelServer(folder, room, max_loaded=2)
    try:
        assert served.http.post("/models/load?model=first").status_code == 200
        caplog.set_level(logging.INFO, "g4spec.server")
        url = served.http.base_url
        with socket.create_connection((url.host, url.port)) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n"
            client.sendall(head + b'{"prompt": ')
            time.sleep(0.2)

        def found() -> list[int]:
            facts = [getattr(record, "facts", {}) for record in caplog.records]
            return [each["status"] for each in facts if each.get("path") == "/v1/completions"]

        wait(found)
        assert found() == [499]
    finally:
        served.stop()


@pytest.mark.parametrize("autoload", [True, False])
def test_only_posts_and_names_load_a_model(folder: Path, autoload: bool) -> None:
    """Probes, scrapes, wrong paths and wrong methods loaded one."""
    room = ModelLoader()
    served = ModelServer(folder, room, max_loaded=2, autoload=autoload)
    try:
        for method, path, status in WITHOUT_MODEL:
            response = served.http.request(method, path)
            assert response.status_code == status, (method, path, response.text)
            assert ("allow" in response.headers) == (status == 405)
            if status > 400 and method != "HEAD":
                assert response.json()["error"]["message"], (method, path)
        assert "no model is loaded" in served.http.get("/slots").json()["error"]["message"]
        served.http.post("/v1/completions?model=third", json={})
        metrics = served.http.get("/metrics").text.splitlines()
        more = {404: 1, 503: 1}  # of the two requests above
        for status in (404, 405, 503):
            n = sum(each == status for *_, each in WITHOUT_MODEL) + more.get(status, 0)
            assert f'g4spec:router_request_refused_total{{status="{status}"}} {n}.0' in metrics
        assert served.http.get("/v1/messages").json()["type"] == "error"
        assert room.opened == [] and "loading" not in served.status().values()
        served.http.post("/models/load", json={"model": "first"})
        for path in ("/metrics", "/slots", "/health", "/health?model=second"):
            for method in ("GET", "HEAD"):
                assert served.http.request(method, path).status_code == 200
        assert served.http.get("/v1/responses/resp_x").status_code == 404
        assert room.opened == ["first"]
    finally:
        served.stop()


def test_no_request_without_a_key_loads_a_model(folder: Path) -> None:
    room = ModelLoader()
    served = ModelServer(folder, room, max_loaded=2, keys=["k1"])
    try:
        for query in ("", "?model=first"):
            for path in ("/", "/health", "/v1/health", "/openapi.json"):
                for method in ("GET", "HEAD"):
                    assert served.http.request(method, path + query).status_code == 200
                for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                    assert served.http.request(method, path + query).status_code == 401
        assert room.opened == []
    finally:
        served.stop()


def test_an_idle_model_is_unloaded(folder: Path) -> None:
    served = ModelServer(folder, ModelLoader(), max_loaded=2, sleep_seconds=0.4)
    try:
        ask = {**ASK, "model": "first"}
        choices = served.http.post("/v1/completions", json=ask).json()["choices"]
        wait(lambda: served.status()["first"] == "unloaded")
        assert served.http.post("/v1/completions", json=ask).json()["choices"] == choices
    finally:
        served.stop()


def test_probes_and_scrapes_do_not_keep_a_model_loaded(folder: Path) -> None:
    """Only POST counts as use, as in a server of one model."""
    served = ModelServer(folder, ModelLoader(), max_loaded=2, sleep_seconds=0.4)
    try:
        http = served.http
        http.post("/models/load", json={"model": "first"})
        end = time.monotonic() + 10
        while http.get("/slots").status_code == 200:
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
            assert time.monotonic() < end
        assert served.status() == {"first": "unloaded", "second": "unloaded"}
    finally:
        served.stop()


def test_a_get_request_holds_its_model(folder: Path) -> None:
    """An idle model is not unloaded before the request ends, and then without another delay."""

    async def work() -> None:
        models = LoadedModels(find_models(folder), ModelLoader(), max_loaded=1, sleep_seconds=0.1)
        first = models.all["first"]
        await models.load(first)
        idle = asyncio.ensure_future(models.unload_idle_models())
        with models.use(first, keeps_loaded=False):
            used = first.used
            await asyncio.sleep(0.5)
            assert first.status == "loaded"
        assert first.used == used
        while first.status == "loaded":
            await asyncio.sleep(0.01)
        idle.cancel()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_client_that_gives_up_unloads_no_model(folder: Path) -> None:
    """It waited for room, which is no longer needed: the model in use stays loaded."""
    room = ModelLoader()
    served = ModelServer(folder, room, max_loaded=1)
    try:
        first, second = served.models.all["first"], served.models.all["second"]
        served.http.post("/v1/completions", json={**ASK, "model": "first"})
        first.n_requests += 1
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/completions", json={**ASK, "model": "second"}, timeout=0.5)
        wait(lambda: second.loading is None)
        assert served.status() == {"first": "loaded", "second": "unloaded"}
        first.n_requests -= 1
        # Requests that wait together share one load; the model is not unloaded before they start.
        ask = {**ASK, "model": "second"}
        answers: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(served.http.post("/v1/completions", json=ask))
            )
            for _ in range(3)
        ]
        room.gate.clear()
        for thread in threads:
            thread.start()
        wait(lambda: second.n_waiting == 3)
        room.gate.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert room.opened == ["first", "second"]
        wait(lambda: not second.is_used)
        # Two models that need the only free place are loaded one after the other.
        room.gate.clear()
        answers.clear()
        other = {**ASK, "model": "first"}
        threads = [
            threading.Thread(
                target=lambda ask=ask: answers.append(served.http.post("/v1/completions", json=ask))
            )
            for ask in (other, ask, other)
        ]
        threads[0].start()
        wait(lambda: first.opening)
        for thread in threads[1:]:
            thread.start()
        wait(lambda: second.n_waiting == 1 and first.n_waiting == 2)
        room.gate.set()
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in answers] == [200] * 3
    finally:
        room.gate.set()
        served.stop()


def test_a_request_can_follow_one_that_gave_up_at_once(folder: Path) -> None:
    """It does not get the cancellation of the load that nobody waited for."""
    room = ModelLoader()

    async def work() -> None:
        models = LoadedModels(find_models(folder), room, max_loaded=1)
        first, second = models.all["first"], models.all["second"]
        await models.load(first)
        first.n_requests += 1
        gives_up = asyncio.ensure_future(models.load(second))
        await asyncio.sleep(0.05)
        gives_up.cancel()
        follows = asyncio.ensure_future(models.load(second))
        await asyncio.sleep(0.05)
        first.n_requests -= 1
        models._changed.set()
        await asyncio.wait_for(follows, 30)
        assert gives_up.cancelled() and second.is_ready and not second.is_used
        await models.close()

    asyncio.run(work())
    assert room.opened == ["first", "second"]


def test_an_unload_that_waits_delays_no_other_model(folder: Path) -> None:
    """Requests of the model itself wait without polling, until it is unloaded or stays loaded."""
    room, opened = ModelLoader(), dict[str, Service]()

    def load(names: list[str], *more: Any) -> Service:
        return opened.pop(names[0], None) or room(names, *more)

    async def work() -> None:
        models = LoadedModels(find_models(folder), load, max_loaded=2, max_wait=2.0)
        first, second = models.all["first"], models.all["second"]
        await models.load(first)
        opened["second"] = room(["second"], second.target, None, lambda *_: None)
        first.n_requests += 1
        unload = asyncio.ensure_future(models.unload(first))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(models.load(second), 1.8)
        assert second.is_ready and first.service is not None and not unload.done()
        again, turns = asyncio.ensure_future(models.load(first)), 0
        waited = models._load_in_turn

        async def counted(model: Any) -> None:
            nonlocal turns
            turns += 1
            await waited(model)

        models._load_in_turn = counted  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="first is in use"):
            await unload
        await asyncio.wait_for(again, 30)
        assert turns == 1 and first.is_ready and room.opened == ["first", "second"]
        unload, unload_2 = (asyncio.ensure_future(models.unload(first)) for _ in range(2))
        await asyncio.sleep(0.05)
        again = asyncio.ensure_future(models.load(first))
        await asyncio.sleep(0.05)
        assert not again.done() and first.service is not None
        first.n_requests -= 1
        models._changed.set()
        await asyncio.wait_for(asyncio.gather(unload, unload_2, again), 30)
        assert first.is_ready and room.opened == ["first", "second", "first"]
        await models.close()

    asyncio.run(work())


def test_wrong_methods_and_unexpected_errors(folder: Path) -> None:
    """Both get an error in JSON, as from a server of one model."""

    def broken(*_: Any) -> Service:
        raise RuntimeError("SECRET")

    served = ModelServer(folder, broken, max_loaded=1)
    try:
        for method, path in (
            ("POST", "/models/events"),
            ("GET", "/models/load"),
            ("DELETE", "/models/unload"),
        ):
            response = served.http.request(method, path, params={"model": "first"})
            assert response.status_code == 405, response.text
            assert f"{path} does not accept {method}" in response.json()["error"]["message"]
        response = served.http.post("/v1/completions", json=ASK)
        error = response.json()["error"]
        assert response.status_code == 500 and error["type"] == "server_error"
        assert "see the server's log" in error["message"] and "SECRET" not in response.text
    finally:
        served.stop()


def test_a_stream_that_waits_for_its_model(folder: Path) -> None:
    """It continues without its client, can be resumed, and can be cancelled."""
    room = ModelLoader()
    served = ModelServer(folder, room, max_loaded=1)
    head = {"X-Conversation-Id": "chat"}
    ask = {**ASK, "model": "first", "stream": True}

    def stream(method: str = "GET", of: str = "chat") -> httpx.Response:
        return served.http.request(method, f"/v1/stream?conv_id={of}")

    try:
        room.gate.clear()
        errors: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: errors.append(
                served.http.post("/v1/completions", json=ask, headers=head)
            )
        )
        thread.start()
        wait(lambda: served.status()["first"] == "loading")
        wait(lambda: stream().status_code == 503)
        assert stream(of="other").status_code == 404
        for method in ("GET", "DELETE"):
            assert stream(method, of="").json()["error"]["param"] == "conv_id"
            assert stream(method, of="").status_code == 400
        assert stream("DELETE").status_code == 204
        thread.join()
        assert errors[0].status_code == 400 and "cancelled" in errors[0].text
        assert stream().status_code == 404
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/completions", json=ask, headers=head, timeout=0.3)
        assert stream().status_code == 503
        room.gate.set()
        wait(lambda: stream().status_code == 200)
        text = stream().text
        assert "data: [DONE]" in text and text.startswith("id: 1\n")
        assert stream("DELETE").status_code == 204 and stream().status_code == 404
        assert served.status()["second"] == "unloaded", "no stream loads a model"
    finally:
        room.gate.set()
        served.stop()


def test_a_stream_of_another_model_cancels_one_with_its_id(folder: Path) -> None:
    """It waits for the old one neither if both models are loaded, nor if there is room for one."""
    served = ModelServer(folder, ModelLoader(), max_loaded=1)
    first, second = served.models.all["first"], served.models.all["second"]
    head = {"X-Conversation-Id": "chat"}
    ask = {**ASK, "max_tokens": 150, "ignore_eos": True, "stream": True}

    def begin(model: str, key: str = "chat") -> Any:
        return served.http.stream(
            "POST",
            "/v1/completions",
            json={**ask, "model": model},
            headers={"X-Conversation-Id": key},
        )

    try:
        for places in (1, 2):
            served.models.max_loaded = places
            with begin("first") as old, begin("first", "other") if places == 2 else nullcontext():
                lines = old.iter_lines()
                next(lines)
                short = {**ask, "model": "second", "max_tokens": 4}
                answer = served.http.post("/v1/completions", json=short, headers=head)
                assert "data: [DONE]" in answer.text
                assert not any("[DONE]" in line for line in lines), "the old one was cancelled"
                assert served.http.get("/v1/stream?conv_id=chat").text == answer.text
                if places == 2:
                    query = "/v1/stream?conv_id=chat&model=first"
                    assert served.http.get(query).status_code == 404
                    assert "[DONE]" in served.http.get("/v1/stream?conv_id=other").text
            wait(lambda: not first.is_used and not second.is_used)
    finally:
        served.stop()


def test_what_has_no_client_keeps_a_model_loaded(folder: Path) -> None:
    """A background response and a stream whose client has left end before their model is unloaded,
    and meanwhile the stream can be resumed and cancelled."""
    served = ModelServer(folder, ModelLoader(), max_loaded=1)
    first = served.models.all["first"]
    head = {"X-Conversation-Id": "chat"}
    long = {"model": "first", "temperature": 0, "ignore_eos": True, "draft_max": 0}
    answers: list[httpx.Response] = []

    def begin(path: str, **body: Any) -> threading.Thread:
        def ask() -> None:
            answers.append(httpx.post(f"{served.http.base_url}{path}", json=body, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        wait(lambda: first.unloading)
        return thread

    def open_texts() -> int:
        return first.service.open if first.service is not None else 0

    try:
        ask = {**long, "input": "x", "background": True, "max_output_tokens": 150}
        assert served.http.post("/v1/responses", json=ask).json()["status"] == "in_progress"
        engine = served.models.all["first"].service.engine  # type: ignore[union-attr]
        thread = begin("/models/unload", model="first")
        assert open_texts() == 1 and first.service is not None
        thread.join()
        assert answers.pop().json()["success"] and engine._closed
        assert served.status()["first"] == "unloaded"

        stream = {**ASK, **long, "max_tokens": 400, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=stream, headers=head) as response:
            next(response.iter_lines())
        wait(lambda: first.n_requests == 0)
        thread = begin("/v1/completions", **{**ASK, "model": "second"})
        with served.http.stream("GET", "/v1/stream?conv_id=chat") as resumed:
            assert resumed.status_code == 200 and next(resumed.iter_lines()) == "id: 1"
        assert open_texts() == 1 and not answers
        assert served.http.delete("/v1/stream?conv_id=chat").status_code == 204
        thread.join()
        assert answers.pop().json()["model"] == "second"
        assert served.status() == {"first": "unloaded", "second": "loaded"}
    finally:
        served.stop()


def test_stored_responses_belong_to_no_model(folder: Path, room: ModelLoader) -> None:
    """They are found without a model's name, load none, and outlive the one that wrote them."""
    served = ModelServer(folder, room, max_loaded=1)
    http, first = served.http, served.models.all["first"]
    ask = {"input": "x", "temperature": 0, "max_output_tokens": 400, "draft_max": 0}
    body = {**ask, "model": "first", "background": True, "ignore_eos": True}

    def begin() -> str:
        return str(http.post("/v1/responses", json=body).json()["id"])

    def get(path: str, method: str = "GET") -> Any:
        response = http.request(method, f"/v1/responses/{path}")
        assert response.status_code == 200, response.text
        return response.json()

    try:
        name = begin()
        other = threading.Thread(
            target=http.post, args=("/v1/completions",), kwargs={"json": {**ASK, "model": "second"}}
        )
        other.start()
        wait(lambda: first.unloading)
        assert get(name)["status"] == "in_progress"  # its model takes no requests now
        assert get(f"{name}/cancel", "POST")["status"] == "cancelled"
        other.join()
        assert served.status() == {"first": "unloaded", "second": "loaded"}
        assert get(name)["model"] == "first" and get(f"{name}?model=second") == get(name)
        for path in (f"{name}/input_items", f"{name}/input_items?model=first&limit=1"):
            assert get(path)["data"][0]["content"][0]["text"] == "x"
        for method, path in (("GET", name), ("DELETE", name), ("POST", f"{name}/cancel")):
            refused = http.request(method, f"/v1/responses/{path}?model=third")
            assert refused.json()["error"]["code"] == "model_not_found"
        refused = http.get(f"/v1/responses/{name}?models=first")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "models"
        wrote = {}
        for more, model in (({"model": "second"}, "second"), ({}, "first")):
            again = {**ask, "max_output_tokens": 4, "previous_response_id": name, **more}
            next_one = http.post("/v1/responses", json=again).json()
            assert next_one["model"] == model, "without a name, that of the response"
            assert len(get(f"{next_one['id']}/input_items")["data"]) >= 2
            wrote[model] = next_one["output"][-1]["id"]
        refer = [{"type": "item_reference", "id": wrote[name]} for name in ("first", "second")]
        referred = {
            **ask,
            "max_output_tokens": 4,
            "input": [*refer, {"role": "user", "content": "y"}],
        }
        assert http.post("/v1/responses", json=referred).json()["model"] == "second"
        gone = {**again, "previous_response_id": "resp_gone"}
        refused = http.post("/v1/responses", json=gone)
        assert refused.json()["error"]["code"] == "response_not_found"
        assert get(name, "DELETE")["deleted"]
        missing = http.get(f"/v1/responses/{name}")
        assert missing.json()["error"]["code"] == "response_not_found"
        assert http.put(f"/v1/responses/{name}").status_code == 405
        assert room.opened == ["first", "second", "first", "second"]

        name = begin()
        loop = served.server._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(served.models._unload(first), loop).result(20)
        assert get(name)["status"] == "failed", "nobody writes it any more"
    finally:
        served.stop()


def test_a_model_that_cannot_be_loaded_reports_the_reason(folder: Path) -> None:
    served = ModelServer(folder, ModelLoader(0), max_loaded=2)
    try:
        refused = served.http.post("/v1/completions", json={**ASK, "model": "first"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "not enough memory" in refused.json()["error"]["message"]
        status = served.http.get("/v1/models/first").json()["status"]
        assert status == {"value": "unloaded", "error": "not enough memory"}
    finally:
        served.stop()
