"""The bandwidth that `doctor --self-test` measures is stored, and later estimates use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec import __version__
from g4spec.advisor import measured, speed
from g4spec.advisor import selftest as parent
from g4spec.advisor.cards import assume
from g4spec.advisor.facts import facts
from g4spec.advisor.figures import EfficiencyFact
from g4spec.advisor.machine import Machine, Measurement
from g4spec.advisor.named_models import named_target
from g4spec.advisor.schema import SizeFact
from g4spec.cli import run
from g4spec.runtime import selftest as child
from tests.cpu.test_doctor_machine import Nvml

FACTS = facts()
CARD = ("NVIDIA GeForce RTX 3090", (8, 6), 24 << 30, 24 << 30)
UNKNOWN = ("NVIDIA X1", (8, 6), 96 << 30, 96 << 30)
TODAY = date.today().isoformat()
ASK = ("doctor", "-m", "31b", "-md", "redhat-dflash", "--engine", "llama.cpp")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of measurements, with one fake RTX 3090 in the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    insert(monkeypatch, CARD)
    return tmp_path / "g4spec" / "bandwidth"


def insert(monkeypatch: pytest.MonkeyPatch, *cards: Any) -> None:
    """Put GPUs with the UUIDs GPU-0, GPU-1, ... into the machine."""
    nvml = Nvml([*cards])
    nvml.nvmlDeviceGetUUID = lambda h: f"GPU-{h}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]


def measure(monkeypatch: pytest.MonkeyPatch, *read: float | None) -> int:
    """Run the self-test with a child that measured `read` (GB/s, per GPU); return the exit code."""
    found = [("NVIDIA GeForce RTX 3090", f"GPU-{i}", gbs) for i, gbs in enumerate(read)]
    line = parent.MARK + json.dumps([found, [(True, "reference")]])
    done = subprocess.CompletedProcess([], 0, stdout=line + "\n", stderr="")
    with monkeypatch.context() as patch:
        patch.setattr(parent.subprocess, "run", lambda *words, **options: done)  # type: ignore[attr-defined]
        return run(["doctor", "--self-test"])


def speed_row(capsys: pytest.CaptureFixture[str]) -> str:
    run([*ASK])
    out = capsys.readouterr().out
    return next(line for line in out.splitlines() if line.startswith("  speed"))


def test_estimates_use_what_the_self_test_measured(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "(computed, not measured)" in speed_row(capsys)
    assert measure(monkeypatch, 700.0) == 0
    assert "read bandwidth measured here: 700 GB/s" in capsys.readouterr().out
    assert [path.name for path in cache.iterdir()] == ["GPU-0.json"]
    assert f"(computed from the bandwidth measured here, {TODAY})" in speed_row(capsys)
    run([*ASK, "--verbose"])
    out = capsys.readouterr().out
    assert f"read bandwidth measured here ({TODAY}): 700 GB/s  [{measured.ID}]" in out
    assert f"measured here ({TODAY}), 700 GB/s / " in out
    assert "66% to 82% of that (60% to 75% of nominal, of which 91% are read)" in out
    assert f"[eff-dense, {measured.ID}]" in out
    run([*ASK, "--json"])
    (gpu,) = json.loads(capsys.readouterr().out)["machine"]["gpus"]
    assert gpu["measured"] == {"read": 700.0, "date": TODAY} and gpu["bandwidth"] == 936
    assert run(["doctor", "--why", measured.ID]) == 0
    out = capsys.readouterr().out
    assert "700 GB/s" in out and str(cache) in out and f"date: {TODAY}" in out


def test_an_assumed_machine_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(monkeypatch, 700.0)
    capsys.readouterr()
    run([*ASK, "--assume", "RTX 3090"])
    assert "(computed, not measured)" in capsys.readouterr().out


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {k: v for k, v in record.items() if k != key}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r | {"uuid": "GPU-7", "gpu": "RTX 9"}, "it is of another GPU (RTX 9)"),
        (
            lambda r: r | {"version": "0.0.1"},
            f"g4spec 0.0.1 measured it, and this is {__version__}",
        ),
        (lambda r: r | {"driver": "1.2"}, "with driver 1.2, and this is 580.159.04"),
        (_without("date"), "it is damaged"),
        (lambda r: r | {"colour": "red"}, "it is damaged"),
        (lambda r: r | {"date": "\x1b[31m"}, "it is damaged"),
        (lambda r: r | {"gpu": None}, "it is damaged"),
        (lambda r: r | {"read": "fast"}, "it is damaged"),
        (lambda r: r | {"read": True}, "it is damaged"),
        (lambda r: r | {"read": -1.0}, "it is damaged"),
        (lambda r: r | {"read": float("nan")}, "it is damaged"),
        (lambda r: [r], "it is damaged"),
        (lambda r: b"\xff{", "it is damaged"),
        (lambda r: b"[" * 4000, "it is damaged"),
        (lambda r: b"", "it is damaged"),
        (lambda r: b" " * 5000, "cannot be read"),
        (lambda r: None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_does_not_hold_here_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
    reason: str,
) -> None:
    measure(monkeypatch, 700.0)
    file = cache / "GPU-0.json"
    new = change(json.loads(file.read_text()))
    file.unlink()
    if new is None:
        file.mkdir()
    else:
        file.write_bytes(new if isinstance(new, bytes) else json.dumps(new).encode())
    capsys.readouterr()
    assert "(computed, not measured)" in speed_row(capsys)
    run([*ASK, "--verbose"])
    (note,) = [x for x in capsys.readouterr().out.splitlines() if str(file) in x]
    assert reason in note
    assert run(["doctor", "--why", measured.ID]) == 2
    assert "no bandwidth was measured" in capsys.readouterr().err


@pytest.mark.parametrize("home", ["file", "none"])
def test_a_folder_that_cannot_be_written_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    home: str,
) -> None:
    insert(monkeypatch, CARD)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if home == "file" else "")
    if home == "none":
        monkeypatch.setattr(Path, "home", no_home)
    assert measure(monkeypatch, 700.0) == 0
    assert "700 GB/s (NVIDIA GeForce RTX 3090), not stored: " in capsys.readouterr().out
    assert "(computed, not measured)" in speed_row(capsys)


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_slowest_gpu_counts_if_all_were_measured(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(monkeypatch, CARD, CARD)
    measure(monkeypatch, 850.0, None)
    assert "not measured: too little memory is free" in capsys.readouterr().out
    assert "(computed, not measured)" in speed_row(capsys)
    measure(monkeypatch, 850.0, 700.0)
    capsys.readouterr()
    run([*ASK, "--verbose"])
    out = capsys.readouterr().out
    assert "2x NVIDIA GeForce RTX 3090: capability" in out
    assert f"read bandwidth measured here ({TODAY}): 700 GB/s, the slowest GPU" in out


def with_read(machine: Machine, read: float) -> Machine:
    gpus = tuple(replace(g, measured=Measurement(read, TODAY)) for g in machine.gpus)
    return replace(machine, gpus=gpus)


@pytest.mark.parametrize("card", ["GB10", "RTX 3090", "H200"])
@pytest.mark.parametrize("size", ["31b", "26b"])
def test_published_speeds_are_fractions_of_nominal_bandwidth(card: str, size: str) -> None:
    """A GPU that reads what such GPUs read gets the estimate of its nominal bandwidth; one that
    reads half of that, half of it."""
    target, machine = named_target(FACTS, FACTS.get(SizeFact, size)), assume(FACTS, card)
    option = next(o for o in target.formats if o.format == "Q4_K_M")

    def estimate(machine: Machine) -> speed.Estimate:
        made = speed.estimate(FACTS, machine, target, None, option, "q8_0", 2048, 1)
        assert made is not None
        return made

    nominal, row = machine.bandwidth, FACTS.get(EfficiencyFact, estimate(machine).facts[0])
    assert nominal is not None and 0.8 < row.read < 1 and row.high < row.read
    usual, half = (estimate(with_read(machine, nominal * row.read * x)) for x in (1, 0.5))
    computed = estimate(machine)
    assert (usual.low, usual.high) == pytest.approx((computed.low, computed.high))
    assert (half.low, half.high) == pytest.approx((computed.low / 2, computed.high / 2))
    assert usual.ceiling == pytest.approx(computed.ceiling * row.read)


def test_a_gpu_of_unknown_bandwidth_is_measured(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(monkeypatch, UNKNOWN)
    assert "unknown" in speed_row(capsys)
    measure(monkeypatch, 700.0)
    capsys.readouterr()
    assert f"(computed from the bandwidth measured here, {TODAY})" in speed_row(capsys)


def test_each_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UUID is that of NVML, which begins with GPU-."""
    free = iter([8 << 30, 1 << 20])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda i: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name="X", uuid=f"a{i}")
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, device: zeros(n, device="meta"))
    monkeypatch.setattr(child, "gpu_seconds", lambda launch, times: 2.0)
    assert list(child.bandwidths()) == [
        ("X", "GPU-a0", (4 << 30) / 2 / 1e9),
        ("X", "GPU-a1", None),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(child.bandwidths()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o500)
    assert measure(monkeypatch, 700.0) == 0
    assert "not stored: " in capsys.readouterr().out
