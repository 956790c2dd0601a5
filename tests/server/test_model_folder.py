"""A folder of models: the choice of drafts, and models that fail or rest."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4spec import convert, models
from g4spec.errors import EnvironmentProblem, InputError, Unsupported
from g4spec.gguf import string
from g4spec.gguf import write as write_gguf
from g4spec.server import model_folder
from g4spec.server.loaded_models import LoadedModels
from g4spec.server.model_folder import Model, find_models
from g4spec.server.remote_request import EngineLost
from g4spec.server.service import Service
from g4spec.server.settings import Settings
from tests.server.conftest import TINY
from tests.server.running_server import Served, wait
from tests.server.test_models import ASK, ModelLoader, ModelServer


@pytest.fixture(scope="module")
def folder(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two targets and a draft."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        shutil.copy(family / "target.gguf", folder / f"{name}.gguf")
    shutil.copy(family / "dflash.gguf", folder)
    return folder


@pytest.fixture
def room() -> ModelLoader:
    return ModelLoader()


def test_drafts_that_fit_equally_are_named(family: Path, tmp_path: Path, room: ModelLoader) -> None:
    """The rules cannot tell the draft of a target from one of another target of the same shape."""
    for name in ("target.gguf", "dflash.gguf"):
        shutil.copy(family / name, tmp_path)
    target = family / "target.gguf"
    convert.convert(TINY / "dflash-other", tmp_path / "dflash-other.gguf", target=target)
    served = ModelServer(tmp_path, room, max_loaded=2)
    try:
        model = served.http.get("/v1/models").json()["data"][0]
        assert model["draft"] == "dflash-other.gguf"
        assert model["other_drafts"] == ["dflash.gguf"]
        note = served.models.all["target"].draft_note()
        assert note.startswith("target: draft dflash-other.gguf; dflash.gguf fits too (to choose")
    finally:
        served.stop()
    (tmp_path / "dflash-other.gguf").unlink()
    (model,) = find_models(tmp_path)
    assert model.json()["other_drafts"] == []
    assert model.draft_note() == "target: draft dflash.gguf"
    (tmp_path / "dflash.gguf").unlink()
    assert find_models(tmp_path)[0].draft_note() == "target: no draft in the folder fits"


@pytest.mark.parametrize(("shape", "width"), [((), "wide"), ((4096, 8), True), (None, None)])
def test_sizes_of_broken_headers_are_not_shown(shape: Any, width: Any) -> None:
    """Loading the model reports what is wrong with it; the list of models has what is there."""
    tensors = {} if shape is None else {"token_embd.weight": SimpleNamespace(shape=shape)}
    file: Any = SimpleNamespace(kv={"gemma4.embedding_length": width}, tensors=tensors)
    assert model_folder._header(file, "gemma4") == ({"n_vocab": 4096} if shape else {})


def test_lora_adapters_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Their architecture is that of their model, so they were listed as targets."""
    keys = {"general.architecture": string("gemma4"), models.ADAPTER: string("lora")}
    write_gguf(tmp_path / "lora.gguf", keys, [])
    with pytest.raises(Unsupported, match="a LoRA adapter, not a model"):
        find_models(tmp_path)
    shutil.copy(folder / "first.gguf", tmp_path / "first.GGUF")
    notes: list[str] = []
    (model,) = find_models(tmp_path, notes.append)
    assert model.name == "first" and "lora.gguf: a LoRA adapter" in notes[0]


def test_split_models_are_served(family: Path, tmp_path: Path, room: ModelLoader) -> None:
    """Only their first parts are models."""
    for name, size in (("target", 3_000_000), ("dflash", 1_000_000)):
        source = family / f"{name}.gguf"
        convert.quantize(source, tmp_path / f"{name}.gguf", "q8_0", split_max_size=size)
    assert len(list(tmp_path.glob("*.gguf"))) >= 4
    served = ModelServer(tmp_path, room, max_loaded=1)
    try:
        (model,) = served.http.get("/v1/models").json()["data"]
        assert model["id"].startswith("target-00001-of-")
        assert model["draft"].startswith("dflash-00001-of-") and model["other_drafts"] == []
        answer = served.http.post("/v1/completions", json=ASK).json()
        assert answer["timings"]["draft_n"] > 0
    finally:
        served.stop()


def test_a_deleted_file_fails_only_its_own_requests(
    folder: Path, tmp_path: Path, room: ModelLoader
) -> None:
    for name in ("kept", "deleted"):
        shutil.copy(folder / "first.gguf", tmp_path / f"{name}.gguf")
    served = ModelServer(tmp_path, room, max_loaded=2)
    try:
        before = served.http.get("/v1/models").json()
        assert before["data"][0]["created"] == int((tmp_path / "kept.gguf").stat().st_mtime)
        (tmp_path / "deleted.gguf").unlink()
        assert served.http.get("/v1/models").json() == before
        answer = served.http.post("/v1/completions", json={**ASK, "model": "kept"})
        assert answer.status_code == 200
    finally:
        served.stop()


def test_a_missing_draft_is_passed_over_until_it_is_back(
    family: Path, tmp_path: Path, room: ModelLoader
) -> None:
    """Its model answered 503, although there was another draft."""
    shutil.copy(family / "target.gguf", tmp_path / "first.gguf")
    for name in ("a", "b"):
        shutil.copy(family / "dflash.gguf", tmp_path / f"{name}.gguf")
    served = ModelServer(tmp_path, room, max_loaded=1)
    try:
        for missing, used in ((["a"], "b.gguf"), (["a", "b"], None), ([], "a.gguf")):
            for name in missing:
                (tmp_path / f"{name}.gguf").rename(tmp_path / f"{name}.away")
            answer = served.http.post("/v1/completions", json=ASK)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["timings"]["draft_n"] > 0) == (used is not None)
            (model,) = served.http.get("/v1/models").json()["data"]
            assert model["draft"] == used
            assert {model["draft"], *model["other_drafts"]} - {None} == {"a.gguf", "b.gguf"}
            assert served.http.post("/models/unload", json={"model": "first"}).json()["success"]
            for name in missing:
                (tmp_path / f"{name}.away").rename(tmp_path / f"{name}.gguf")
    finally:
        served.stop()


def test_a_model_that_is_used_again_is_not_unloaded(folder: Path) -> None:
    """It was idle, but a request came while another model was being loaded."""
    room = ModelLoader()
    served = ModelServer(folder, room, max_loaded=2, max_wait=0.2, sleep_seconds=0.4)
    try:
        assert served.http.post("/models/load", json={"model": "first"}).status_code == 200
        first = served.models.all["first"]
        room.gate.clear()
        load = threading.Thread(target=served.http.post, args=("/models/load?model=second",))
        load.start()
        wait(lambda: time.monotonic() - first.used > 0.7)  # the next step is to unload it
        first.n_requests += 1
        room.gate.set()
        load.join()
        time.sleep(0.5)
        assert served.status()["first"] == "loaded" and not first.unloading
        first.n_requests -= 1
        wait(lambda: set(served.status().values()) == {"unloaded"})
    finally:
        served.stop()


class Instant(ModelLoader):
    """Opens models at once, all with the same engine, which nothing uses."""

    def __init__(self, tokenizer: Any, most: int = 9) -> None:
        super().__init__(most)
        self._tokenizer = tokenizer

    def __call__(self, names: list[str], *_: Any) -> Service:
        assert self.gate.wait(30)
        if len(self.opened) >= self.most:
            raise EnvironmentProblem("not enough memory")
        self.opened += names
        engine: Any = SimpleNamespace(
            tokenizer=self._tokenizer,
            n_ctx=64,
            start=lambda: None,
            close=lambda: self.opened.remove(names[0]),
        )
        service = Service(engine, Settings(*names))
        service.warm_up = lambda: None  # type: ignore[method-assign]
        return service


@pytest.fixture
def instant(plain: Served) -> Instant:
    return Instant(plain.engine.tokenizer)


ABC = [Model(name, Path(name)) for name in "abc"]


@pytest.mark.parametrize("by", ["its requests", "unload"])
def test_the_first_model_that_is_not_used_makes_room(instant: Instant, by: str) -> None:
    """A load waited for the end of a long stream of the least recently used model, and so did the
    requests of that model and the unloading of another, although there was one without requests."""

    async def work() -> None:
        models = LoadedModels(found := deepcopy(ABC), instant, max_loaded=2)
        a, b, c = found
        for model in (a, b):
            await models.load(model)
        unloads = list[asyncio.Future[None]]()
        with models.use(a):
            with models.use(b):
                load = asyncio.ensure_future(models.load(c))
                await asyncio.sleep(0.02)
                again = asyncio.ensure_future(models.load(a))
                if by == "unload":
                    unloads.append(asyncio.ensure_future(models.unload(b)))
                await asyncio.sleep(0.02)
                assert a.unloading and not load.done() and not again.done()
            instant.gate.clear()
            await asyncio.wait_for(asyncio.gather(again, *unloads), 10)
            assert not load.done() and a.is_ready
            instant.gate.set()
            await asyncio.wait_for(load, 10)
        assert [model.status for model in found] == ["loaded", "unloaded", "loaded"]
        await models.close()

    asyncio.run(work())


def test_a_load_that_waits_for_room_delays_no_shutdown(instant: Instant) -> None:
    """The second signal waited for a background response of another model, 10 minutes at most."""

    async def work() -> None:
        models = LoadedModels(found := deepcopy(ABC), instant, max_loaded=1)
        await models.load(found[0])
        with models.use(found[0]):
            load = asyncio.ensure_future(models.load(found[1]))
            await asyncio.sleep(0.02)
            await asyncio.wait_for(models.close(), 10)
        assert load.cancelled() and instant.opened == []

    asyncio.run(work())


@pytest.mark.parametrize("when", ["opening", "waiting"])
def test_nobody_waits_for_memory_that_no_request_needs(instant: Instant, when: str) -> None:
    """New requests of another model waited, too, after the client had left."""
    instant.most = 1

    async def work() -> None:
        models = LoadedModels(found := deepcopy(ABC), instant, max_loaded=3)
        first, second, _ = found
        await models.load(first)
        with models.use(first):
            if when == "opening":
                instant.gate.clear()
            load = asyncio.ensure_future(models.load(second))
            while not (second.opening if when == "opening" else first.unloading):
                await asyncio.sleep(0.005)
            load.cancel()
            await asyncio.wait({load})
            instant.gate.set()
            while second.status == "loading":
                await asyncio.sleep(0.005)
            await models.load(first)
            assert instant.opened == ["a"]
        await models.close()

    asyncio.run(asyncio.wait_for(work(), 10))


def test_only_streams_have_a_conversation(folder: Path, room: ModelLoader) -> None:
    """A request that is no stream, or is refused, must not hide the stream with its id."""
    served = ModelServer(folder, room, max_loaded=2)
    head, path = {"X-Conversation-Id": "chat"}, "/v1/completions"
    try:
        streamed = served.http.post(
            path, json={**ASK, "model": "first", "stream": True}, headers=head
        )
        assert streamed.status_code == 200
        for stream, name, status in ((False, "chat", 200), (True, "x" * 257, 400)):
            ask = {**ASK, "model": "second", "stream": stream}
            answer = served.http.post(path, json=ask, headers={"X-Conversation-Id": name})
            assert answer.status_code == status
        assert "[DONE]" in served.http.get("/v1/stream?conv_id=chat").text
        assert list(served.router._conversations._models) == [(None, "chat")]
    finally:
        served.stop()


@pytest.mark.parametrize("error", [EngineLost("the engine failed: SIGKILL"), ValueError("x")])
def test_a_model_that_fails_in_its_first_step_is_closed(folder: Path, error: Exception) -> None:
    class FailingLoader(ModelLoader):
        def __call__(self, *arguments: Any) -> Service:
            service = super().__call__(*arguments)

            def fail() -> None:
                raise error

            service.warm_up = fail  # type: ignore[method-assign]
            return service

    room = FailingLoader()
    served = ModelServer(folder, room, max_loaded=2)
    try:
        refused = served.http.post("/v1/completions", json={**ASK, "model": "first"})
        known = isinstance(error, EngineLost)
        assert refused.status_code == (503 if known else 500)
        assert known == ("SIGKILL" in refused.json()["error"]["message"])
        assert all(engine._closed for engine in room.live)
    finally:
        served.stop()


@pytest.mark.parametrize("share", [0, 2, 3])
def test_a_file_that_is_being_written_is_left_out(
    family: Path, folder: Path, tmp_path: Path, share: int
) -> None:
    """A download into the folder must not keep the server from starting."""
    shutil.copy(folder / "first.gguf", tmp_path)
    whole = (family / "target.gguf").read_bytes()
    (tmp_path / "written.gguf").write_bytes(whole[: len(whole) * share // 4])
    notes: list[str] = []
    (model,) = find_models(tmp_path, notes.append)
    assert model.name == "first"
    (note,) = notes
    assert "written.gguf" in note and note.endswith("; the file is left out")
    (tmp_path / "first.gguf").unlink()
    with pytest.raises(InputError, match=r"written\.gguf: "):
        find_models(tmp_path, notes.append)
