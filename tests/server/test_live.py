"""The live view: its events have the figures of the requests, and text is shown only to watchers
who know its word."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from g4spec.core import Cycle
from g4spec.runtime.draft_decision import REASONS
from g4spec.runtime.engine import Engine
from g4spec.server import live as live_module
from g4spec.server import page
from g4spec.server.live import Live
from g4spec.server.settings import Settings
from tests.server.running_server import Served

WORD, OTHER = "w" * 16, "v" * 16
PAGE = Path(page.__file__).with_name("page.html").read_text()
News = tuple[str, dict[str, Any]]


@contextmanager
def watching(served: Served, word: str | None = None, key: str = "") -> Iterator[list[News]]:
    """Collect the events of /v1/live in a thread that has started."""
    found: list[News] = []
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        query = {"of": word} if word else {}
        with (
            httpx.Client(base_url=served.url, timeout=30, headers=headers) as http,
            http.stream("GET", "/v1/live", params=query) as response,
        ):
            assert response.status_code == 200, response.read()
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    found.append((name, json.loads(line[6:])))
                    begun.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(30)
    try:
        yield found
    finally:
        over.set()
        thread.join(30)
        assert not thread.is_alive()


def ended(found: list[News], count: int = 1) -> None:
    deadline = time.monotonic() + 30
    while sum(name == "end" for name, _ in found) < count:
        assert time.monotonic() < deadline, found[-3:]
        time.sleep(0.02)


def events_of(found: list[News], name: str) -> list[dict[str, Any]]:
    return [data for each, data in found if each == name]


@pytest.mark.parametrize("draft_max", [0, 4, "auto"])
def test_events_have_the_figures_of_the_request(busy: Served, draft_max: int | str) -> None:
    with watching(busy, WORD) as found:
        got = busy.post(
            "/v1/completions",
            prompt="The quick brown fox. The quick",
            max_tokens=40,
            temperature=0,
            draft_max=draft_max,
            live=WORD,
            ignore_eos=True,
        )
        ended(found)
    first, cycles, (end,) = (
        events_of(found, "first"),
        events_of(found, "cycle"),
        events_of(found, "end"),
    )
    pieces = [p for each in (*first, *cycles) for p in each["pieces"]]
    assert "".join(p["text"] for p in pieces) == got["choices"][0]["text"]
    timings = got["timings"]
    assert timings["draft_n"] == sum(c["drafted"] for c in cycles) == end["drafted"]
    assert timings["draft_n_accepted"] == sum(c["accepted"] for c in cycles) == end["accepted"]
    assert timings["predicted_n"] == len(pieces) == end["tokens"]
    assert timings["predicted_ms"] == pytest.approx(1000 * sum(c["seconds"] for c in cycles))
    assert [len(c["rejected"]) for c in cycles] == [c["drafted"] - c["accepted"] for c in cycles]
    assert all(c["rows"] == 1 + c["drafted"] and c["step_rows"] >= c["rows"] for c in cycles)
    assert all(c["why"] in REASONS and c["drafted"] <= c["length"] for c in cycles)
    reasons = {0: {"off"}, 4: {"asked", "room"}, "auto": set(REASONS) - {"off", "asked"}}
    assert {c["why"] for c in cycles} <= reasons[draft_max]
    assert (draft_max == "auto") == any(c["expected"] is not None for c in cycles)
    (head,) = events_of(found, "text")
    assert head["prompt_tokens"] == got["usage"]["prompt_tokens"] and head["yours"]


def test_plain_decoding_is_compared_where_it_was_measured(busy: Served) -> None:
    busy.service.warm_up()  # measures costs
    with watching(busy) as found:
        busy.post("/v1/completions", prompt="one two", max_tokens=12, draft_max=0, ignore_eos=True)
        busy.post("/v1/completions", prompt="one two", max_tokens=12, draft_max=3, ignore_eos=True)
        ended(found, 2)
    for end, cycles in zip(events_of(found, "end"), (11, None), strict=True):
        assert end["plain_tokens_per_second"] > 0 and cycles in (None, end["cycles"])
        steps = [c for c in events_of(found, "cycle") if c["text"] == end["text"]]
        mean = sum(c["plain_seconds"] for c in steps) / len(steps)
        assert end["plain_tokens_per_second"] == pytest.approx(1 / mean)


def test_text_is_shown_only_to_watchers_with_its_word(busy: Served) -> None:
    with (
        watching(busy, WORD) as mine,
        watching(busy, OTHER) as theirs,
        watching(busy) as without_word,
    ):
        busy.post("/v1/completions", prompt="one two", max_tokens=4, live=WORD)
        busy.post("/v1/completions", prompt="one two", max_tokens=4)
        for found in (mine, theirs, without_word):
            ended(found, 2)
    for found, known in ((mine, 1), (theirs, 0), (without_word, 0)):
        assert len(events_of(found, "text")) == 2
        shown = [d for _, d in found if "pieces" in d or "rejected" in d]
        assert len({d["text"] for d in shown}) == known
        assert sum("yours" in d for d in events_of(found, "text")) == known
    assert busy.refused("/v1/completions", {"prompt": "x", "live": "short"})["param"] == "live"
    assert busy.http.get("/v1/live", params={"of": "short"}).status_code == 400


def test_prefix_hits_and_batch_sizes_are_reported(busy: Served) -> None:
    prompt = "the long prompt comes again. " * 64
    busy.post("/v1/completions", prompt=prompt, max_tokens=1)
    with watching(busy, WORD) as found:
        usage = busy.post(
            "/v1/completions", prompt=prompt, max_tokens=12, n=3, seed=1, ignore_eos=True, live=WORD
        )["usage"]
        ended(found, 3)
        time.sleep(1.2)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and {d["cached_tokens"] for d in events_of(found, "first")} >= {cached}
    assert events_of(found, "load")[-1]["cached_tokens"] >= cached
    steps: dict[int, list[dict[str, Any]]] = {}
    for cycle in events_of(found, "cycle"):
        steps.setdefault(cycle["step"], []).append(cycle)
    assert any(len(s) == 3 for s in steps.values())
    for shares in steps.values():
        if shares[0]["texts"] == len(shares) and all(s["drafted"] == s["length"] for s in shares):
            assert {s["step_rows"] for s in shares} == {sum(s["rows"] for s in shares)}


def test_a_cancelled_text_ends_in_the_live_view(busy: Served) -> None:
    with watching(busy, WORD) as found:
        body = {"prompt": "a", "max_tokens": 1500, "stream": True, "live": WORD, "ignore_eos": True}
        with busy.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        ended(found)
    assert events_of(found, "end")[0]["finish"] == "abort"


def test_watchers_are_bounded_and_forgotten(busy: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MAX_WATCHERS", 1)
    with watching(busy):
        assert busy.http.get("/v1/live").status_code == 429
    deadline = time.monotonic() + 10
    while busy.service.live._watchers:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_slow_reader_loses_events_and_is_notified(
    busy: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "MAX_QUEUED_EVENTS", 2)
    hub = Live(busy.engine, "x")
    request = busy.engine.submit([2, 5])
    watcher, text = live_module.Watcher(hub, None), hub.follow(request, None)
    hub._watchers.append(watcher)
    hub.began(text)
    for _ in range(3):
        hub.cycle(text, Cycle([5], [0.0]), ["text"])
    assert watcher._lost == 2 and len(watcher._queue) == 2
    request.cancel()


def test_the_stream_ends_when_the_server_does(engines: Callable[..., Engine]) -> None:
    served = Served(engines(None, n_ctx=2048))
    with watching(served) as found:
        served.service.draining = True
        began = time.monotonic()
        served.stop()
        assert time.monotonic() - began < 15
    assert found[0][0] == "hello"


# ---- the page


def test_the_page_loads_no_other_scripts(busy: Served) -> None:
    got = busy.http.get("/")
    assert got.status_code == 200 and got.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in got.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", got.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert got.text == PAGE


def test_the_page_has_no_way_to_load_or_to_write_markup() -> None:
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", PAGE), "an external address"
    assert not re.search(r"<[^>]*\son[a-z]+=|<[^>]*\sstyle=", PAGE), "an inline handler or style"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|"
        r"DOMParser|createContextualFragment|new Function",
        PAGE,
    )
    assert len(re.findall("<(?:script|style|link|iframe|img|object|embed)", PAGE)) == 3
    names = set(re.findall(r'\$\("([\w-]+)"\)', PAGE))
    assert names and names <= set(re.findall(r'id="([\w-]+)"', PAGE)), "an element is missing"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_node_parses_the_script(tmp_path: Path) -> None:
    (script,) = re.findall("<script>(.*?)</script>", PAGE, re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    done = subprocess.run(
        ["node", "--check", tmp_path / "page.js"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_page_needs_no_key_and_the_rest_does(engines: Callable[..., Engine]) -> None:
    served = Served(engines(None, n_ctx=2048), Settings("tiny"), keys=["secret"])
    assert served.http.get("/").status_code == 200
    assert served.http.get("/v1/live").status_code == 401
    with watching(served, key="secret") as found:
        assert found[0][0] == "hello"
    served.stop()
