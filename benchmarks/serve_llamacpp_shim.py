"""Replace llama-server by `g4spec serve` in llama.cpp's own server tests (a pytest plugin).

`serve_llamacpp_tests.py` loads it. The tests set attributes of a `ServerProcess` and start it; here
these attributes become the command line of `g4spec serve`, which runs in a child process. Requests
and checks are unchanged. Checks that depend on the vocabulary or the words of llama.cpp's test
model use those of the bundled family: numbers of prompt tokens are counted with its tokenizer, and
a text that should match words of their model must only be non-empty; the result names these tests.
Other constants of their model are replaced in the text of the tests (`serve_llamacpp_tests.FACTS`).

Some defaults of llama-server differ; these options are set explicitly: a last message of the
assistant is continued, all origins are allowed, and /slots and /metrics are off unless the test
enables them. Reasoning is off unless the test sets it: the template of their model has none.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import serve_llamacpp_engine
import torch  # noqa: F401 - imported once, before children are forked
from requests.structures import CaseInsensitiveDict
from starlette.types import ASGIApp, Receive, Scope, Send

from g4spec import cli
from g4spec.cli import _engine
from g4spec.gguf import GGUF
from g4spec.runtime.template import render_in_process
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server import app, loaded_models, run  # noqa: F401

FAMILY = Path(os.environ["G4SPEC_FAMILY"])
ANY_NAME = (
    "test",
    "davinci-002",
    "gpt-3.5-turbo",
    "gpt-3.5-turbo-instruct",
    "gpt-4.1",
    "codellama70b",
)
"""Names of models in their requests, which llama-server takes for its only one."""

NEEDS = {
    "enable_ctx_shift": "a shifting context",
    "server_embeddings": "embeddings",
    "server_reranking": "reranking",
    "lora_files": "LoRA adapters",
    "mmproj_url": "images",
    "media_path": "images",
    "spec_synth_len": "drafts accepted at given rates",
    "spec_synth_rates": "drafts accepted at given rates",
    "slot_save_path": "slots saved to files",
    "server_tools": "tools that the server runs",
    "gcp_compat": "Google's prediction route",
    "mcp_servers_config": "MCP",
    "mcp_servers_json": "MCP",
    "ui_mcp_proxy": "a proxy for MCP",
    "models_preset": "a router's presets",
}
"""Attributes of features that `g4spec serve` does not have."""

NEEDED_BY = {
    "test_router_remote_preset": "a router's presets",
    "test_router_download_model": "models that are downloaded and deleted over HTTP",
    "test_router_delete_model": "models that are downloaded and deleted over HTTP",
}
"""Tests that use such a feature by a request."""

ROUTER_MODELS = (
    "tinygemma3-GGUF:Q8_0",
    "test-model-stories260K:F32",
    "test-model-stories260K-infill:F32",
)
"""Files of the models that their tests of a router name, with `ggml-org/` before each."""

FAKE_SECONDS = 2
"""Seconds that a load, and each request behind a router, takes longer in their tests
(LLAMA_SERVER_DEBUG_FAKE_TIMING)."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of that name."""

LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content"
    " | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
COMMAND_R = (
    "{% set names = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} %}"
    "{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|><|' + names[m.role] + '_TOKEN|>' + m.content"
    " | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
"""Templates that llama-server has under these names, as in its llama-chat.cpp."""

WORDS: set[str] = set()
"""Tests of which a text was compared with words of another model."""

now = {"test": ""}


class NotOffered(Exception):
    """A test needs a feature that `g4spec serve` does not have."""


def arguments(server: Any) -> list[str]:
    """Translate the attributes of their ServerProcess into our command line."""
    for name, what in NEEDS.items():
        if getattr(server, name, None):
            raise NotOffered(what)
    test = now["test"].partition("::")[2].partition("[")[0]
    if test in NEEDED_BY:
        raise NotOffered(NEEDED_BY[test])
    if "gemma3" in str(server.model_hf_repo):
        raise NotOffered("images")
    slots = server.n_slots or 1
    context = server.n_ctx // (1 if server.kv_unified else slots) if server.n_ctx else 512
    out = [*("--device", "cpu", "--host", server.server_host, "--port", server.server_port)]
    out += ["-np", slots, "-c", context, "--temp", server.temperature, "--seed", server.seed]
    out += ["--cors-origin", server.cors_origins or "*"]
    out += ["--reasoning", server.reasoning or "off", "--prefill-assistant"]
    for option, value in (
        ("--no-slots", not server.server_slots),
        ("--no-metrics", not server.server_metrics),
        ("--no-ui", server.no_ui),
        ("--no-models-autoload", server.no_models_autoload),
    ):
        out += [option] if value else []
    for option, value in (
        ("--api-key", server.api_key),
        ("--tags", server.model_tags),
        ("--models-max", server.models_max),
        ("--sleep-idle-seconds", server.sleep_idle_seconds),
        ("-n", server.n_predict if (server.n_predict or -1) > 0 else None),
    ):
        out += [option, value] if value is not None else []
    if server.chat_template_file:
        out += ["--chat-template-file", server.chat_template_file]
    elif server.chat_template:
        out += ["--chat-template-file", named_template(server.chat_template)]
    return ["serve", *map(str, [*out, *models(server)])]


def models(server: Any) -> list[Any]:
    """Return the options about models: one with its names, or a router's folder."""
    if server.model_hf_repo is None and not server.model_file:
        return ["--models", router_folder()]
    split = "split-00001*" if "split" in str(server.model_hf_file) else "target.gguf"
    out: list[Any] = ["-m", next(FAMILY.glob(split))]
    names = (server.model_alias or "tinyllama").split(",")
    for name in [*sorted(names), *(ANY_NAME if len(names) == 1 else ())]:
        out += ["-a", name]
    return out + (["-md", FAMILY / "dflash.gguf"] if server.model_draft else [])


def router_folder() -> Path:
    """Return a folder with the models that their tests of a router name.

    If two files have the same name, the id of the second includes its folder: this gives the ids
    their `ggml-org/`.
    """
    folder = FAMILY / "ggml-org"
    (folder / "a").mkdir(parents=True, exist_ok=True)
    for name in ROUTER_MODELS:
        for path in (folder / f"{name}.gguf", folder / "a" / f"{name}.gguf"):
            if not path.exists():
                os.link(FAMILY / "target.gguf", path)
    return folder


def named_template(name: str) -> Path:
    """Return a file with a template that llama-server knows by name, or with the given text."""
    path = FAMILY / "template.jinja"
    known = {"chatml": CHATML, "llama3": LLAMA3, "command-r": COMMAND_R}
    path.write_text(known.get(name, name))
    return path


class Slow:
    """ASGI middleware that delays requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            await asyncio.sleep(FAKE_SECONDS)
        await self._app(scope, receive, send)


def slow_down_router() -> None:
    """Delay loads and requests behind a router, as llama-server does in these tests."""
    create, open_model = app.create_app, loaded_models.open_model

    def slow_app(service: Any, **more: Any) -> Any:
        made = create(service, **more)
        if more.get("mounted"):
            made.add_middleware(Slow)
        return made

    def slow_open(model: Any, load: Any) -> Any:
        time.sleep(FAKE_SECONDS)
        return open_model(model, load)

    app.create_app = slow_app
    loaded_models.open_model = slow_open


class Child:
    """`g4spec serve` in a forked process, with the methods of `subprocess.Popen` that are used."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                serve_llamacpp_engine.end_only_with_eos()
                _engine.load_with_threads = serve_llamacpp_engine.load
                slow_down_router()
                code = cli.run(argv)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """See `subprocess.Popen`."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """See `subprocess.Popen`."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("g4spec serve", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """See `subprocess.Popen`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """See `subprocess.Popen`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(self: Any, timeout_seconds: float = 60) -> None:
    """Replace upstream's `ServerProcess.start`."""
    import utils

    log = FAMILY / "serve.log"
    self.process = Child(arguments(self), log)
    utils.server_instances.add(self)
    end = time.monotonic() + timeout_seconds
    while True:
        if self.process.poll() is not None:
            raise RuntimeError(f"g4spec serve ended: {log.read_text()[-900:]}")
        try:
            if self.make_request("GET", "/health").status_code == 200:
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError("g4spec serve does not answer")
        time.sleep(0.05)


# ---- what is true of the family in the place of what is true of their model


class Facts:
    """Numbers of prompt tokens."""

    def __init__(self) -> None:
        with GGUF(FAMILY / "target.gguf") as file:
            self._tokenizer = Tokenizer.from_gguf(file)

    def prompt(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self._tokenizer.encode(text))

    def repeated(self, text: str, count: int) -> str:
        """Repeat a text until it has nearly `count` tokens."""
        return text * next(n for n in range(count, 0, -1) if self.prompt(text * n) <= count)

    def chat(self, system: str, user: Any, template: str | None) -> int:
        """Count the tokens of a conversation."""
        if not isinstance(user, str):
            user = "\n".join(part["text"] for part in user)
        piece = self._tokenizer.piece
        bos, eos = (piece(i, special=True).decode() for i in (self._tokenizer.bos, 1))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        text = render_in_process(
            template or self._tokenizer.template or "",
            messages=messages,
            bos=bos,
            eos=eos,
            tools=None,
            enable_thinking=False,
        )
        return self.prompt(text)


FACTS = Facts()


def pytest_configure(config: pytest.Config) -> None:
    """Replace the start of servers, before any test module imports it."""
    sys.path.insert(0, str(config.rootpath))
    import utils

    utils.ServerProcess.start = start
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = lambda url, output_file_path=None: url
    post = utils.ServerProcess.make_request

    def make_request(self: Any, method: str, path: str, data: Any = None, *more: Any, **named: Any):  # type: ignore[no-untyped-def]
        if self.debug and path.endswith("/chat/completions"):  # what --verbose is there
            data = {"verbose": True, **data}
        if self.model_draft and path == "/completion":  # as --spec-draft-n-max
            data = {"speculative.n_max": min(self.spec_draft_n_max or 15, 15), **data}
        result = post(self, method, path, data, *more, **named)
        result.headers = CaseInsensitiveDict(result.headers)  # they compare names as spelled
        return result

    utils.ServerProcess.make_request = make_request
    theirs = utils.match_regex

    def match_regex(regex: str, text: str) -> bool:
        if theirs(regex, text):
            return True
        WORDS.add(now["test"])
        return bool(text)

    utils.match_regex = match_regex


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove tests that were run before; replace numbers of prompt tokens in parameters."""
    reports = FAMILY / "report.jsonl"
    if reports.exists():
        done = {json.loads(line)["test"] for line in reports.read_text().splitlines()}
        items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "n_prompt" not in params:
            continue
        if "prompt" in params:
            params["n_prompt"] = FACTS.prompt(params["prompt"])
        else:
            template = params.get("chat_template")
            template = CHATML if template == "chatml" else template
            params["n_prompt"] = FACTS.chat(
                params["system_prompt"], params["user_prompt"], template
            )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record which test runs."""
    now["test"] = item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write a line of JSON for each test that has ended."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo.value if call.excinfo else None
        line = {
            "test": item.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "words": item.nodeid in WORDS,
            "not offered": None,
            "seconds": round(report.duration, 2),
        }
        if isinstance(error, NotOffered):
            line["not offered"] = str(error)
        elif error is not None:
            where = call.excinfo.traceback[-1] if call.excinfo else None
            line["error"] = f"{type(error).__name__}: {error}"[-900:]
            line["line"] = f"{Path(str(where.path)).name}:{where.lineno + 1}" if where else ""
        with (FAMILY / "report.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report
