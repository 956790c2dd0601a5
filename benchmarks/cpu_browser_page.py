"""Test the page of `g4spec serve` in a real browser, headless.

    python benchmarks/cpu_browser_page.py [--pictures DIR]

Serves the bundled family with a draft; uses wide and phone windows, light and dark:

- a message is typed and sent; the answer equals that of the same request over HTTP;
- every coloured token on the page equals the token of /v1/live, with the same kind;
- Stop frees the memory of the request; the conversation is restored after a reload;
- a server with an API key makes the page ask for it;
- markup and scripts in the model's output stay text, in answers, reasoning and tokens;
- no console message, no request to another host, no page wider than the window.

Needs Chromium or Chrome (Debian: `apt-get install chromium`); `CHROME` selects another binary. The
results are printed, and written to --out FILE as JSON. The exit code is 1 if a check fails.
"""

import argparse
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx
from cpu_browser_report import SCHEMES, browser

from g4spec import convert
from g4spec.runtime.engine import Engine
from g4spec.server import run as serving
from g4spec.server.app import create_app
from g4spec.server.service import Service
from g4spec.server.settings import Settings

TINY = Path(__file__).parent.parent / "examples" / "tiny"
WINDOWS = {"wide": (1280, 860), "phone": (390, 780)}
BAD = "<img src=x onerror=pwned=1><script>pwned=1</script><b>bold</b> [x](javascript:pwned=1)"
RECORD = (
    "Turn this record into JSON:\nname: Clara\ncity: Lisbon\nage: 41\njob: painter\n"
    "email: clara52@example.com"
)

LAUNCH = """
import fcntl, os, sys
into, out = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(into, 3), os.dup2(out, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Gives the browser its pipes as file descriptors 3 and 4."""


class Browser:
    """Chromium, told what to do over a pipe (`--remote-debugging-pipe`): JSON, NUL after each.

    Attributes:
        heard: events so far.
    """

    def __init__(self, profile: str, window: str, scheme: str) -> None:
        into, self._write = os.pipe()
        self._read, out = os.pipe()
        wide, high = WINDOWS[window]
        command = [
            browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={wide},{high}",
            "--no-first-run",
            "--disable-extensions",
            "--disable-component-update",
            "--disable-background-networking",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(into), str(out), *command],
            pass_fds=(into, out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(into)
        os.close(out)
        self.heard: list[dict] = []
        self._answers: dict[int, dict] = {}
        self._number, self._changed = 0, threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        target = self._call("Target.createTarget", url="about:blank")
        self._session = self._call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=wide,
            height=high,
            deviceScaleFactor=1,
            mobile=window == "phone",
        )

    def _listen(self) -> None:
        held = b""
        while data := os.read(self._read, 1 << 16):
            *messages, held = (held + data).split(b"\0")
            with self._changed:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.heard.append(message)
                self._changed.notify_all()

    def _call(self, method: str, session: str | None = None, **params: object) -> dict:
        with self._changed:
            self._number += 1
            number = self._number
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers, 60), method
            answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def call(self, method: str, **params: object) -> dict:
        """Call a method of the DevTools protocol in the page."""
        return self._call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """Evaluate a script in the page."""
        got = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in got, (script, got["exceptionDetails"])
        return got["result"].get("value")

    def until(self, script: str, seconds: float = 120) -> None:
        """Wait until a script returns true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.1)

    def open(self, url: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && typeof word === 'string'")

    def picture(self, path: Path) -> None:
        """Take a screenshot."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self, allowed: str) -> list[str]:
        """Return console messages, and requests to addresses that do not begin with
        `allowed`."""
        out = []
        for event in self.heard:
            params = event.get("params", {})
            if event["method"] in (
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Log.entryAdded",
            ):
                out.append(json.dumps(params)[:400])
            if event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith((allowed, "data:", "about:")):
                    out.append(f"asked for {url}")
        return out

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(AssertionError, OSError):
            self._call("Browser.close")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Page:
    """A server with the page."""

    def __init__(self, engine: Engine, *keys: str) -> None:
        self.engine = engine
        self.service = Service(engine, Settings("tiny"))
        self.service.warm_up()
        address, ready = serving.ServerAddress(port=0), threading.Event()
        self._listeners = serving.listen(address)
        self.url = serving.url(address, self._listeners)
        self._server = serving.create_server(
            create_app(self.service, keys=keys), self.service, address, ready.set
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": self._listeners}, daemon=True
        )
        self._thread.start()
        assert ready.wait(30)

    def stop(self) -> None:
        """End the server."""
        self.service.draining = self._server.should_exit = True
        self._thread.join(20)

    def idle(self) -> bool:
        """Return whether no request is running."""
        return self.engine.scheduler.idle and self.service.open == 0


def watch(url: str, word: str, found: list[dict], over: threading.Event) -> None:
    """Record the events of /v1/live for the texts of the page."""
    with httpx.stream("GET", f"{url}/v1/live", params={"of": word}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and '"yours"' in line:
                found.append(json.loads(line[6:]))
            if over.is_set():
                return


def ask(page: Browser, text: str, **fields: object) -> None:
    """Fill in the form and send it."""
    for name, value in fields.items():
        page.run(f"$('{name}').value = {json.dumps(str(value))}; $('{name}').onchange()")
    page.run(f"$('box').value = {json.dumps(text)}; $('send').click()")


def conversation(server: Page, page: Browser, pictures: Path | None, name: str) -> list[str]:
    """Ask, compare, stop and reload. Return the failures."""
    wrong, over = list[str](), threading.Event()
    told: list[Any] = []
    page.open(server.url)
    page.until("$('model').textContent.includes('draft')")
    word = str(page.run("word"))
    thread = threading.Thread(target=watch, args=(server.url, word, told, over), daemon=True)
    thread.start()
    time.sleep(1.5)
    question: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 60, "draft_max": 4}
    ask(page, "Tell me about numbers", **question)
    page.until("!running && chat.messages.length === 2 && chat.messages[1].stats")
    time.sleep(1.5)
    over.set()
    body = {"messages": [{"role": "user", "content": "Tell me about numbers"}], **question}
    alone = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    said = alone["choices"][0]["message"]["content"]
    if page.run("chat.messages[1].content") != said:
        wrong.append("the answer is not that of the same request alone")
    pieces = [p for t in told for p in t.get("pieces", [])]
    spans = page.run(
        "[...document.querySelectorAll('.assistant .tokens > span:not(.rejected)')]"
        ".map(s => [s.className.split(' ')[0], s.textContent])"
    )
    if spans != [[p["kind"], p["text"]] for p in pieces]:
        wrong.append(f"{len(spans)} coloured tokens, {len(pieces)} told, or others")
    kinds = {k: sum(p["kind"] == k for p in pieces) for k in ("accepted", "corrected", "own")}
    struck = page.run("document.querySelectorAll('.assistant .rejected').length")
    if not kinds["accepted"] or not struck:
        wrong.append(f"nothing drafted: {kinds}")
    stats = page.run("chat.messages[1].stats")
    if (stats["drafted"], stats["accepted"]) != (
        alone["timings"]["draft_n"],
        alone["timings"]["draft_n_accepted"],
    ):
        wrong.append("figures differ from the request's own")
    if not page.run("$('chart').children.length && $('why').textContent.length"):
        wrong.append("the live view shows no step")
    if page.run("document.documentElement.scrollWidth > innerWidth"):
        wrong.append("the page is wider than the window")
    if pictures:
        page.picture(pictures / f"page-{name}.png")
        if "phone" in name:
            page.run("$('show-live').click()")
            page.picture(pictures / f"page-{name}-live.png")
            page.run("$('show-live').click()")
    wrong += stopped(server, page)
    page.open(server.url)
    if page.run("chats.filter(c => c.messages.length).length") < 1:
        wrong.append("the conversation is gone after a reload")
    print(f"  {name}: {kinds}, {struck} rejected")
    return wrong


def live(server: Page, page: Browser, path: Path) -> None:
    """Take the picture of the guides: an answer that is being generated, and the live view."""
    page.open(server.url)
    page.run("$('new').click()")
    ask(page, RECORD, temperature=0, max_tokens="", draft_max="")
    page.until("chat.messages.length === 2 && chat.messages[1].pieces.length > 40")
    page.picture(path)
    page.until("!running")


def stopped(server: Page, page: Browser) -> list[str]:
    """Stop an answer."""
    ask(page, "Tell me more", max_tokens=1500, temperature=5)
    page.until("running && running.message.pieces.length > 5")
    page.run("$('send').click()")
    page.until("!running")
    deadline = time.monotonic() + 10
    while not server.idle():
        if time.monotonic() > deadline:
            return ["Stop leaves the text running"]
        time.sleep(0.05)
    failed = page.run("chat.messages.at(-1).failed")
    return [] if failed == "stopped" else [f"stopped: {failed!r}"]


def hostile(server: Page, page: Browser) -> list[str]:
    """Show texts with markup, as the server might send them, in both ways of drawing."""
    page.open(server.url)
    chunk = [{"delta": {"content": BAD, "reasoning_content": BAD}, "finish_reason": None}]
    sent = f"data: {json.dumps({'choices': chunk})}\n\ndata: [DONE]\n\n"
    page.run(f"""globalThis.pwned = 0; $('new').click();
        globalThis.fetch = async () => new Response({json.dumps(sent)})""")
    ask(page, BAD)
    page.until("!running && chat.messages.length === 2")
    bad = json.dumps(BAD)
    page.run(f"""chat.messages.push({{role: "assistant", content: "x", done: true,
        pieces: [[1, 0, {bad}], [2, 1, {bad}, [{bad}]]]}}); show()""")
    wrong = []
    if page.run("document.querySelectorAll('#messages :is(img, script, b, a, iframe)').length"):
        wrong.append("a text became markup")
    if page.run("pwned"):
        wrong.append("a text ran")
    if page.run(f"$('messages').textContent.split({bad}).length - 1") != 6:
        wrong.append("a text is not shown as it is")
    return wrong


def keyed(engine: Engine, page: Browser) -> list[str]:
    """Open a page that needs an API key. The browser itself prints a console line for each
    401."""
    server = Page(engine, "secret")
    try:
        page.open(server.url)
        page.until("$('key-dialog').open")
        page.run("$('key').value = 'secret'; $('key-ok').click()")
        page.until("$('model').textContent.includes('tiny')")
        ask(page, "Hello", max_tokens=3)
        page.until("!running && chat.messages.length === 2 && chat.messages[1].content")
        return []
    finally:
        page.call("Page.navigate", url="about:blank")
        server.stop()


def main() -> int:
    """Run all checks and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    parser.add_argument("--out", type=Path, help="file for what was found")
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert.convert(TINY / "target", folder / "target.gguf")
        convert.convert(TINY / "dflash", folder / "d.gguf", target=folder / "target.gguf")
        with Engine.load(
            folder / "target.gguf", folder / "d.gguf", n_ctx=2048, parallel=2
        ) as engine:
            server = Page(engine)
            for window in WINDOWS:
                for scheme in SCHEMES:
                    view = f"{window}-{scheme}"
                    page = Browser(str(folder / view), window, scheme)
                    found[view] = conversation(server, page, args.pictures, view)
                    found[view] += page.complaints(server.url)
                    if args.pictures and view == "wide-light":
                        live(server, page, args.pictures / "live.png")
                    if view == "wide-dark":
                        found["hostile"] = hostile(server, page) + page.complaints(server.url)
                    page.close()
            server.stop()
            page = Browser(str(folder / "key"), "wide", "light")
            found["key"] = keyed(engine, page)
            page.close()
    for view, wrong in found.items():
        print(f"{view}: {'; '.join(wrong) or 'ok'}")
    if args.out:
        version = subprocess.run(
            [browser(), "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        told = {"when": when, "browser": version, "wrong": found}
        args.out.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
