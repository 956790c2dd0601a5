"""First use: llama.cpp's flags, help, threads, and a machine without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec import cli
from g4spec.cli import _llama_flags, _threads, render
from tests.support import tiny, tokens
from tests.support.commands import Cli

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("-p", "hello world", "-n", 4, "-c", 64, "--device", "cpu")


def process(*argv: object, without: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `g4spec` in a process in which the package `without` cannot be imported."""
    hide = f"import sys; sys.modules[{without!r}] = None\n" if without else ""
    code = f"{hide}from g4spec.__main__ import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


# ---- flags of llama.cpp


def test_llama_flags_with_an_equivalent(files: tuple[str, str], g4spec: Cli) -> None:
    ours = g4spec.json(
        "generate",
        "-m",
        files[0],
        *SHORT,
        "--temp",
        1,
        "--seed",
        3,
        "--chat",
        "--cache-type",
        "f16",
        "--system",
        "be brief",
    )
    theirs = g4spec.json(
        "generate",
        "-hf",
        files[0],
        *SHORT,
        "--temp",
        1,
        "-s",
        3,
        "--chat",
        "-ctk",
        "f16",
        "--cache-type-v=f16",
        "-sys",
        "be brief",
    )
    assert theirs["ids"] == ours["ids"]


def test_all_other_llama_flags_are_refused_with_reasons(g4spec: Cli) -> None:
    stderr = g4spec("generate", "-m", "x", "-p", "a", "-ngl", 99, "-fa", "on", "--jinja", code=2)[1]
    for flag in ("-ngl", "-fa", "--jinja"):
        assert f"{flag}: {_llama_flags.REFUSED[flag]}" in stderr
    assert len(stderr.splitlines()) == 1
    assert "-fa: " in g4spec("generate", "-m", "x", "-p", "a", "-fa", code=2)[1]
    assert "--split-mode: " in g4spec("bench", "-m", "x", "--split-mode=row", code=2)[1]
    assert "no option --cache-type" in g4spec("inspect", "-ctk", "q8_0", "x", code=2)[1]


def test_two_spellings_with_different_values(g4spec: Cli) -> None:
    words = ("generate", "-m", "x", "-p", "a", "-ctk", "q8_0", "-ctv", "f16")
    assert "-ctk q8_0 and -ctv f16" in g4spec(*words, code=2)[1]


def test_values_that_look_like_flags(files: tuple[str, str], g4spec: Cli) -> None:
    want = g4spec("tokenize", "-m", files[0], "--", "-ngl")[0]
    got = g4spec.json("generate", "-m", files[0], "-p", "-ngl", "-n", 1, "-c", 64)
    assert got["stats"]["prompt_tokens"] == len(want.split())


def test_llama_flags_map_to_existing_options() -> None:
    group: Any = cli.typer.main.get_command(cli.app())
    ours = {
        f for c in group.commands.values() for p in c.params for f in (*p.opts, *p.secondary_opts)
    }
    assert set(_llama_flags.SAME.values()) <= ours


def test_generate_until_the_context_is_full(files: tuple[str, str], g4spec: Cli) -> None:
    words = ("generate", "-m", files[0], "-p", "hello", "-n", -1, "--ignore-eos")
    run = g4spec.json(*words, "-c", 32)["stats"]
    assert run["prompt_tokens"] + run["tokens"] in (32, 33) and run["stop_reason"] == "context"
    trained = g4spec("generate", "-m", files[0], "-p", "x", "-c", 9999999, code=2)[1]
    assert "expected 1 to" in trained
    negative = g4spec("generate", "-m", files[0], "-p", "x", "-c", -1, code=2)[1]
    assert "what the model was trained on, or 0 for all of it, found -1" in negative
    assert g4spec.json("generate", "-m", files[0], "-p", "hello", "-n", 2, "-c", 0)["ids"]
    assert "-n" in g4spec("generate", "-m", files[0], "-p", "hello", "-n", -2, code=2)[1]


@pytest.mark.parametrize("argv", [["help"], ["-h"]])
def test_help_and_version(argv: list[str], g4spec: Cli) -> None:
    assert g4spec(*argv)[0] == g4spec("--help")[0]
    assert g4spec("help", "bench")[0] == g4spec("bench", "-h")[0] != ""
    assert g4spec("-V")[0] == g4spec("--version")[0]
    assert g4spec("help", "nonsense", code=2)[1]


# ---- prompts


def test_empty_prompts_are_refused(files: tuple[str, str], g4spec: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for prompt_option in [("-p", ""), ("-p", "", "--chat"), ("-f", tmp_path / "empty")]:
        assert (
            "the prompt is empty" in g4spec("generate", "-m", files[0], *prompt_option, code=3)[1]
        )
    (tmp_path / "bos").write_text("2")
    words = ("generate", "-m", files[0], "--tokens-file", tmp_path / "bos", "-n", 1)
    assert g4spec.json(*words)["stats"]["prompt_tokens"] == 1


def test_note_on_chat_models(files: tuple[str, str], g4spec: Cli, tmp_path: Path) -> None:
    def notes(*words: object) -> int:
        return g4spec("generate", "-n", 1, "-c", 64, *words)[1].count("--chat")

    assert notes("-m", files[0], "-p", "hello") == 1
    assert notes("-m", files[0], "-p", "hello", "--chat") == 0
    assert notes("-m", files[0], "-p", "hello", "-q") == 0
    bare = tokens.target_file(tmp_path / "bare.gguf", chat_template=None)
    assert notes("-m", bare, "-p", "hello") == 0


# ---- threads


def test_threads_reach_torch(files: tuple[str, str]) -> None:
    probe = (
        "import sys\nfrom g4spec import __main__, cli\nrun = cli.run\n"
        "def report(argv):\n    code = run(argv)\n    import os, torch\n"
        "    sys.stderr.write(f'{torch.get_num_threads()} {os.environ[\"OMP_WAIT_POLICY\"]}')\n"
        "    return code\n"
        "cli.run = report\n__main__.main()"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}

    def threads(*options: str, **more: str) -> str:
        words = ["generate", "-m", files[0], "-q", *map(str, SHORT), *options]
        done = subprocess.run(
            [sys.executable, "-c", probe, *words],
            capture_output=True,
            text=True,
            check=True,
            env={**env, "PYTHONPATH": str(ROOT), **more},
        )
        return done.stderr

    assert threads() == "1 PASSIVE"
    assert threads("-t", "2", OMP_WAIT_POLICY="passive") == "2 passive"


def test_large_targets_use_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for weights in (_threads.SMALL_TARGET, _threads.SMALL_TARGET - 1):
        _threads.limit_threads(SimpleNamespace(memory=SimpleNamespace(weights=weights)))  # type: ignore[arg-type]
    assert taken == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _threads.limit_threads(SimpleNamespace(memory=SimpleNamespace(weights=1)))  # type: ignore[arg-type]
    assert taken == [1]


@pytest.mark.parametrize("argv", [("generate", "-t", "0"), ("bench", "-t", "many")])
def test_invalid_threads(argv: tuple[str, ...], g4spec: Cli) -> None:
    assert "-t" in g4spec(*argv, "-m", "x", code=2)[1]


# ---- without torch


def test_commands_that_run_without_torch(files: tuple[str, str], tmp_path: Path) -> None:
    folder = tiny.target(tmp_path / "checkpoint")
    made, small = tmp_path / "t.gguf", tmp_path / "s.gguf"
    lines: list[tuple[object, ...]] = [
        ("convert", folder, "-o", made),
        ("quantize", made, small, "--allow-requantize"),
        ("inspect", small),
        ("validate", small),
        ("validate", "--list-rules"),
        ("tokenize", "-m", files[0], "hello"),
        ("doctor", "--assume", "RTX 3090", "-m", "12b"),
        ("recipe", "vllm", "-m", "12b", "--assume", "A100 80GB"),
    ]
    code = (
        "import json, sys\nsys.modules['torch'] = None\nfrom g4spec import cli\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    assert cli.run([*line, '-q']) == 0, line"
    )
    text = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", code, text],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "-p", "a"),
        ("verify", "-md", "ngram"),
        ("bench",),
        ("perplexity", "x"),
        ("imatrix", "x"),
        ("serve",),
        ("chat",),
    ],
)
def test_commands_that_need_torch_name_the_package_to_install(
    words: tuple[str, ...], files: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("text")
    words = tuple(str(tmp_path / "x") if w == "x" else w for w in words)
    done = process(*words, "-m", files[0], without="torch")
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1 and "pip install 'g4spec[run]'" in done.stderr


def test_probe_checks_for_torch_first(tmp_path: Path) -> None:
    done = process("validate", tmp_path / "none", "--target", "x", "--probe", without="torch")
    assert done.returncode == 4 and "torch" in done.stderr
    assert process("bench", "compare", "a", "b", without="torch").returncode == 3


# ---- what is shown


def test_inspect_lists_tensors_on_request(files: tuple[str, str], g4spec: Cli) -> None:
    out = g4spec("inspect", files[0])[0]
    assert "--tensors lists them" in out and "blk.0." not in out and "F32" in out
    assert "blk.0." in g4spec("inspect", files[0], "--tensors")[0]
    found = g4spec.json("inspect", files[0])
    assert len(found["tensors"]) == sum(t["tensors"] for t in found["types"].values())


def test_loading_shows_progress(
    files: tuple[str, str], g4spec: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[tuple[str, int, int]] = []

    @contextmanager
    def progress(self: render.Output, label: str) -> Iterator[render.Progress]:
        yield lambda done, total: updates.append((label, done, total))

    monkeypatch.setattr(render.Output, "progress", progress)
    g4spec("generate", "-m", files[0], *SHORT)
    (label,) = {label for label, _, _ in updates}
    assert label == "loading target.gguf"
    done = [n for _, n, _ in updates]
    assert done == sorted(done) and updates[-1][1] == updates[-1][2] > 0
