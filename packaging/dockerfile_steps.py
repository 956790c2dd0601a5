"""Run the steps of the Dockerfile outside a container, in a clean environment:
`dockerfile_steps.py [cpu|cuda] [NAME=VALUE ...]`, the values for its ARGs.

COPY copies into a temporary folder, RUN runs there with the environment's pip, ENV holds; the RUN
that makes a user is left out. Then the entry point answers `CMD`, and runs the whole demo.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return (instruction, rest) of each stage by its name, with those of the stage below it."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    found: dict[str, list[tuple[str, str]]] = {"": []}
    now = found[""]
    for word, rest in (line.split(maxsplit=1) for line in lines if line.strip()):
        if word == "FROM":
            below, _, name = rest.split()
            now = found[name] = list(found.get(below, []))
        else:
            now.append((word, rest))
    return found


def play(steps: list[tuple[str, str]], place: Path, env: dict[str, str]) -> None:
    """Run the steps of a stage in `place`, and its entry point."""
    lists: dict[str, list[str]] = {}
    for word, rest in steps:
        print(f"== {word} {rest}", flush=True)
        if word == "ARG":
            name, _, value = rest.partition("=")
            env.setdefault(name, value)
        elif word == "ENV":
            pairs = dict(pair.split("=", 1) for pair in rest.split())
            env |= {name: re.sub(r"^/cache", f"{place}/cache", v) for name, v in pairs.items()}
        elif word == "COPY":
            *sources, to = rest.split()
            for source in map(ROOT.joinpath, sources):
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, place / to)
        elif word == "RUN" and not rest.startswith("useradd"):
            subprocess.run(rest, shell=True, cwd=place, env=env, check=True)
        elif word in ("ENTRYPOINT", "CMD"):
            lists[word] = json.loads(rest)
    run = place / "models"
    run.mkdir()
    demo = ["demo", "--family", str(ROOT / "examples" / "tiny"), "-n", "4"]
    for words in (lists["CMD"], ["--version"], demo):
        subprocess.run([*lists["ENTRYPOINT"], *words], cwd=run, env=env, check=True)


def main(target: str = "cpu", *values: str) -> None:
    """Run one stage in a temporary folder."""
    steps = stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))[target]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"PATH": f"{place}/venv/bin:{env['PATH']}"} | dict(v.split("=", 1) for v in values)
        play(steps, place, env)


if __name__ == "__main__":
    main(*sys.argv[1:])
