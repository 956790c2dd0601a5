"""Random requests to the endpoints of `serve --models`, and to `/v1/live`."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_from_bytes

import httpx
import pytest

from g4spec.runtime.engine import Engine
from g4spec.server import addresses, run
from g4spec.server.loaded_models import LoadedModels
from g4spec.server.model_folder import Progress, find_models
from g4spec.server.model_router import ModelRouter, create_app
from g4spec.server.service import Service
from g4spec.server.settings import Settings
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.watching import CONTROL

PATHS = ("/models/load", "/models/unload", "/models/events", "/v1/live", "/models", "/v1/models/")
NAMES = (b"tiny", b"", b"x", b"\x1b]0;t\x07", b"\xff", b"\x00", b"../tiny", b"tiny\n", b"a" * 4000)
KEYS = ("of", "model", "conv_id", "from", "autoload", "")
BODY = json.dumps({"model": "tiny", "stream": True, "input": [{"type": "item_reference"}]}).encode()


def open_model(names: list[str], target: Path, draft: Path | None, tell: Progress) -> Service:
    engine = Engine.load(target, draft, n_ctx=64, progress=tell)
    return Service(engine, Settings(names[0]))


@pytest.fixture(scope="module")
def http(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(family / "target.gguf", folder / "tiny.gguf")
    models, address = (
        LoadedModels(find_models(folder), open_model, max_loaded=1),
        addresses.ServerAddress(port=0),
    )
    listeners, ready = addresses.listen(address), threading.Event()
    app = create_app(ModelRouter(models, autoload=False))
    server = run.create_server(app, models, address, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
    thread.start()
    assert ready.wait(20)
    with httpx.Client(base_url=addresses.url(address, listeners), timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def random_request(client: httpx.Client, rng: random.Random) -> httpx.Request:
    """Return a request to one of PATHS, with a random method, query and body."""
    path = rng.choice(PATHS)
    if path.endswith("/"):
        path += quote_from_bytes(rng.choice(NAMES))
    pairs = (f"{rng.choice(KEYS)}={quote_from_bytes(rng.choice(NAMES))}" for _ in range(2))
    query = "&".join(rng.sample([*pairs], rng.randrange(3)))
    body = BODY
    for _ in range(rng.randrange(3)):
        change = mutate_json if rng.random() < 0.7 else mutate_bytes
        body = change(body, rng, b"tiny")
    posts = "load" in path
    method = rng.choice(["POST"] * 6 * posts + ["GET"] * 4 + ["HEAD", "PUT", "DELETE", "OPTIONS"])
    return client.build_request(method, f"{path}?{query}", content=body)


def test_no_request_breaks_the_router(http: httpx.Client) -> None:
    """No internal error, no control character, JSON or events that are; the model still answers."""
    rng, seen = random.Random(5), set()
    for _ in range(120):
        sent = random_request(http, rng)
        got = http.send(sent, stream=True)
        seen.add(got.status_code)
        kind = got.headers["content-type"]
        if kind.startswith("text/event-stream"):
            text = next(got.iter_text(), "")
            for line in text.splitlines():
                assert not line.startswith("data: ") or json.loads(line[6:])
        else:
            text = got.read().decode()
            assert sent.method == "HEAD" or isinstance(json.loads(text), dict), text
        got.close()
        assert got.status_code < 500 or got.status_code == 503, (sent, sent.content, text)
        assert not CONTROL.search(text + str(got.headers)), (sent, sent.content, text)
    assert seen >= {200, 400, 404, 405}
    assert http.post("/models/load", json={"model": "tiny"}).json()["success"]
