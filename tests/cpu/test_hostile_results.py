"""Malicious or damaged result files and kernel caches, signals at any time, and the lock file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

from g4spec import cli
from g4spec.cli import _inputs
from g4spec.convert import convert_cached
from g4spec.errors import InputError, UsageError
from g4spec.measure import bench_compare, prompts
from g4spec.measure.run_record import without_folders
from g4spec.runtime.cuda.build import disk_cache
from g4spec.runtime.cuda.build.nvrtc import Cubin, Resources
from tests.support import bench_result, tiny

ROOT = Path(__file__).resolve().parents[2]
HUGE = 10**400


# ---- bench compare, bench --dataset, recipe, doctor

ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "texts of another type": lambda d: d.update(texts={"code-0": "a text"}),
    "a target of another type": lambda d: d["provenance"].update(target="target.gguf"),
    "a draft of another type": lambda d: d["provenance"].update(draft=[1]),
    "types of another type": lambda d: d["provenance"]["draft"].update(types=["q8_0"]),
    "types without numbers": lambda d: d["provenance"]["draft"].update(types={"q8_0": "57"}),
    "a name of another type": lambda d: d["provenance"]["draft"].update(sha256={}),
    "a number that no float holds": lambda d: d["rows"][1].update(tokens_per_second=HUGE),
    "a spread that no float holds": lambda d: d["rows"][1].update(spread=[HUGE, HUGE]),
    "an acceptance that no float holds": lambda d: d["rows"][1].update(acceptance=HUGE),
    "a length of another type": lambda d: d["rows"][1].update(length=[4]),
}


@pytest.mark.parametrize("name", ODD)
def test_a_result_with_odd_fields_is_refused(name: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    data = bench_result.result()
    good.write_text(json.dumps(data))
    ODD[name](data)
    bad.write_text(json.dumps(data))
    for pair in ((good, bad), (bad, good), (bad, bad)):
        assert cli.run(["bench", "compare", *map(str, pair)]) == 3


def test_a_result_that_is_not_a_file_or_deeply_nested(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    for name in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "deep"):
        with pytest.raises(InputError):
            bench_compare.read_result(name)


def test_deeply_nested_questions(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="line 1"):
        prompts.mt_bench(tmp_path / "q.jsonl")


def test_long_prompts_end() -> None:
    """`long_text` looped forever for a tokenizer that returns no tokens, and for a length beyond
    any context."""

    class Silent:
        def encode(self, text: str, bos: bool = True) -> list[int]:
            return []

    text = prompts.long_text(Silent(), 100, 0)  # type: ignore[arg-type]
    assert len(text) < prompts.LONGEST_TOKEN * 100 + 10_000
    assert (
        prompts.long_prompt_tokens(None, 4096, 64, 1024) == 1024
        and prompts.long_prompt_tokens(100, 4096, 64, 1024) == 100
    )
    assert prompts.long_prompt_tokens(None, 512, 64, 1024) == 448
    for asked in (449, 1 << 62):
        with pytest.raises(UsageError, match="`long_tokens`: expected at most 448"):
            prompts.long_prompt_tokens(asked, 512, 64, 1024)


def test_impossible_machines_are_refused() -> None:
    """A recipe for 2^31 nodes filled the memory, and int() raised ValueError for 5000 digits."""
    for more in (["--nodes", "2147483648"], ["--assume", "9" * 5000 + "x h200"]):
        assert cli.run(["recipe", "vllm", "-m", "31b", "--assume", "h200", *more]) == 2


def test_a_configuration_that_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for command in (["doctor"], ["recipe", "vllm"]):
        assert cli.run([*command, "-m", str(tmp_path), "--assume", "h200"]) == 3


@pytest.mark.parametrize("line", [("doctor", "-m"), ("doctor", "-m", "31b", "-md")])
def test_user_without_a_home_folder(
    line: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*line, "~no-such-user/x.gguf"]) == 3
    assert "~no-such-user/x.gguf: no such file" in capsys.readouterr().err


# ---- contents of a shared result


def test_recorded_commands_contain_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "somebody"
    home.mkdir(parents=True)
    (home / "t.gguf").touch()
    monkeypatch.chdir(home.parent)
    typed = [
        "g4spec",
        "bench",
        "-m",
        str(home / "t.gguf"),
        "-md",
        "z-lab/a-draft",
        "--dataset=~/q.jsonl",
        f"--out={home}/r.json",
        "--report",
        "../x/r.html",
        "somebody/t.gguf",
        "--draft-max",
        "1,2",
        f"-m{home}/t.gguf",
        f"-qo{home}/r.json",
        "-p",
        "/summarize 1/2 of this",
    ]
    assert without_folders(typed) == [
        "g4spec",
        "bench",
        "-m",
        "t.gguf",
        "-md",
        "z-lab/a-draft",
        "--dataset=q.jsonl",
        "--out=r.json",
        "--report",
        "r.html",
        "t.gguf",
        "--draft-max",
        "1,2",
        "-mt.gguf",
        "-qor.json",
        "-p",
        "/summarize 1/2 of this",
    ]
    assert "somebody" not in " ".join(without_folders(typed))


# ---- compiled kernels

CUBIN = Cubin("sm_80", "f", Resources(1, 0, 0, 0), "", b"\x7fELF code")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk_cache.store("key", CUBIN)
    return disk_cache.folder()


def test_the_folder_of_kernels_is_private(kernels: Path) -> None:
    entry = kernels / "sm_80" / "key.cubin"
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (kernels, kernels / "sm_80", entry)]
    assert modes == [0o700, 0o700, 0o600]
    kernels.chmod(0o755)  # as created by an older version
    assert disk_cache.load("key", "sm_80") == CUBIN
    disk_cache.store("key", CUBIN)
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["", "sm_80", "sm_80/key.cubin"])
def test_kernels_writable_by_others_are_not_loaded(place: str, kernels: Path) -> None:
    (kernels / place).chmod(0o777)
    assert disk_cache.load("key", "sm_80") is None


def test_a_cache_of_another_user_is_not_used(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 54321)
    assert disk_cache.load("key", "sm_80") is None
    with pytest.warns(UserWarning, match="another user"):
        disk_cache.store("key", CUBIN)


HEADERS: dict[str, Any] = {
    "not an object": 7,
    "nothing": {},
    "no resources": {"arch": "sm_80", "symbol": "f", "log": ""},
    "other resources": {"resources": {"x": 1}},
    "invalid resources": {"resources": 7},
    "invalid size": {"resources": {"registers": "x", "spill": 0, "stack": 0, "shared": 0}},
    "invalid name": {"symbol": [1]},
    "unknown field": {"extra": 1},
    "another code": {"code": "x"},
    "another architecture": {"arch": "sm_90a"},
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_entry_with_a_valid_checksum_and_a_wrong_header(name: str, kernels: Path) -> None:
    entry, header = kernels / "sm_80" / "key.cubin", HEADERS[name]
    if isinstance(header, dict) and name not in ("nothing", "no resources"):
        sizes = {"registers": 1, "spill": 0, "stack": 0, "shared": 0}
        header = {"arch": "sm_80", "symbol": "f", "log": "", "resources": sizes} | header
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + CUBIN.code
    entry.write_bytes(disk_cache.MAGIC + hashlib.sha256(body).digest() + body)
    assert disk_cache.load("key", "sm_80") is None


def test_temporary_files_of_killed_runs_are_removed(kernels: Path, tmp_path: Path) -> None:
    """Only writing an entry removed temporary files, and an entry is written only once."""
    left = kernels / "sm_80" / ".key.cubin.0123abcd.tmp"
    left.touch()
    assert disk_cache.load("key", "sm_80") == CUBIN and not left.exists()
    target = tiny.target(tmp_path / "t", layers=3, period=3)
    draft = tiny.zlab_dflash(tmp_path / "z", target)
    entry, _ = convert_cached(draft, target, tmp_path / "drafts")
    names = (entry.name, f"{entry.name}.sha256")
    both = [entry.with_name(f".{name}.0123abcd.tmp") for name in names]
    for path in both:
        path.touch()
    assert convert_cached(draft, target, tmp_path / "drafts")[0] == entry
    assert not any(path.exists() for path in both)


@pytest.mark.parametrize("base", ["", "cache", "./cache"])
def test_caches_are_not_in_the_current_folder(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_CACHE_HOME made a cache in every folder that a command ran in."""
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    for folder in (_inputs.cache_folder(), disk_cache.folder()):
        assert folder.parent == Path.home() / ".cache" / "g4spec"


# ---- signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_whose_exception_is_replaced(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM while a Rust extension converted the merges became a TypeError with a traceback."""

    def interrupted() -> None:
        try:
            signal.raise_signal(number)
        except (KeyboardInterrupt, SystemExit):
            raise RuntimeError("failed to extract") from None

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert not capsys.readouterr().err


def test_ctrl_c_before_the_command_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._signals.ctypes, "CDLL", interrupted)
    monkeypatch.setattr(cli._signals.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


WAITING = """
import sys, time
from g4spec import cli
def slow(argv):
    try:
        print("ready", flush=True)
        time.sleep(30)
    finally:
        print("clearing away", flush=True)
        time.sleep(30)
cli.run = slow
cli.main()
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_run_silently(first: int, second: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(first)
        assert run.stdout.readline() == "clearing away\n"
        run.send_signal(second)
        _, output = run.communicate(timeout=20)
    assert (run.returncode, output) == (-second, "")


AT_ONCE = """
import os, signal
from g4spec import cli
class Destructor:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(9):
            pass
def slow(argv):
    if HOW == "twice":
        both = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    else:
        Destructor()
    while True:
        pass
cli.run = slow
cli.main()
"""


@pytest.mark.parametrize("how", ["twice", "in a destructor"])
def test_simultaneous_signals_are_silent(how: str) -> None:
    """Python prints messages about lost signals and about exceptions in destructors."""
    code = AT_ONCE.replace("HOW", repr(how))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert done.returncode in (130, 143, -signal.SIGINT) and done.stderr == b"", done


LOST = """
import signal, sys, time
from g4spec import cli
from g4spec.cli import _signals
@_signals.repeated()
def waiting(argv):
    try:
        try:
            signal.raise_signal(int(argv[0]))
        except BaseException:
            pass
        time.sleep(30)
    finally:
        time.sleep(2.5)
        print("cleared away", flush=True)
cli.run = waiting
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_discarded_signal_is_repeated_until_the_command_unwinds(number: int, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(int(number))],
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"cleared away\n", b"")


STARTING = """
import os, signal, sys
class Ctrl:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Ctrl())
from g4spec.__main__ import main
sys.argv[1:] = ["doctor", "--json"]
main()
"""


TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


@pytest.mark.parametrize("module", ["typer", "g4spec.cli.doctor", TOML])
def test_a_signal_during_imports_is_silent(module: str) -> None:
    code = STARTING.replace("sys.argv[1]", repr(module))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode in (-signal.SIGINT, 130) and (done.stdout, done.stderr) == (b"", b"")


# ---- the server


def test_a_panic_of_a_library_gets_a_response() -> None:
    """A panic is a BaseException; it closed the client's connection without a response."""
    import asyncio
    import logging

    import httpx

    from g4spec.server.app import create_app
    from g4spec.server.settings import Settings

    class PanicException(BaseException):
        pass

    raised = []

    class Service:
        draining, settings, metrics = False, Settings("m"), mock.Mock()

        @property
        def is_healthy(self) -> bool:
            raised.append(True)
            raise PanicException("range end index 32 out of range")

        def check_model(self, name: str | None) -> None:
            pass

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(Service()), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/health")

    logging.disable(logging.CRITICAL)
    try:
        answer = asyncio.run(ask())
    finally:
        logging.disable(logging.NOTSET)
    assert raised and answer.status_code == 500 and "panic" not in answer.text


def test_the_json_of_the_server_has_no_control_character() -> None:
    """Events, responses and log lines contained DEL and C1 control characters unescaped."""
    import logging

    from g4spec.server.json_response import JsonResponse
    from g4spec.server.middleware import JsonLogFormatter
    from g4spec.server.sse import event

    bad = {"text": "\x1b]0;t\x07\x7f\x9b31m\n\u00e9"}
    record = logging.makeLogRecord({"msg": "m", "levelname": "INFO", "facts": bad})
    for text in (
        event(bad)[6:].strip(),
        bytes(JsonResponse(bad).body).decode(),
        JsonLogFormatter().format(record),
    ):
        assert not re.search("[\x00-\x1f\x7f-\x9f]", text) and "\u00e9" in text
        assert json.loads(text)["text"] == bad["text"]


# ---- the lock file


def test_the_lock_file_has_tested_versions_with_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE), (
        "the file must not name a package index"
    )
    entries = [e for e in re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text)) if e.strip()]
    locked: dict[str, set[str]] = {}
    for entry in entries:
        pin, *hashes = [part.strip() for part in entry.split("\\\n")]
        required = Requirement(pin)
        (version,) = required.specifier
        assert version.operator == "==" and hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes)
        locked.setdefault(required.name, set()).add(version.version)
    for name, versions in locked.items():
        assert len(versions) <= 2, f"{name}: one for Python 3.10, one for the others"
    tested = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert all(tested.get(n) in v | {None} for n, v in locked.items() if n != "cuda-bindings")


def test_the_lock_file_holds_every_requirement() -> None:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["run"], *extras["serve"], *extras["cuda"]]
    wanted.remove("g4spec[run]")
    pins = re.findall(r"^(\S+)==([^\s;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    for each in map(Requirement, wanted):
        name = each.name.lower().replace("_", "-")
        versions = [v for n, v in pins if n == name]
        assert versions and all(each.specifier.contains(v) for v in versions), each
