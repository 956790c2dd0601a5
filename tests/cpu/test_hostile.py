"""Any file content and any interruption give a clear error and leave no half-written file."""

from __future__ import annotations

import builtins
import errno
import importlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from g4spec import quant
from g4spec.convert import convert, safetensors
from g4spec.errors import EnvironmentProblem, G4Error, InputError, Unsupported
from g4spec.gguf import GGUF, TensorData, parts, string, u32, write
from g4spec.runtime import template
from g4spec.validate import validate
from tests.cpu import gguf_fixtures as fixtures
from tests.fuzz import mutation
from tests.fuzz import readers as fuzzing
from tests.support import tiny
from tests.support.processor_time import processor_time_below
from tests.support.selection import sample

NAMES = [
    "gguf",
    "validate",
    "parts",
    "dialect",
    "safetensors",
    "config",
    "target config",
    "tokenizer.json",
    "tokenizer_config.json",
    "index",
    "template",
]


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzzing.Surface]:
    return {s.name: s for s in fuzzing.surfaces(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sample(NAMES, 3))
def test_kept_corpus_and_fresh_mutations(
    name: str, surfaces: dict[str, fuzzing.Surface], tmp_path: Path
) -> None:
    surface, verdict = surfaces[name], fuzzing.Verdict()
    for data in fuzzing.saved(name):
        fuzzing.run_input(surface, data, verdict)
    fresh = fuzzing.fuzz(surface, 150, seed=12, cover=False)
    assert verdict.failures + fresh.failures == []
    assert fresh.refused and fresh.passed, "mutations must be both refused and accepted"


def test_every_surface_is_tested(surfaces: dict[str, fuzzing.Surface]) -> None:
    assert list(surfaces) == NAMES


def test_the_benchmark_fuzzes_every_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu_fuzz.py` ended with a KeyError at the first reader that it had no number for."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    runs = importlib.import_module("cpu_fuzz").RUNS
    assert list(runs) == NAMES
    assert sum(runs.values()) >= 100_000


def test_seeds_have_every_type_in_whole_and_split_files(
    surfaces: dict[str, fuzzing.Surface], tmp_path: Path
) -> None:
    wanted = {name for name, form in quant.readable().items() if form.quantized}
    whole = tmp_path / "whole.gguf"
    for name in ("gguf", "validate"):
        found = set()
        for data in surfaces[name].seeds:
            whole.write_bytes(data)
            with GGUF(whole) as file:
                found |= {info.format.name for info in file.tensors.values()}
        assert found >= wanted
    seeds = surfaces["parts"].seeds
    for no, data in enumerate(seeds):
        (tmp_path / parts.part_name("x", no, len(seeds))).write_bytes(data)
    with GGUF(tmp_path / parts.part_name("x", 0, len(seeds))) as file:
        assert {info.format.name for info in file.tensors.values()} >= wanted
        assert {info.part for info in file.tensors.values()} == set(range(len(seeds)))


def test_the_fuzzer_detects_failures(surfaces: dict[str, fuzzing.Surface]) -> None:
    """A reader that crashes, hangs or grows without bound is reported."""

    def check(data: bytes) -> None:
        if data == b"hang":
            time.sleep(30)
        safetensors.load_json(None)  # type: ignore[arg-type]

    surface, verdict = fuzzing.Surface("x", [], check, mutation.mutate_bytes), fuzzing.Verdict()
    fuzzing.run_input(surface, b"", verdict)
    assert "TypeError" in verdict.failures[0][0]
    fuzzing.SECONDS, before = 0.1, fuzzing.SECONDS
    try:
        fuzzing.run_input(surface, b"hang", verdict)
    finally:
        fuzzing.SECONDS = before
    assert verdict.failures[1][0] == "Hang" and verdict.stopped == 1


# ---- properties

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FAST = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FAST
@given(
    entry=JSON
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I64", "BOOL", "F8_E4M3", "X"]) | JSON,
            "shape": st.lists(st.integers(-1, 1 << 63), max_size=5) | JSON,
            "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | JSON,
        }
    ),
    data=st.binary(max_size=64),
)
@example(entry={"dtype": "F32", "shape": [0, 1 << 61], "data_offsets": [0, 0]}, data=b"")
@example(entry={"dtype": "I8", "shape": [True], "data_offsets": [0, 1]}, data=b"1")
@example(entry={"dtype": "I8", "shape": [1] * 65, "data_offsets": [0, 1]}, data=b"1")
def test_any_safetensors_entry(entry: Any, data: bytes, tmp_path: Path) -> None:
    head = json.dumps({"t": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    try:
        tensors = safetensors.read(path)
    except InputError:
        return
    t = tensors["t"]
    assert t.raw.size <= len(data)
    if t.format is not None:
        assert np.asarray(t.array()).shape == t.shape


@FAST
@given(raw=st.binary(max_size=200))
def test_any_bytes_as_json_gguf_and_safetensors(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for data, read in (
        (raw, lambda: safetensors.parse_json(raw, "x")),
        (raw, lambda: safetensors.read(path)),
        (b"GGUF\3\0\0\0" + raw, lambda: GGUF(path).close()),
    ):
        path.write_bytes(data)
        with suppress(G4Error):
            read()


def test_many_entries_do_not_take_quadratic_time(tmp_path: Path) -> None:
    """Files under 1 MB with as many entries as they can contain."""
    path = tmp_path / "a.gguf"
    keys = ",".join(f'"{i}":1' for i in range(90000))
    with processor_time_below(5), pytest.raises(InputError, match="duplicate key"):
        safetensors.parse_json(f'{{{keys},"7":1}}'.encode(), "x")
    for arch, kind, size in (("dflash-draft", 0, 4), ("gemma4_mtp", 0, 4), ("dflash", 41, 18)):
        count = 18000
        names = [f"blk.{i}.post_attention_norm.weight" for i in range(count)]
        write(
            path,
            {"general.architecture": string(arch)},
            [TensorData(n, (128 if kind else 1,), kind, [bytes(size)]) for n in names],
        )
        with processor_time_below(5), suppress(G4Error):
            convert(path, tmp_path / "o.gguf", target=target_of(tmp_path))


def target_of(folder: Path) -> Path:
    target = folder / "target.gguf"
    if not target.exists():
        convert(tiny.target(folder / "target"), target)
    return target


# ---- pickles, pipes, links


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickles_are_refused_by_name_and_never_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    folder = tiny.zlab_dflash(tmp_path / "d", tiny.target(tmp_path / "t"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Unsupported, match=rf"pickles.*{name}"):
        convert(folder, tmp_path / "o.gguf", target=tmp_path / "t")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="not a safetensors"):
        convert(folder, tmp_path / "o.gguf", target=tmp_path / "t")
    assert not (tmp_path / "exploded").exists()


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(InputError, match="pipe"):
        GGUF(tmp_path / "a.gguf")
    folder = tiny.zlab_dflash(tmp_path / "d", tiny.target(tmp_path / "t"))
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(InputError, match="pipe"):
        convert(folder, tmp_path / "o.gguf", target=tmp_path / "t")


def test_dangling_and_circular_links(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "b.gguf").symlink_to(tmp_path / "b.gguf")
    for name in ("a.gguf", "b.gguf"):
        with pytest.raises(G4Error):
            GGUF(tmp_path / name)


# ---- templates

GREEDY = {
    "one large value": "{{ 'a' * 10 ** 9 }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "list": "{{ [1] * 10 ** 9 }}",
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_cannot_fill_the_memory(name: str) -> None:
    with pytest.raises(InputError, match=r"chat template failed.*memory"):
        template.render(GREEDY[name], [], bos="", eos="")


def test_a_template_cannot_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "TIMEOUT_SECONDS", 1)
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    start = time.perf_counter()
    with pytest.raises(InputError, match="no end after 1 s"):
        template.render(loop, [], bos="", eos="")
    assert time.perf_counter() - start < 5


def test_a_template_sees_no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process had `HF_TOKEN`, which a leak of the sandbox would have exposed."""
    given, run = list[dict[str, str]](), subprocess.run

    def noted(*args: Any, **more: Any) -> Any:
        given.append(more["env"])
        return run(*args, **more)

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(template.subprocess, "run", noted)
    assert template.render("{{ 1 }}", [], bos="", eos="") == "1"
    assert given and not any("hf_secret" in env.values() for env in given)


# ---- writing

RUN = "import sys; from g4spec.cli import main; sys.argv[0] = 'g4spec'; main()"


class Failing:
    """A file on a disk that becomes full after some bytes, or fails at once."""

    def __init__(self, file: Any, room: int, error: int) -> None:
        self.file, self.room, self.error = file, room, error

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(self.error, os.strerror(self.error))
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def failing(room: int, error: int) -> Callable[..., Any]:
    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = builtins.open(path, mode, *args, **kwargs)  # noqa: SIM115
        return Failing(file, room, error) if "x" in mode else file

    return opened


@pytest.mark.parametrize("room", [0, 100, 5000, 100000])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_failing_disk_keeps_the_old_file(
    room: int, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "o.gguf"
    out.parent.mkdir()
    out.write_bytes(b"GGUF, an older file")
    data = [TensorData("a", (300, 100), 0, [np.ones((100, 100), np.float32)] * 3)]
    monkeypatch.setattr("g4spec.gguf.atomic.open", failing(room, error), raising=False)
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write(out, {"k": string("v")}, data)
    assert out.read_bytes() == b"GGUF, an older file" and list(out.parent.iterdir()) == [out]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return builtins.open(path, mode, *args, **kwargs)

    monkeypatch.setattr("g4spec.gguf.atomic.open", refuse, raising=False)
    target = tiny.target(tmp_path / "t")
    with pytest.raises(EnvironmentProblem, match=r"cannot create.*permission denied"):
        convert(target, tmp_path / "o.gguf")
    assert not (tmp_path / "o.gguf").exists()


def test_a_source_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target(tmp_path / "t")

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("g4spec.gguf.regular_files.open", refuse, raising=False)
    with pytest.raises(InputError, match="Permission denied"):
        convert(target, tmp_path / "o.gguf")


def started(folder: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    arguments = ["convert", str(folder), "-o", str(out), "--quiet", *options]
    return subprocess.Popen([sys.executable, "-c", RUN, *arguments], stderr=subprocess.DEVNULL)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The output is the old file or the new one, complete; the next run works and removes
    leftovers."""
    target, out = tiny.target(tmp_path / "t", layers=24, hidden=256, inter=768), tmp_path / "o.gguf"
    convert(target, tmp_path / "want.gguf")
    want, rng = (tmp_path / "want.gguf").stat().st_size, random.Random(0)
    out.write_bytes(b"GGUF, an older file")
    for _ in range(6):
        process = started(target, out)
        time.sleep(rng.uniform(0.2, 1.0))
        process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.wait(60)
        assert out.read_bytes() == b"GGUF, an older file" or out.stat().st_size == want
    assert started(target, out).wait(60) == 0
    assert not list(tmp_path.glob(".*.tmp"))
    with GGUF(out) as a, GGUF(tmp_path / "want.gguf") as b:
        assert all(a.raw(n).tobytes() == b.raw(n).tobytes() for n in b.tensors)


@pytest.mark.parametrize("nohup", [False, True])
def test_closed_terminal(nohup: bool, tmp_path: Path) -> None:
    """SIGHUP ends a command like SIGTERM, without an incomplete file, but not under nohup."""
    folder = tiny.target(tmp_path / "t", layers=24, hidden=256, inter=768)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        process = started(folder, tmp_path / "o.gguf", "--type", "q3_k")
    finally:
        signal.signal(signal.SIGHUP, before)
    while process.poll() is None and not list(tmp_path.glob(".*.tmp")):
        time.sleep(0.001)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == (0 if nohup else 129)
    assert {p.name for p in tmp_path.iterdir()} == ({"t", "o.gguf"} if nohup else {"t"})


def test_two_runs_to_one_output(tmp_path: Path) -> None:
    target, out = tiny.target(tmp_path / "t"), tmp_path / "o.gguf"
    both = [started(target, out) for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    with GGUF(out) as g:
        assert len(g.tensors) == 169
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_validate_against_many_tensors_does_not_take_quadratic_time(tmp_path: Path) -> None:
    """A folder of 8,000 tensors took `validate --against` 19 s."""
    target = tiny.target(tmp_path / "t")
    folder = tiny.zlab_dflash(tmp_path / "d", target)
    convert(folder, tmp_path / "d.gguf", target=target)
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    head, at = json.loads(raw[8:end]), len(raw) - end
    for i in range(8000):
        offsets = [at + 4 * i, at + 4 * i + 4]
        head[f"x{i}"] = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    text = json.dumps(head).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:] + bytes(32000))
    with processor_time_below(5):
        assert len(validate(tmp_path / "d.gguf", against=folder).failures) >= 8000


def test_validate_does_not_take_quadratic_time(tmp_path: Path) -> None:
    """874 KB with 25,000 tensors took 107 s, because findings were sorted at every new one and all
    keys were searched for every tensor."""
    file = fixtures.zlab()
    tensors = [TensorData(n, t.shape, t.type, [t.data]) for n, t in file.tensors.items()]
    more = [TensorData(f"x{i}", (1,), 0, [bytes(4)]) for i in range(25000)]
    write(tmp_path / "b.gguf", file.kv, tensors + more)
    with processor_time_below(5):
        assert len(validate(tmp_path / "b.gguf").failures) > 25000
    tensors += more[:10000]
    kv = file.kv | {f"dflash.x{i}": u32(i) for i in range(10000)}
    write(tmp_path / "a.gguf", kv, tensors)
    report = validate(tmp_path / "a.gguf")
    order = [(f.rule.severity, f.rule.id) for f in report.failures]
    assert order == sorted(order) and len(order) > 20000
    extra = [f.finding.where for f in report.failures if f.rule.id == "G4-TNS-002"]
    assert extra == [f"x{i}" for i in range(10000)], "in the order of the file"
