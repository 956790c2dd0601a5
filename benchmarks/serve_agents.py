"""Run coding agents against the server, each with a tool call and its result.

    npm install --prefix DIR @anthropic-ai/claude-code @openai/codex opencode-ai \\
        @earendil-works/pi-coding-agent @continuedev/cli    # needs node 22 or newer
    python benchmarks/serve_agents.py DIR [--only claude ...] [--log FOLDER]

Each agent runs without a terminal, with an empty home folder and one question. The bundled model is
too small to choose a tool, so a proxy changes the first request that offers the agent's harmless
tool (`AGENTS`): that tool becomes required. The agent runs or refuses the call with the arguments
that the model wrote, and sends the result back; the answer to it, shortened by a logit bias, ends
the exchange. An agent passes if it ends by itself with exit code 0, no request was refused, and a
request with the result of the call was answered. Writes dated JSON.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.runtime.engine import Engine
from g4spec.server import bodies, run
from g4spec.server.app import create_app
from g4spec.server.service import Service
from g4spec.server.settings import Settings
from tests.server.running_server import TEMPLATE

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
QUESTION = "What is 2 + 3?"
MOST = 400
"""New tokens of an answer."""


@dataclass
class Seen:
    """Requests of an agent, one line each."""

    tool: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    forced: bool = False
    returned: bool = False


class Between:
    """ASGI middleware that makes the first conversation begin with a tool call, and records
    requests."""

    def __init__(self, inner: Callable[..., Awaitable[None]], folder: Path | None) -> None:
        self._inner, self._folder = inner, folder
        self.seen = Seen("")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle an ASGI event."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        raw, _ = await bodies.read_body(receive)
        note: dict[str, Any] = {"path": scope["path"]}
        if scope["method"] == "POST":
            raw = self._changed(scope["path"], raw, note)
        self.seen.requests.append(note)

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
            elif note.get("status", 200) >= 400:
                note["said"] = message.get("body", b"").decode()[:300]
            await send(message)

        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        await self._inner(
            {**scope, "headers": [*headers, (b"content-length", b"%d" % len(raw))]},
            bodies.replay_body(raw, receive),
            noted,
        )

    def _changed(self, path: str, raw: bytes, note: dict[str, Any]) -> bytes:
        body = json.loads(raw)
        if self._folder is not None:
            name = f"{self.seen.tool}-{len(self.seen.requests)}.json"
            (self._folder / name).write_bytes(raw)
        tools = [t.get("name") or t.get("function", {}).get("name") for t in body.get("tools", [])]
        note |= {"bytes": len(raw), "tools": len(tools), "fields": sorted(body)}
        result = any(
            mark in raw for mark in (b'"tool_result"', b'"role":"tool"', b'"function_call_output"')
        )
        self.seen.returned |= result
        for key in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
            if key in body:
                body[key] = min(body[key], MOST)
        if result:  # agents take it for an error where a limit ends the answer
            body["logit_bias"] = {"1": 6, "106": 6}
        if self.seen.tool in tools and not self.seen.forced:
            self.seen.forced = note["forced"] = True
            body["tool_choice"] = {
                "/v1/messages": {"type": "tool", "name": self.seen.tool},
                "/v1/responses": {"type": "function", "name": self.seen.tool},
            }.get(path, {"type": "function", "function": {"name": self.seen.tool}})
        return json.dumps(body).encode()


def claude(folder: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Start Claude Code with a short system prompt: its own has 76 KB, too much for a CPU."""
    env = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "600000",
        "MAX_THINKING_TOKENS": "0",
    }
    program = folder / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    return [
        str(program),
        "-p",
        QUESTION,
        "--model",
        "tiny",
        "--output-format",
        "json",
        "--max-turns",
        "4",
        "--tools",
        "Read",
        "--system-prompt",
        "Be brief.",
    ], env


def codex(folder: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Start Codex."""
    (home / "config.toml").write_text(
        'model = "tiny"\nmodel_provider = "g4spec"\n[model_providers.g4spec]\nname = "g4spec"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nstream_idle_timeout_ms = 600000\n'
    )  # namespaces of tools and OpenAI's search are no functions
    program = folder / "node_modules/.bin/codex"
    return [
        str(program),
        "exec",
        "--skip-git-repo-check",
        "--sandbox",
        "read-only",
        "-c",
        'web_search="disabled"',
        "--disable",
        "multi_agent",
        QUESTION,
    ], {"CODEX_HOME": str(home)}


def opencode(folder: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Start opencode."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "g4spec",
        "models": {"tiny": {}},
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
    }
    others = ("bash", "edit", "write", "task", "glob", "grep", "todowrite", "webfetch", "skill")
    config = {
        "provider": {"g4spec": provider},
        "permission": {"bash": "deny", "edit": "deny"},
        "agent": {"build": {"prompt": "Be brief.", "tools": dict.fromkeys(others, False)}},
    }
    (home / "opencode.json").write_text(json.dumps(config))
    env = {"OPENCODE_CONFIG": str(home / "opencode.json"), "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    program = folder / "node_modules/opencode-linux-x64/bin/opencode"
    return [str(program), "run", "-m", "g4spec/tiny", QUESTION], env


def pi(folder: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Start pi."""
    provider = {
        "baseUrl": f"{url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": "tiny"}],
    }
    (home / ".pi/agent").mkdir(parents=True)
    (home / ".pi/agent/models.json").write_text(json.dumps({"providers": {"g4spec": provider}}))
    program = folder / "node_modules/.bin/pi"
    return [
        str(program),
        "--print",
        "--no-session",
        "--provider",
        "g4spec",
        "--model",
        "tiny",
        "--tools",
        "read",
        "--system-prompt",
        "Be brief.",
        QUESTION,
    ], {}


def continue_cli(folder: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Start Continue's CLI."""
    (home / "config.yaml").write_text(
        "name: g4spec\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: tiny\n    provider: openai\n"
        f"    model: tiny\n    apiBase: {url}/v1\n    apiKey: none\n"
    )
    program = folder / "node_modules/.bin/cn"
    return [str(program), "--print", "--config", str(home / "config.yaml"), QUESTION], {}


AGENTS: dict[str, tuple[Callable[..., tuple[list[str], dict[str, str]]], str]] = {
    "claude": (claude, "Read"),
    "codex": (codex, "get_goal"),
    "opencode": (opencode, "read"),
    "pi": (pi, "read"),
    "continue": (continue_cli, "Read"),
}
"""How each is started, and a tool of it that harms nobody whatever its arguments."""


def tried(name: str, folder: Path, url: str, between: Between, seconds: int) -> dict[str, Any]:
    """Run the exchange of one agent and return the result."""
    start, tool = AGENTS[name]
    between.seen = Seen(tool)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        command, env = start(folder, url, home)
        clean = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        try:
            done = subprocess.run(
                command,
                env={**clean, "HOME": place, **env},
                cwd=place,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            code, said = done.returncode, (done.stdout + done.stderr)[-1500:]
        except subprocess.TimeoutExpired as error:
            code, said = None, str(error.stdout)[-1500:]
    seen = between.seen
    refused = [note for note in seen.requests if note.get("status", 200) >= 400]
    return {
        "passed": code == 0 and not refused and seen.returned,
        "code": code,
        "tool": tool,
        "call was asked for": seen.forced,
        "result came back": seen.returned,
        "requests": len(seen.requests),
        "refused": refused,
        "paths": sorted({note["path"] for note in seen.requests}),
        "said": said.replace(place, "HOME").replace(tempfile.gettempdir(), "TEMP"),
        "seconds": round(time.perf_counter() - began),
    }


def longer(source: Path, context: int) -> Path:
    """Copy the target with a larger context length than it was trained with: agents send long
    prompts."""
    shutil.copytree(TINY / "target", source)
    text = (source / "config.json").read_text()
    text = re.sub(r'("max_position_embeddings": )\d+', rf"\g<1>{context}", text)
    (source / "config.json").write_text(text)
    return source


def main() -> int:
    """Serve the family and start each agent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(AGENTS), choices=AGENTS)
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--seconds", type=int, default=900, help="patience with each")
    parser.add_argument("--log", type=Path, help="folder for the bodies of requests")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target.gguf", Path(name) / "dflash.gguf"
        convert.convert(longer(Path(name) / "source", args.context), target)
        convert.convert(TINY / "dflash", draft, target=target)
        with Engine.load(
            target, draft, n_ctx=args.context, parallel=2, prefix_cache=256 << 20
        ) as engine:
            engine.tokenizer.template = TEMPLATE
            service = Service(engine, Settings("tiny", time_limit=3_600, n_predict=MOST))
            address, ready = run.ServerAddress(port=0), threading.Event()
            listeners = run.listen(address)
            between = Between(create_app(service), args.log)
            server = run.create_server(between, service, address, ready.set)  # type: ignore[arg-type]
            thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
            thread.start()
            ready.wait(60)
            for agent in args.only:
                found[agent] = tried(
                    agent, args.folder.resolve(), run.url(address, listeners), between, args.seconds
                )
                print(agent, json.dumps(found[agent], indent=1), flush=True)
            server.should_exit = True
            thread.join(30)
    packages = json.loads((args.folder / "package-lock.json").read_text())["packages"]
    versions = {
        name: packages[f"node_modules/{name}"]["version"] for name in packages[""]["dependencies"]
    }
    write_result(args.out, "serve-agents", {"versions": versions, "agents": found})
    return 0 if all(each["passed"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
