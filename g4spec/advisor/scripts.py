"""Writes a recipe as shell scripts and a compose file."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from g4spec.advisor.machine import Machine
from g4spec.advisor.recipe import Recipe
from g4spec.advisor.recipe_values import PORTS
from g4spec.convert import hub_id
from g4spec.errors import UsageError
from g4spec.gguf.atomic import atomic_write, check_replaceable, has_mark

MARK = "# written by g4spec recipe"
"""Line of files that may be replaced."""
STARTING = ("start.sh", "start-node*.sh", "compose.yaml")
"""Files that start an engine."""


def compose(r: Recipe, machine: Machine, home: str = ".") -> str:
    """Return a compose file for one node; raise UsageError without an image or for more nodes.

    Args:
        home: folder with the recipe's files, as seen from that of the compose file.
    """
    _check_compose(r, machine)
    start = {
        "vllm": [r.model],
        "sglang": ["python3", "-m", "sglang.launch_server", "--model-path", r.model],
        "llama.cpp": ["-hf" if hub_id.is_remote(r.model) else "-m", r.model],
    }[r.engine]
    words = start + _arguments(r)
    if r.engine in ("llama.cpp", "sglang"):
        words += ["--host", "0.0.0.0"]
    port = PORTS[r.engine]
    first = [line for line in r.prepare if not line.startswith(("#", "pip "))]  # no installation
    lines = [
        *(
            [
                f"# First, in {'this folder' if home == '.' else home}:",
                *(f"#   {line}" for line in first),
            ]
            if first
            else []
        ),
        "services:",
        f"  {r.engine.replace('.', '')}:",
        f"    image: {r.image}",
        "    ipc: host",
        "    working_dir: /models",
        f'    ports: ["{port}:{port}"]',
        "    volumes:",
        "      - ${HOME}/.cache/huggingface:/root/.cache/huggingface",
        f"      - {_literal(home)}:/models",
    ]
    if r.engine == "llama.cpp":
        lines += ["      - ${HOME}/.cache/llama.cpp:/root/.cache/llama.cpp"]
        words += ["--port", str(port)]
    if r.env:
        lines += ["    environment:"] + [f"      {k}: {json.dumps(v)}" for k, v in r.env.items()]
    lines += ["    command:"] + [f"      - {json.dumps(_literal(w))}" for w in words]
    lines += [
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices:",
        "            - driver: nvidia",
        "              count: all",
        "              capabilities: [gpu]",
    ]
    return "\n".join(lines) + "\n"


def _check_compose(r: Recipe, machine: Machine) -> None:
    if not r.image:
        raise UsageError(
            f"no published image of {r.title} is known for this GPU",
            fix="use the commands: the same without --compose"
            + ("; docs/guides/container.md builds an image" if r.engine == "g4spec" else ""),
        )
    if machine.nodes > 1:
        raise UsageError("a compose file is for one node", fix="use the commands, one a node")
    if path := _outside(r):
        raise UsageError(
            "a compose file mounts the current folder only",
            found=path,
            fix="run this in the folder that holds the files, or use the commands",
        )


def _literal(text: str) -> str:
    """Return a text for a compose file, where $NAME would be replaced by a variable."""
    return text.replace("$", "$$")


def _arguments(r: Recipe) -> list[str]:
    return [word for raw in r.arguments[0] for word in shlex.split(raw)]


def _outside(r: Recipe) -> str | None:
    """Return an argument that names a file outside the current folder, or None."""
    outside = re.compile(r"""(^|["'=])(/|~|\.\.(/|$))""")
    return next((word for word in [r.model, *_arguments(r)] if outside.search(word)), None)


def write(r: Recipe, machine: Machine, folder: Path) -> tuple[list[Path], list[Path]]:
    """Write prepare.sh, one start script per node, bench.sh, and a compose file if an image is
    known and all files are in the current folder. Start scripts and a compose file of an earlier
    recipe in this folder are removed. Return the paths of written and of removed files. Raises
    UsageError for an existing file of such a name that g4spec did not write."""
    home = _home(r, folder)
    texts = {"prepare.sh": _script(r.prepare, home), "bench.sh": _script(r.bench, home)}
    for rank, command in enumerate(r.commands):
        name = "start.sh" if len(r.commands) == 1 else f"start-node{rank}.sh"
        texts[name] = _script([command], home)
    if r.image and machine.nodes == 1 and not _outside(r):
        texts["compose.yaml"] = f"{MARK}\n{compose(r, machine, home)}"
    for name in texts:
        check_replaceable(folder / name, [MARK.encode()], "a script of g4spec")
    stale = [
        path
        for pattern in STARTING
        for path in folder.glob(pattern)
        if path.name not in texts and path.is_file() and has_mark(path, [MARK.encode()])
    ]
    for path in stale:
        path.unlink()
    paths = []
    for name, text in texts.items():
        path, data = folder / name, text.encode(errors="surrogateescape")
        with atomic_write(path, len(data)) as f:
            f.write(data)
        paths.append(path)
    return paths, stale


def _home(r: Recipe, folder: Path) -> str:
    """Return the path from `folder` to the current folder if the recipe names files there, by
    relative paths, else "."."""
    lines = [line for line in r.prepare if not line.startswith("#")]
    words = [r.model, *_arguments(r), *(word for line in lines for word in shlex.split(line))]
    words += [name for word in words for name in re.findall('"([^"]+)"', word)]  # in JSON
    named = any(not os.path.isabs(word) and os.path.exists(word) for word in words)
    return os.path.relpath(os.getcwd(), folder.resolve()) if named else "."


def _script(commands: list[str], home: str) -> str:
    go = "" if home == "." else f'cd "$(dirname "$0")"/{shlex.quote(home)}\n'
    return f"#!/bin/sh\n{MARK}\nset -e\n{go}" + "".join(f"{c}\n" for c in commands)
