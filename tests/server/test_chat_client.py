"""`g4spec chat` in a terminal, with a local engine and with a server, and the daemon's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import io
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli
from g4spec.cli import _engine, _sampling_defaults, _serve_http, chat
from g4spec.cli._conversation import Conversation
from g4spec.cli.render import Output
from g4spec.errors import EnvironmentProblem, InputError, UsageError
from g4spec.gguf import Value, ValueType, string, write
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from g4spec.server.chat_client import Message, RemoteChat, Reply, TextPiece
from g4spec.server.local_chat import LocalChat
from g4spec.server.settings import Settings
from tests.fuzz import stand_ins
from tests.server.running_server import TEMPLATE, Served

ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "Tell me about numbers."}]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
ENVIRONMENT.pop("NO_COLOR", None)
IN_TERMINAL = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from g4spec.cli import main; main()"
)
"""Makes the pseudo-terminal the controlling terminal, so that its Ctrl-C reaches the program."""


def answered(voice: Any, messages: Any = HELLO, seed: int = 1) -> tuple[list[TextPiece], Reply]:
    async def run() -> tuple[list[TextPiece], Reply]:
        reply = Reply()
        try:
            return [p async for p in voice.answer(messages, seed, reply)], reply
        finally:
            await voice.close()

    return asyncio.run(run())


@pytest.mark.parametrize("show_origins", [False, True])
def test_local_and_remote_chat_equal_the_server(busy: Served, show_origins: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "draft_max": 4}
    body = {"messages": HELLO, "seed": 1, **fields}
    whole = busy.post("/v1/chat/completions", **body)
    sampler = busy.service.settings.sampler
    here = LocalChat(busy.engine, sampler, n_predict=40, draft_max=4, show_origins=show_origins)
    there = RemoteChat(busy.url + "/v1", None, fields, show_origins=show_origins)
    for voice in (here, there):
        pieces, reply = answered(voice)
        assert reply.content == whole["choices"][0]["message"]["content"]
        assert reply.finish == whole["choices"][0]["finish_reason"]
        assert reply.timings["draft_n"] == whole["timings"]["draft_n"] > 0
        kinds = {p.kind for p in pieces}
        assert kinds <= ({"accepted", "corrected", "own", "rejected"} if show_origins else {""})
        shown = "".join(p.text for p in pieces if p.part == "text" and p.kind != "rejected")
        assert shown.startswith(reply.content)
        accepted = sum(p.kind == "accepted" for p in pieces)
        assert accepted <= reply.timings["draft_n_accepted"] or not show_origins


def test_refusals_show_the_servers_message(busy: Served) -> None:
    with pytest.raises(InputError, match="presence_penalty"):
        answered(RemoteChat(busy.url, None, {"presence_penalty": 9}))
    for show_origins in (False, True):
        with pytest.raises(InputError, match="unknown field nonsense"):
            answered(RemoteChat(busy.url, None, {"nonsense": 9}, show_origins=show_origins))
    with pytest.raises(EnvironmentProblem, match="no answer from"):
        answered(RemoteChat("http://127.0.0.1:9", None, {}))
    with pytest.raises(EnvironmentProblem, match="Invalid port"):
        RemoteChat("http://[::1", None, {})
    with pytest.raises(InputError, match="context"):
        answered(LocalChat(busy.engine, Sampler()), [{"role": "user", "content": "x" * 100_000}])


# ---- the command


class Screen:
    """`g4spec chat` in its own pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self._far, near = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "chat", *argv],
            stdin=near,
            stdout=near,
            stderr=near,
            env=ENVIRONMENT,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(near)
        self.text = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Read until the new text of the screen matches; return it and start anew."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < deadline, (pattern, self.text[-2000:])
            if select.select([self._far], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._far, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(("ended", self.text[-2000:])) from None
        text, self.text = self.text[: found.end()], self.text[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self._far, text.encode())

    def end(self) -> int:
        """Wait for the program to end and return the remaining text."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self._far], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self._far, 65536).decode(errors="replace")
        os.close(self._far)
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def screens() -> Iterator[Callable[..., Screen]]:
    made: list[Screen] = []

    def start(*argv: object) -> Screen:
        made.append(Screen(*map(str, argv)))
        return made[-1]

    yield start
    for screen in made:
        screen.kill()


PROMPT = "(?<!>)> $"


def test_a_conversation_in_a_terminal(busy: Served, screens: Callable[..., Screen]) -> None:
    screen = screens("--url", busy.url, "-n", "12", "--seed", "7", "--temp", "0.7")
    screen.until(f"model tiny at {busy.url}.*{PROMPT}")
    screen.type("/system be brief\n")
    screen.until(PROMPT)
    screen.type('"""one\ntwo"""\n')
    first = screen.until(f"ended by (length|stop).*{PROMPT}")
    body = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one\ntwo"},
        ],
        "seed": 7,
        "temperature": 0.7,
        "max_tokens": 12,
    }
    answer = busy.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert answer.replace("\n", "\r\n") in first
    screen.type("/regen\n")
    again = screen.until(f"ended by (length|stop).*{PROMPT}")
    answer = busy.post("/v1/chat/completions", **{**body, "seed": 8})["choices"][0]["message"]
    assert answer["content"].replace("\n", "\r\n") in again
    screen.type("/nonsense\n")
    screen.until(f"unknown command /nonsense.*{PROMPT}")
    screen.type("/clear\n/regen\n")
    screen.until(f"no message to answer yet.*{PROMPT}")
    screen.type("/exit\n")
    assert screen.end() == 0


def test_ctrl_c_stops_the_answer_and_then_the_program(
    busy: Served, screens: Callable[..., Screen]
) -> None:
    screen = screens("--url", busy.url, "-n", "900", "--seed", "3", "--temp", "30")
    screen.until(PROMPT)
    screen.type("hello\n")
    screen.until("hello\r\n.{40}")
    screen.type("\x03")
    screen.until(f"ended by Ctrl-C.*{PROMPT}")
    deadline = time.monotonic() + 20
    while not busy.idle():
        assert time.monotonic() < deadline, "the server goes on"
        time.sleep(0.02)
    screen.type("\x03")
    assert screen.end() == 130


class Hostile(http.server.BaseHTTPRequestHandler):
    """A server whose model writes escape sequences and thoughts."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "evil\x1b]0;PWN\x07"}]}).encode())

    def do_POST(self) -> None:
        if self.path.startswith("/page"):
            return self.send_error(404)
        bad = "x\x1b]0;PWN\x07\x1b[8m\x9b31m\x7f\rY"
        deltas = [{"reasoning_content": "hm " + bad}, {"content": "so " + bad}]
        chunks = [{"choices": [{"delta": d, "finish_reason": None}]} for d in deltas]
        chunks.append(
            {"choices": [{"delta": {}, "finish_reason": bad}], "timings": {"notes": [bad]}}
        )
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        self._send("".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hostile() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_without_the_api(hostile: str) -> None:
    with pytest.raises(InputError, match=rf"404 from {hostile}/page/v1/.*Check the address"):
        answered(RemoteChat(f"{hostile}/page/", None, {}))


def test_no_control_character_of_a_model_reaches_the_terminal(
    hostile: str, screens: Callable[..., Screen]
) -> None:
    screen = screens("--url", hostile)
    shown = screen.until(PROMPT)
    screen.type("hi\n")
    shown += screen.until(f"ended by.*{PROMPT}")
    screen.type("/exit\n")
    assert screen.end() == 0
    assert "\x1b[2mhm x" in shown, "thoughts are dim"
    assert "so x" in shown and r"\x1b]0;PWN\x07" in shown
    rest = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.replace("\r\n", "\n")).replace("\r", "")
    assert "\x1b[8m" not in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", rest), repr(rest)


def test_with_a_model_in_this_process(
    family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(*argv: object, typed: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert cli.run(["chat", *map(str, argv)]) == 0
        out, err = capsys.readouterr()
        return out, err

    typed = "Tell me about numbers.\n/system x\n/regen\n"
    model = ("-m", family / "target.gguf")
    plain, stderr = chat(*model, "-n", 12, "--seed", 5, typed=typed)
    drafted, more = chat(
        *model, "-md", "ngram", "--draft-max", 3, "-n", 12, "--seed", 5, "--quiet", typed=typed
    )
    assert plain == drafted and more == ""
    assert "top_k 64, top_p 0.95, from general.sampling.* of target.gguf" in stderr
    with Engine.load(family / "target.gguf", n_ctx=512) as engine:
        ids = engine.tokenizer.chat(HELLO)
        request = engine.submit(ids, Options(12, Sampler(1.0, 64, 0.95, seed=5)))
        assert list(request)
        assert plain.startswith(request.text)


NO_EFFECT = "{} has no effect: this model's chat template does not know it"


def test_thinking_without_a_template_for_it(
    family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me about numbers.\n"))
    line = ["chat", "-m", str(family / "target.gguf"), "-n", "4", "--seed", "5"]
    assert cli.run([*line, "--think"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and NO_EFFECT.format("--think") in err


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_server_that_thinks(
    template: str | None, family: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = _engine.Setup(512, None, None, "cpu", None)
    loader = _serve_http.ModelLoader(setup, Output(), template, {}, {})
    service = loader.service(Settings("tiny", reasoning=True), family / "target.gguf", None)
    service.engine.close()
    assert service.settings.reasoning == (template is not None)
    assert (NO_EFFECT.format("--reasoning on") in capsys.readouterr().err) == (template is None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "either -m or --url"),
        (("--url", "http://"), "--url: expected an address such as http://127.0.0.1:8080"),
        (("-m", "x", "--url", "http://127.0.0.1:9"), "either -m or --url"),
        (("--url", "http://127.0.0.1:9", "-c", "100"), "--ctx-size: no effect with --url"),
        (("-m", "x", "--show-draft"), "needs a draft"),
    ],
)
def test_contradicting_options(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["chat", *argv]) == UsageError.exit_code
    assert message in capsys.readouterr().err


# ---- the daemon


class Client:
    """A client of the daemon's protocol, written only from its documentation: it starts a program
    by name with the options that such clients pass, through the script in the docs."""

    def __init__(self, folder: Path, *argv: object) -> None:
        (script,) = re.findall("```sh\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
        g4spec = f'#!/bin/sh\nexec {sys.executable} -m g4spec "$@"\n'
        for name, text in (("daemon", script), ("g4spec", g4spec)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o700)
        self.tokens, write = os.pipe()
        path = {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            [
                folder / "daemon",
                *map(str, argv),
                "--daemon",
                "--fast-rollback",
                "--ddtree",
                "--ddtree-budget=22",
                "--max-ctx=512",
                f"--stream-fd={write}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write,),
            env=ENVIRONMENT | path,
            cwd=ROOT,
        )
        os.close(write)
        assert self.process.stdin is not None and self.process.stdout is not None
        assert self.process.stdout.readline() == b"[daemon] ready\n"

    def ask(self, line: str) -> list[int]:
        """Send a line and return the tokens before -1."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        out: list[int] = []
        while True:
            data = b""
            while len(data) < 4:
                piece = os.read(self.tokens, 4 - len(data))
                assert piece, "the stream ended"
                data += piece
            (token,) = struct.unpack("<i", data)
            if token == -1:
                return out
            out.append(token)

    def end(self) -> str:
        """Close stdin and return stderr."""
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        os.close(self.tokens)
        return err.decode()


def test_the_daemon_speaks_the_line_protocol(family: Path, tmp_path: Path) -> None:
    client = Client(tmp_path, "--model", family / "target.gguf", "--draft", family / "dflash.gguf")
    with Engine.load(family / "target.gguf", n_ctx=512) as engine:
        ids = engine.tokenizer.encode("The quick brown fox")

        def alone(count: int, **sampler: Any) -> list[int]:
            return list(engine.submit(ids, Options(count, Sampler(**sampler))).tokens())

        path = tmp_path / "a prompt.bin"
        path.write_bytes(struct.pack(f"<{len(ids)}i", *ids))
        assert client.ask(f"{path} 12") == alone(12)
        sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
        assert client.ask(f"{path} 8 samp=0.8,0.9,40,1.1,77") == alone(8, seed=77, **sampled)
        new = [client.ask(f"{path} 9 samp=9,1,0,1") for _ in range(2)]
        assert new[0] != new[1], "without a seed, texts differ"
        (tmp_path / "odd.bin").write_bytes(b"12345")
        for wrong in (
            "RESTORE 3",
            f"{path}",
            f"{path} 0",
            f"{path} 5000",
            f"{path} 5 samp=1,2",
            f"{tmp_path}/none.bin 5",
            f"{tmp_path}/odd.bin 5",
            f"{path} 5 snap=1:2",
        ):
            assert client.ask(wrong) == [], wrong
        assert client.ask(f"{path} 4 samp=0,1,0,1") == alone(4)
    stderr = client.end()
    assert len(re.findall(r"^\[daemon\] ", stderr, re.MULTILINE)) == 8, stderr


def test_the_daemon_ends_when_its_output_is_closed(
    family: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    os.close(read)
    (tmp_path / "p.bin").write_bytes(struct.pack("<2i", 2, 9))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{tmp_path}/p.bin 400\n"))
    target = str(family / "target.gguf")
    assert cli.run(["serve", "--daemon", f"--stream-fd={write}", "-m", target, "-c", "512"]) == 0
    assert "closed by its reader" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--daemon",), "need each other"),
        (("--stream-fd", "1"), "need each other"),
        (("--daemon", "--stream-fd", "1", "--port", "80"), "--port: no effect with --daemon"),
        (("--models-max", "2"), "--models-max: no effect without --models"),
        (("--daemon", "--stream-fd", "1", "--no-ui"), "--no-ui: no effect with --daemon"),
        (("--daemon", "--stream-fd", "999"), "an open file descriptor"),
    ],
)
def test_options_that_the_daemon_refuses(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "-m", "x", *argv]) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_the_stream_of_the_daemon_must_be_writable(capsys: pytest.CaptureFixture[str]) -> None:
    """The first answer failed with "stdout is closed"."""
    read, write = os.pipe()
    argv = ["serve", "-m", "x", "--daemon", "--stream-fd", str(read)]
    try:
        assert cli.run(argv) == UsageError.exit_code
    finally:
        os.close(read)
        os.close(write)
    assert "which can only be read" in capsys.readouterr().err


def test_files_name_their_sampling(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_gguf(**keys: Value) -> Path:
        path = tmp_path / "x.gguf"
        kv = {f"general.sampling.{name}": value for name, value in keys.items()}
        write(path, {"general.architecture": string("gemma4"), **kv}, {})
        return path

    out = Output()
    found = _sampling_defaults.sampler(family / "target.gguf", out, temperature=0.5)
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 64, pytest.approx(0.95))
    assert "top_k 64, top_p 0.95, from" in capsys.readouterr().err, "temp was given"
    assert (
        _sampling_defaults.sampler(write_gguf(), out) == Sampler(1.0)
        and not capsys.readouterr().err
    )
    found = _sampling_defaults.sampler(
        write_gguf(top_k=Value(ValueType.I32, -1), mirostat=Value(ValueType.I32, 2)), out
    )
    assert found.top_k == 0
    assert "ignored: general.sampling.mirostat" in capsys.readouterr().err
    with pytest.raises(InputError, match="expected a finite number"):
        _sampling_defaults.sampler(write_gguf(temp=string("hot")), out)


# ---- invalid servers, and files with invalid settings

NO_EVENTS: list[Any] = [
    {"choices": 1},
    {"choices": {"a": 1}},
    {"choices": ["x"]},
    {"choices": [{"delta": []}]},
    {"choices": [{"delta": {"content": 7}}]},
    {"choices": [{"delta": {"reasoning": [1]}}]},
    {"timings": [1]},
    {"timings": {"notes": 3}},
    {"error": 5},
    {"error": {"code": 1}},
    [1],
]


@pytest.mark.parametrize("event", NO_EVENTS)
@pytest.mark.parametrize("live", [False, True])
def test_an_invalid_response_ends_only_the_answer(
    event: Any,
    live: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of these responses once caused a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    Path("models.json").write_text('{"data": [{"id": "tiny"}]}')
    Path("answer.sse").write_text(f"data: {json.dumps(event)}\n\n")
    pieces = {"yours": True, "pieces": event} if live else {"yours": True}
    Path("live.sse").write_text(f"data: {{}}\n\nevent: end\ndata: {json.dumps(pieces)}\n\n")
    with stand_ins.installed():
        line = ["chat", "--url", "http://127.0.0.1:9", *(["--show-draft"] if live else [])]
        assert cli.run(line) == InputError.exit_code
    assert len(re.findall(r"the server sent an|^error: 5$", capsys.readouterr().err, re.M)) == 2


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("hi\n", 3),
        ("hi\n\n/system x\n", 3),  # commands do not answer
        ("hi\n/exit\n", 3),
        ("/nonsense\n/regen\n", 0),
        ('"""\n/usr/bin: what is it?\n"""\n', 3),  # no command
        ('/system x\n"""hi\n', 3),  # the end of the input ends a message of several lines
    ],
)
def test_a_script_sees_that_an_answer_failed(
    typed: str,
    code: int,
    family: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    line = ["chat", "-m", str(family / "target.gguf"), "-c", "4", "--quiet"]
    assert cli.run(line) == code
    assert ("error: the prompt does not fit" in capsys.readouterr().err) == bool(code)


def test_a_failed_answer_in_a_terminal(family: Path, screens: Callable[..., Screen]) -> None:
    screen = screens("-m", family / "target.gguf", "-c", "4")
    screen.until(PROMPT)
    screen.type("hi\n")
    screen.until(f"error:.*the prompt does not fit.*{PROMPT}")
    screen.type("\x04")
    assert screen.end() == 0


def test_an_empty_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("live.sse").write_text("")
    Path("answer.sse").write_text('data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
    with stand_ins.installed():
        assert (
            answered(RemoteChat("http://127.0.0.1:9", None, {}, show_origins=True))[1].content
            == "a"
        )


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:port", "ftp://127.0.0.1"])
def test_a_malformed_proxy(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(UsageError, match=r"proxy with a malformed address.*HTTPS_PROXY"):
        RemoteChat("https://example.org", None, {})


def test_missing_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "missing.pem")
    with pytest.raises(UsageError, match="SSL_CERT_FILE"):
        RemoteChat("https://example.org", None, {})


def test_a_key_that_is_not_ascii() -> None:
    with pytest.raises(UsageError, match="`api_key`") as error:
        RemoteChat("http://127.0.0.1:9", "schl\u00fcssel", {})
    assert "schl" not in str(error.value), "the key is a secret"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_recommended_sampling_value_that_is_not_finite(value: float, tmp_path: Path) -> None:
    write(
        tmp_path / "t.gguf",
        {
            "general.architecture": string("gemma4"),
            "general.sampling.top_k": Value(ValueType.F32, value),
        },
        [],
    )
    with pytest.raises(InputError, match=r"sampling\.top_k: expected a finite number"):
        _sampling_defaults.sampler(tmp_path / "t.gguf", Output())


def test_certificates_are_checked_before_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    (tmp_path / "not-read.gguf").touch()
    line = ["serve", "-m", str(tmp_path / "not-read.gguf"), "--port", "0"]
    assert cli.run([*line, "--ssl-key-file", str(tmp_path / "c.pem")]) == 2
    assert "--ssl-key-file needs a certificate" in capsys.readouterr().err
    for name in ("c.pem", "nowhere.pem"):
        assert cli.run([*line, "--ssl-cert-file", str(tmp_path / name)]) == 3
        assert f"{name}: not a usable certificate" in capsys.readouterr().err


def test_no_task_is_left_when_the_chat_ends() -> None:
    """asyncio reports tasks that are pending when their loop is closed."""
    with chat._loop() as loop:
        task = loop.create_task(asyncio.sleep(60))
    assert task.cancelled()


def test_regen_repeats_a_message_whose_answer_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It repeated the message before, and dropped the answer to that."""
    asked: list[list[str]] = []

    class Backend:
        async def answer(
            self, messages: Sequence[Message], seed: int, reply: Reply
        ) -> AsyncGenerator[TextPiece, None]:
            asked.append([message["content"] for message in messages])
            reply.content = f"answer {len(asked)}"
            yield TextPiece(reply.content)
            if len(asked) in (2, 4):
                raise InputError("the server ended")

        async def close(self) -> None: ...

    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n/regen\nc\nd\n/clear\ne\n"))
    loop = asyncio.new_event_loop()
    talk = Conversation(Backend(), Output(), system=None, seed=1, show=False)
    talk.run(loop)
    loop.close()
    assert asked == [
        ["a"],
        ["a", "answer 1", "b"],
        ["a", "answer 1", "b"],
        ["a", "answer 1", "b", "answer 3", "c"],
        ["a", "answer 1", "b", "answer 3", "d"],  # replaces the message without an answer
        ["e"],
    ]
    assert capsys.readouterr().out == "".join(f"answer {i + 1}\n" for i in range(6))


def test_seeds_go_on_at_0_after_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message after the first answer was refused."""
    seeds: list[int] = []

    class Backend:
        async def answer(
            self, messages: Sequence[Message], seed: int, reply: Reply
        ) -> AsyncGenerator[TextPiece, None]:
            seeds.append(seed)
            yield TextPiece("x")

        async def close(self) -> None: ...

    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\nc\n"))
    loop = asyncio.new_event_loop()
    Conversation(Backend(), Output(), system=None, seed=2**64 - 1, show=False).run(loop)
    loop.close()
    assert seeds == [2**64 - 1, 0, 1]


def test_a_remark_of_the_engine_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Backend:
        async def answer(
            self, messages: Sequence[Message], seed: int, reply: Reply
        ) -> AsyncGenerator[TextPiece, None]:
            reply.notes = ["the draft is small", f"remark {seed}"]
            yield TextPiece("x")

        async def close(self) -> None: ...

    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    loop = asyncio.new_event_loop()
    Conversation(Backend(), Output(), system=None, seed=1, show=False).run(loop)
    loop.close()
    told = capsys.readouterr().err
    assert [told.count(note) for note in ("is small", "remark 1", "remark 2")] == [1, 1, 1]
