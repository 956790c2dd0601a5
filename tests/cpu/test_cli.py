"""The command line: every mistake gives one clear line and the right exit code."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4spec import __version__, cli
from g4spec.cli import render
from g4spec.cli._os_errors import as_error
from g4spec.errors import CheckFailed, EnvironmentProblem, InputError, UsageError
from tests.support import tokens

ROOT = Path(__file__).resolve().parents[2]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""The environment of a run with the usual buffered output."""


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that defines a command `probe` for a test."""

    def make(body: Any) -> None:
        def command(json: render.Json = False, quiet: render.Quiet = False) -> None:
            """A command for tests."""
            body(render.Output(json, quiet))

        monkeypatch.setattr(cli, "names", lambda: ["probe"])
        monkeypatch.setitem(sys.modules, "g4spec.cli.probe", SimpleNamespace(command=command))

    return make


def raising(error: BaseException) -> Any:
    def body(out: render.Output) -> None:
        raise error

    return body


def one_error_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CheckFailed("texts differ"), 1, "texts differ"),
        (
            ImportError("libcudnn.so.9: cannot open shared object file", path="/torch/_C.so"),
            4,
            "a package cannot be loaded: found libcudnn.so.9: cannot open",
        ),
        (
            OSError("libcudart.so.13: cannot open shared object file: No such file or directory"),
            4,
            "a package cannot be loaded: found libcudart.so.13: cannot open",
        ),
        (UsageError("--top-p", expected="in (0, 1]", found=2), 2, "--top-p: expected in (0, 1]"),
        (InputError("a.gguf: bad", fix="convert it"), 3, "a.gguf: bad. Convert it"),
        (EnvironmentProblem("no memory"), 4, "no memory"),
        (MemoryError(), 4, "out of memory"),
        (RuntimeError("Could not determine home directory."), 4, "Set XDG_CACHE_HOME, or HOME,"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4, "out of memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 4, "out of memory"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.gguf"), 3, "cannot open 'x.gguf'"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            4,
            "no usable temporary directory found in ['/tmp']. Set TMPDIR to a folder",
        ),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), 3, "cannot open 'x'"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 3, "cannot open 'x'"),
        (PermissionError(errno.EPERM, "Not permitted", "x"), 4, "cannot access 'x'"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 4, "free disk space"),
        (OSError(errno.EIO, "Input/output error"), 4, "cannot access: input/output error"),
    ],
)
def test_errors_become_one_line_and_a_code(
    probe: Any, capsys: pytest.CaptureFixture[str], error: Exception, code: int, text: str
) -> None:
    probe(raising(error))
    assert cli.run(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == "" and text.lower() in one_error_line(err).lower()
    assert cli.run(["probe", "--json"]) == code
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["exit_code"] == code and text.lower() in printed["error"].lower()
    one_error_line(err)


@pytest.mark.parametrize("error", [ValueError("bug"), AssertionError("bug"), OSError("no errno")])
def test_bugs_stay_tracebacks(probe: Any, error: Exception) -> None:
    probe(raising(error))
    with pytest.raises(type(error)):
        cli.run(["probe"])


def test_interruption_is_quiet(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    probe(raising(KeyboardInterrupt()))
    assert cli.run(["probe"]) == 130
    assert capsys.readouterr() == ("", "")


def test_failed_check_after_a_result_stays_one_object(
    probe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(out: render.Output) -> None:
        out.result({"ok": False})
        raise CheckFailed("differs")

    probe(body)
    assert cli.run(["probe", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False}


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "--nope"],
        ["tokenize", "-m"],
        ["--nope"],
        ["generate", "-m", "x", "-p", "a", "-n", "many"],
        ["generate", "-m", "x", "-p", "a", "extra"],
        ["generate", "-m", "x"],
        ["generate", "-m", "x", "-p", "a", "--file", "b"],
        ["generate", "-m", "x", "-p", "a", "--draft-max", "some"],
        ["tokenize", "-m", "x"],
        ["generate", "-m", "x", "-p", "a", "--draft-max", "16"],
        ["generate", "-m", "x", "-p", "a", "--top-p", "0"],
        ["generate", "-m", "x", "-p", "a", "-n", "0"],
        ["generate", "-m", "x", "-p", "a", "--stop", ""],
        ["generate", "-m", "x", "-p", "a", "--system", "b"],
    ],
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(argv) == 2
    one_error_line(capsys.readouterr().err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", ["doctor --cards", "doctor --cards --json", "doctor --help"])
def test_full_disk_on_stdout(words: str) -> None:
    """Also with a buffered stdout, of which Python flushes the rest at exit."""
    command = [sys.executable, "-m", "g4spec", *words.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=BUFFERED, text=True, check=False
        )
    assert done.returncode == 4
    assert (
        done.stderr == "error: cannot write to stdout: no space left on device. Free disk space\n"
    )


def test_a_deleted_working_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch cannot be imported there; commands without it run if their paths are absolute."""
    gone, model = tmp_path / "gone", tmp_path / "m.gguf"
    gone.mkdir()
    model.write_bytes(b"GGUF")
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    for line in (["generate", "-m", str(model), "-p", "x"], ["convert", "x", "-o", "y.gguf"]):
        assert cli.run(line) == 4
        assert f"the working folder {gone} was deleted. Change to" in capsys.readouterr().err
    assert cli.run(["inspect", str(model)]) == 3
    assert str(model) in capsys.readouterr().err


def test_a_socks_proxy_without_its_package() -> None:
    error = as_error(ImportError("Using SOCKS proxy, but the 'socksio' package is not installed."))
    assert isinstance(error, EnvironmentProblem) and "ALL_PROXY" in str(error)


def test_files_are_written_before_stdout_fails(tmp_path: Path) -> None:
    command = f"{sys.executable} -m g4spec recipe llama.cpp -m 31b -md zlab-dflash"
    more = f"--assume 'A100 80GB' -o {tmp_path}/r >&-"
    done = subprocess.run(["sh", "-c", f"exec {command} {more}"], capture_output=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "start.sh" in os.listdir(tmp_path / "r")


CLOSED = "error: cannot write: stdout is closed. Redirect it to a file"


@pytest.mark.parametrize(
    ("argv", "closed", "code", "lines"),
    [
        ("--version", ">&-", 4, ["", CLOSED]),
        ("--help", ">&-", 4, ["", CLOSED]),
        ("--version", "2>&-", 0, [f"g4spec {__version__}", ""]),
        ("inspect missing.gguf", "2>&-", 3, ["", ""]),
        ("doctor --log -", "<&-", 0, ["The log contains no error message", ""]),
        ("--version", "<&- >&- 2>&-", 4, ["", ""]),
    ],
)
def test_closed_streams(argv: str, closed: str, code: int, lines: list[str]) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m g4spec {argv} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, env=BUFFERED, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.startswith(lines[0]) and done.stderr.strip() == lines[1]


def test_without_arguments_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "Usage: g4spec" in capsys.readouterr().out


def test_every_exit_code_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = (CheckFailed, UsageError, InputError, EnvironmentProblem)
    codes = [0, *(kind.exit_code for kind in kinds), 130, render.CLOSED_PIPE]
    table = (ROOT / "docs" / "overview.md").read_text().partition("| exit code |")[2]
    cli.run(["--help"])
    shown = " ".join(capsys.readouterr().out.partition("Exit codes:")[2].split())
    for code in codes:
        assert f"\n| {code}" in table and f" {code} " in f" {shown}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"g4spec {__version__}\n"


@pytest.mark.parametrize("name", cli.names())
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name.replace("_", "-"), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage:" in out and "--quiet" in out
    assert "--json" in out or name in ("serve", "chat"), "these commands stream"


def test_names_from_files_stay_on_one_line() -> None:
    assert render.one_line("a\nb\x1b[31m\u202e") == "a b\\x1b[31m\\u202e"


# ---- rendering


def test_json_prints_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = render.Output(json=True)
    out.line("text")
    out.stream("text")
    out.table("t", ["a"], [[1]])
    out.legend([("x", None)])
    out.result({"a": float("nan"), "b": [float("inf"), Path("p")], "c": {2, 1}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, "p"], "c": [1, 2]}


def test_quiet_prints_only_requested_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = render.Output(quiet=True)
    out.line("line")
    out.note("note")
    out.table("t", ["a"], [[1]])
    out.stream("product")
    assert capsys.readouterr() == ("product", "")


def test_notes_are_printed_once_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out = render.Output()
    for _ in range(3):
        out.note("careful")
    assert capsys.readouterr() == ("", "careful\n")


def test_long_tables_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Listing 25,000 tensors of a file under 1 MB took 7 s, and twice that on a slow core."""
    rows = [[f"tensor-{i}", i] for i in range(render.MAX_ROWS + 500)]
    render.Output().table("Tensors", ["name", "size"], rows)
    out, err = capsys.readouterr()
    assert out.count("tensor-") == render.MAX_ROWS and "500 more rows" in err


def test_tables_do_not_interpret_or_cut_their_cells(capsys: pytest.CaptureFixture[str]) -> None:
    out = render.Output()
    out.table("T [x]", ["name", "n"], [["[bold]" + "x" * 120, 1.5], ["b", 20]])
    text = capsys.readouterr().out
    assert "T [x]" in text and "[bold]" + "x" * 120 in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("columns", "hidden"), [(80, ""), (30, "c"), (20, "")])
def test_notes_name_only_columns_that_are_not_shown(
    columns: int,
    hidden: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no table fits, rows become lists with every column."""
    monkeypatch.setenv("COLUMNS", str(columns))
    render.Output().table("T", ["a", "b", "c"], [["1" * 12, "2" * 12, "3" * 12]], ["c"])
    out, err = capsys.readouterr()
    assert ("3" * 12 in out) == (not hidden)
    assert err == (
        f"columns not shown (output too narrow): {hidden}; --json has all\n" if hidden else ""
    )


@pytest.mark.parametrize(
    ("env", "tty", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colours(
    env: dict[str, str], tty: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    file: Any = SimpleNamespace(isatty=lambda: tty)
    assert (render.styled("x", "good", file) == "\x1b[32mx\x1b[0m") is wanted


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(render.time, "monotonic", lambda: now)
    for quiet, expected in ((False, ["work: 12 of 40, 30%", "work: 24 of 40, 60%"]), (True, [])):
        with render.Output(json=True, quiet=quiet).progress("work") as callback:
            for done in range(30):
                callback(done, 40)
                now += render.PROGRESS_SECONDS / 12
        out, err = capsys.readouterr()
        assert out == "" and err.splitlines() == expected


# ---- as a process


def g4spec(*argv: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "g4spec", *argv]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, **kwargs
    )


def test_process_exit_codes(tmp_path: Path) -> None:
    assert g4spec("--version").returncode == 0
    assert g4spec("nonsense").returncode == 2
    missing = g4spec("tokenize", "-m", str(tmp_path / "none.gguf"), "x")
    assert missing.returncode == 3 and "Traceback" not in missing.stderr


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    model = tokens.vocabulary_file(tmp_path / "v.gguf")
    text = tmp_path / "long.txt"
    text.write_text("hello world " * 50_000)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "g4spec", "tokenize", "-m", str(model), "--file", str(text)]
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_log_without_a_reader_changes_no_exit_code() -> None:
    """Python flushed the rest of the log of `serve` at exit, failed, and ended with 120."""
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "import logging; from g4spec import cli; logging.raiseExceptions = False; "
        "cli.run = lambda argv: logging.error('x') or 0; cli.main()"
    )
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=BUFFERED, stderr=pipe, check=False
        )
    assert done.returncode == 0


def test_unprintable_characters_do_not_end_a_run(tmp_path: Path) -> None:
    model = tokens.vocabulary_file(tmp_path / "v.gguf")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = g4spec("tokenize", "-m", str(model), "日本🙂", "--json", env=env)
    assert done.returncode == 0, done.stderr
