"""Probing a machine: without a driver, with unusual drivers, and over the network."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4spec.advisor import doctor_report as report
from g4spec.advisor import machine_probe, network, torch_build
from g4spec.advisor.cards import assume, find_card
from g4spec.advisor.doctor import diagnose
from g4spec.advisor.facts import facts
from g4spec.advisor.machine import GIB, Machine, assume_options
from g4spec.advisor.machine_probe import System
from g4spec.cli import run

FACTS = facts()


class FakeError(Exception):
    pass


class Nvml:
    """A fake pynvml; `cards` are (name, cc, total, free), with None for unsupported."""

    NVMLError = FakeError

    def __init__(
        self,
        cards: list[tuple[str, Any, Any, Any]],
        *,
        init: bool = True,
        nvlink: bool = False,
        clock: int = 0,
    ) -> None:
        self.cards, self.init, self.nvlink, self.clock = cards, init, nvlink, clock

    def nvmlInit(self) -> None:
        if not self.init:
            raise FakeError

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return i

    def nvmlDeviceGetName(self, h: int) -> str:
        return self.cards[h][0]

    def nvmlDeviceGetCudaComputeCapability(self, h: int) -> tuple[int, int]:
        if self.cards[h][1] is None:
            raise FakeError
        return tuple(self.cards[h][1])  # type: ignore[return-value]

    def nvmlDeviceGetMemoryInfo(self, h: int) -> Any:
        if self.cards[h][2] is None:
            raise FakeError("Not Supported")
        return SimpleNamespace(total=self.cards[h][2], free=self.cards[h][3])

    def nvmlDeviceGetNvLinkState(self, h: int, link: int) -> int:
        if not self.nvlink:
            raise FakeError
        return 1

    def nvmlDeviceGetMemoryBusWidth(self, h: int) -> int:
        return 384

    def nvmlDeviceGetMaxClockInfo(self, h: int, kind: int) -> int:
        return self.clock

    def nvmlDeviceGetComputeRunningProcesses(self, h: int) -> list[Any]:
        return [SimpleNamespace(pid=1, usedGpuMemory=3 << 30)]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        return b"/usr/bin/Xorg"


@pytest.fixture
def system(tmp_path: Path) -> System:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       127600000 kB\nMemFree: 1 kB\nMemAvailable:   100000000 kB\n"
    )
    (tmp_path / "proc/version").write_text("Linux version 6.8")
    return System(proc=tmp_path / "proc", root=tmp_path, env={})


def look(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, system: System) -> Machine:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return machine_probe.probe(FACTS, system)


def test_no_driver(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    m = look(monkeypatch, Nvml([], init=False), system)
    assert m.gpus == () and m.driver is None and m.cc is None
    assert "no NVIDIA driver" in m.notes[0]


def test_gpus_of_other_vendors(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    """They get advice that applies to them, not advice about NVIDIA's driver."""
    found = {}
    for vendor in ("0x1002", "0x8086", "0x10de"):
        file = system.root / f"sys/class/drm/card{vendor}/device/vendor"
        file.parent.mkdir(parents=True)
        file.write_text(f"{vendor}\n")
        found[vendor] = look(monkeypatch, Nvml([], init=False), system).other
        file.unlink()
    assert found == {"0x1002": "other-amd", "0x8086": "other-intel", "0x10de": None}
    (system.root / "etc").mkdir()
    (system.root / "etc/nv_tegra_release").touch()
    assert look(monkeypatch, Nvml([], init=False), system).other == "other-jetson"
    system.platform = "Darwin"
    machine = look(monkeypatch, Nvml([], init=False), system)
    first = diagnose(FACTS, machine, None).sections[0].lines[0]
    assert first.facts == ("other-mac",) and "driver" not in first.fix


def test_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    m = look(monkeypatch, Nvml([]), system)
    assert m.gpus == () and m.driver == "580.159.04" and "no GPU is visible" in m.notes[0]


def test_package_missing(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine_probe.probe(FACTS, system).gpus == ()


def test_two_cards(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    card = ("NVIDIA GeForce RTX 3090", (8, 6), 24576 << 20, 20000 << 20)
    m = look(monkeypatch, Nvml([card, card], nvlink=True), system)
    assert [g.card for g in m.gpus] == ["rtx-3090", "rtx-3090"]
    assert m.bandwidth == 936 and m.nvlink is True and m.cuda == "13.0"
    assert m.free == 20000 << 20 and m.gpus[0].processes == ("Xorg (3072 MiB)",)
    assert look(monkeypatch, Nvml([card, card]), system).nvlink is False


@pytest.mark.parametrize(
    ("value", "n"),
    [(None, 3), ("0", 1), ("2,0", 2), ("0,7,1", 1), ("", 0), ("GPU-b", 1), ("GPU-", 0), ("1,1", 1)],
)
def test_visible_devices(
    monkeypatch: pytest.MonkeyPatch, system: System, value: str | None, n: int
) -> None:
    cards = [(f"RTX {k}090", (8, 6), 24 << 30, 24 << 30) for k in (3, 4, 5)]
    nvml = Nvml(cards)
    nvml.nvmlDeviceGetUUID = lambda h: f"GPU-{'abc'[h]}1"  # type: ignore[attr-defined]
    system.env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    m = look(monkeypatch, nvml, system)
    assert len(m.gpus) == n
    assert any("CUDA_VISIBLE_DEVICES" in x for x in m.notes) == (n < 3)
    if value == "2,0":
        assert [g.card for g in m.gpus] == ["rtx-5090", "rtx-3090"]


@pytest.mark.parametrize(
    ("value", "memory"),
    [
        ("MIG-b1", [10]),
        ("MIG-a", [20]),
        ("MIG-b1,MIG-a1", [10]),  # CUDA takes one instance
        ("GPU-a1,MIG-b1", [20]),  # a GPU that is split: its first instance
        ("0", [20]),
        (None, [20]),
        ("MIG-c1", []),
        ("MIG-", []),
    ],
)
def test_an_instance_of_a_gpu_is_visible(
    value: str | None, memory: list[int], monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    """An instance has memory and a name, but no capability and no card of its own. Without a
    choice, and by its number, the whole GPU counted, which no process can use."""
    sizes = [("A100-SXM4-80GB", (8, 0), 80), ("A100 MIG 2g.20gb", None, 20)]
    sizes.append(("A100 MIG 1g.10gb", None, 10))
    nvml: Any = Nvml([(f"NVIDIA {name}", cc, n << 30, n << 30) for name, cc, n in sizes])
    nvml.nvmlDeviceGetCount = lambda: 1
    nvml.nvmlDeviceGetUUID = lambda h: ("GPU-a1", "MIG-a1", "MIG-b1")[h]
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda h: 7
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = nvml_instance
    nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = nvml_parent
    system.env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    m = look(monkeypatch, nvml, system)
    assert [g.memory for g in m.gpus] == [n << 30 for n in memory]
    assert all(g.cc == (8, 0) for g in m.gpus)
    if memory == [10]:
        assert m.gpus[0].card is None and m.bandwidth is None
        assert any("a MIG instance, a part of NVIDIA A100-SXM4-80GB" in note for note in m.notes)


def nvml_instance(h: int, i: int) -> int:
    if h or i > 1:
        raise FakeError
    return 1 + i


def nvml_parent(h: int) -> int:
    if not h:
        raise FakeError
    return 0


def test_gb10_reports_no_memory(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    m = look(monkeypatch, Nvml([("NVIDIA GB10", (12, 1), None, None)]), system)
    (gpu,) = m.gpus
    assert gpu.unified and gpu.card == "gb10"
    assert gpu.memory == 127600000 * 1024 and gpu.free == 100000000 * 1024
    assert any("/proc/meminfo" in n for n in m.notes)


def test_unknown_card_computes_its_bandwidth(
    monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    m = look(monkeypatch, Nvml([("NVIDIA X1", (8, 6), 24 << 30, 23 << 30)], clock=9751), system)
    assert m.gpus[0].card is None and m.bandwidth == pytest.approx(936, rel=0.001)
    m = look(monkeypatch, Nvml([("NVIDIA X1", None, 24 << 30, 23 << 30)]), system)
    assert m.cc is None and m.bandwidth is None


def test_unsupported_calls_are_unknown(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    m = look(monkeypatch, Nvml([("NVIDIA Y", None, None, None)]), system)
    from g4spec.advisor.doctor import diagnose

    assert diagnose(FACTS, m, None).sections


def test_wsl_container_environment(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    (system.proc / "version").write_text("Linux 5.15-microsoft-standard-WSL2")
    (system.root / ".dockerenv").touch()
    system.env = {"NCCL_IP_DISABLE": "1", "HOME": "/x"}
    m = look(monkeypatch, Nvml([], init=False), system)
    assert m.wsl and m.container == "Docker" and m.env == {"NCCL_IP_DISABLE"}


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GeForce RTX 5090 D", "rtx-5090-d"),
        ("NVIDIA GeForce RTX 5090 D v2", "rtx-5090-d-v2"),
        ("NVIDIA RTX 5880 Ada Generation", "rtx-5880-ada"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("NVIDIA RTX 4000 Ada Generation", "rtx-4000-ada"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "rtx-4000-sff-ada"),
        ("NVIDIA RTX 5900 Ada Generation", None),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx-3080-ti"),
        ("NVIDIA GeForce RTX 5080 D", None),
        ("NVIDIA A100X", None),
        ("AMD Instinct", None),
    ],
)
def test_names_of_products(name: str, card: str | None) -> None:
    found = find_card(FACTS, name)
    assert (found.id if found else None) == card


def test_torch_arches(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_python.so"
    library.write_bytes(b"\x00" * 999 + b"sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120\x00")
    assert torch_build._arch_list(library) == ["75", "80", "86", "90", "100", "120"]
    library.write_bytes(b"\x00sm_80 alone\x00")
    assert torch_build._arch_list(library) == []
    library.write_bytes(b"")
    assert torch_build._arch_list(library) == []


def test_torch_arches_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path] = []

    def arch_list(path: Path) -> list[str]:
        paths.append(path)
        return ["86", "120"]

    monkeypatch.setattr(torch_build, "_arch_list", arch_list)
    assert torch_build.torch_arches() == ("8.6", "12.0")
    assert paths[0].is_file()


def test_which_code_runs_where() -> None:
    wheel = ("7.5", "8.0", "8.6", "9.0", "12.0")
    assert report.covered((8, 9), wheel) and report.covered((12, 1), wheel)
    assert not report.covered((7, 0), wheel) and not report.covered((10, 0), wheel)


def lines(m: Machine) -> str:
    """Return doctor's lines about a machine, with marks and fixes."""
    from g4spec.advisor.doctor import diagnose

    return "\n".join(
        f"{x.mark} {x.text} {x.fix}" for s in diagnose(FACTS, m, None).sections for x in s.lines
    )


def test_torch_without_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from g4spec.advisor import questions

    m = questions.build_machine(FACTS, "V100", ("torch=2.14.0",))
    text = lines(m)
    assert "bad torch 2.14.0" in text and "cu126" in text


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "warn g4spec's CUDA kernels need torch and cuda-core install it: pip install"),
        ({"torch": "2.13.0"}, "warn g4spec's CUDA kernels need cuda-core install it: pip install"),
        ({"torch": "2.13.0", "cuda-core": "1.2.2"}, "note no package holds NVRTC"),
        ({"torch": "2.13.0", "cuda-core": "1.2.2", "nvidia-cuda-nvrtc": "13.0.88"}, ""),
    ],
)
def test_packages_needed_by_g4specs_kernels(
    monkeypatch: pytest.MonkeyPatch, system: System, installed: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(machine_probe, "_packages", lambda: installed)
    m = look(monkeypatch, Nvml([("NVIDIA H200", (9, 0), 139 * GIB, 138 * GIB)]), system)
    text = lines(m)
    assert message in text
    assert bool(message) == ("NVRTC" in text or "CUDA kernels need" in text)


# ---- network


ETHTOOL = """NIC statistics:
     rx_packets: 100
     rx_err_lane_0_phy: 0
     rx_err_lane_1_phy: {}
     rx_err_lane_2_phy: {}
     rx_err_lane_3_phy: {}
     rx_discards_phy: 0
"""


def test_rising_lane_errors_of_the_report() -> None:
    """Lane error counters that rose within 15 s."""
    before = {f"eth0 {k}": v for k, v in network.ethtool(ETHTOOL.format(15201, 976, 15299)).items()}
    after = {f"eth0 {k}": v for k, v in network.ethtool(ETHTOOL.format(20379, 1270, 20485)).items()}
    slept: list[float] = []
    samples = iter((before, after))
    found = network.watch(lambda: next(samples), slept.append)
    assert slept == [15] and not found.ok and len(found.changes) == 3
    assert "rx_err_lane_1_phy: 15,201 -> 20,379 (+5,178 in 15 s)" in found.lines[0].text
    assert "cable" in found.summary
    assert "rx_packets" not in " ".join(before)


def test_quiet_links(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/net/eth0/statistics"
    port.mkdir(parents=True)
    (port / "rx_errors").write_text("5\n")
    lanes = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    lanes.mkdir(parents=True)
    (lanes / "symbol_error").write_text("7\n")
    (lanes / "port_rcv_data").write_text("123\n")
    system = System(root=tmp_path)
    taken = network.sample(system)
    assert taken == {"eth0 rx_errors": 5, "mlx5_0 port 1 symbol_error": 7}
    found = network.compare(taken, dict(taken))
    assert found.ok and found.summary == "No link counts errors."
    assert network.compare({}, {}).ok


def test_network_command_fails_on_rising_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = iter(({"eth0 rx_errors": 1}, {"eth0 rx_errors": 900}))
    monkeypatch.setattr(network, "watch", lambda: network.compare(next(samples), next(samples)))
    assert run(["doctor", "--network"]) == 1
    assert "eth0 rx_errors: 1 -> 900" in capsys.readouterr().out


def test_units() -> None:
    assert GIB == 2**30


@pytest.mark.parametrize(
    "text",
    [
        "RTX 3090",
        "2x RTX 3090 nvlink",
        "sm_86 24GB",
        "RTX 4090 + 2x RTX 3090",
        "4x GB10",
        "V100 16GB",
        "2x sm_120 32GB",
    ],
)
def test_the_printed_assumption_describes_the_same_machine(text: str) -> None:
    asked = assume(FACTS, text)
    printed = shlex.split(assume_options(asked))
    again = assume(FACTS, printed[1])
    assert printed[0] == "--assume" and again.gpus == asked.gpus and again.nvlink == asked.nvlink
    assert printed[2:] == [] and again.nodes == asked.nodes
