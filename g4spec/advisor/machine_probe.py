"""Probe the real machine.

Imports no torch, and a missing tool is not an error: `Machine.notes` lists what could not be
determined.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from g4spec.advisor import measured
from g4spec.advisor.cards import find_card
from g4spec.advisor.facts import Facts
from g4spec.advisor.machine import Gpu, Machine, Measurement
from g4spec.advisor.schema import OtherGpuFact
from g4spec.advisor.torch_build import torch_arches

PACKAGES = (
    "vllm",
    "sglang",
    "torch",
    "transformers",
    "triton",
    "flashinfer-python",
    "llama-cpp-python",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
)
PROGRAMS = ("llama-server", "nvcc", "docker", "ethtool")
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_IP_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_USE_RAY_COMPILED_DAG",
)
ON = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Values that engines choose themselves."""

NAME_ONLY_LIMIT = 96


@dataclass(slots=True)
class System:
    """The folders, environment and programs that are read; tests substitute their own."""

    proc: Path = Path("/proc")
    root: Path = Path("/")
    platform: str = field(default_factory=platform.system)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: Path) -> str:
        """Return a file's text, or "" if it cannot be read."""
        try:
            return path.read_text(errors="replace")
        except OSError:
            return ""

    def run(self, *command: str) -> str:
        """Return a program's output, or "" if it is missing or takes more than a second."""
        if shutil.which(command[0]) is None:
            return ""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=1.0, check=False, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout + done.stderr


def meminfo(system: System) -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", system.text(system.proc / "meminfo"), re.M)
    return {name: int(kib) * 1024 for name, kib in found}


def _physical(system: System) -> dict[str, int]:
    """Return memory sizes in bytes by the names of /proc/meminfo. Without that file (macOS) all
    memory counts as free."""
    found = meminfo(system)
    if not found and platform.system() == system.platform == "Darwin":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found = {"MemTotal": total, "MemAvailable": total}
    return found


def _other(facts: Facts, system: System) -> str | None:
    """Return the id of the row for a GPU that is not an NVIDIA card, or None. Identified by
    operating system, Jetson's release file or PCI vendor."""
    if system.platform == "Darwin":
        return "other-mac"
    if (system.root / "etc/nv_tegra_release").exists():
        return "other-jetson"
    files = sorted((system.root / "sys/class/drm").glob("card*/device/vendor"))
    vendors = {system.text(path).strip() for path in files}
    return next((row.id for row in facts.all(OtherGpuFact) if row.vendor in vendors), None)


def probe(facts: Facts, system: System | None = None) -> Machine:
    """Return a description of this machine."""
    system = system or System()
    memory = _physical(system)
    notes: list[str] = []
    visible = system.env.get("CUDA_VISIBLE_DEVICES")
    gpus, driver, cuda, nvlink = _gpus(facts, memory, notes, visible)
    tools = _packages() | _programs(system)
    kernel = system.text(system.proc / "version").lower()
    return Machine(
        gpus=tuple(gpus),
        driver=driver,
        cuda=cuda,
        ram=memory.get("MemTotal"),
        ram_free=memory.get("MemAvailable"),
        disk_free=_disk(),
        wsl="microsoft" in kernel or "wsl" in kernel,
        container=_container(system),
        nvlink=nvlink,
        tools=tools,
        torch_arches=torch_arches() if "torch" in tools else (),
        env=frozenset(n for n in ENVIRONMENT if system.env.get(n, "") not in ("", ON.get(n))),
        other=None if gpus else _other(facts, system),
        notes=tuple(notes),
    )


def _disk() -> int | None:
    try:
        return shutil.disk_usage(Path.cwd()).free
    except OSError:
        return None


def _container(system: System) -> str | None:
    if (system.root / ".dockerenv").exists():
        return "Docker"
    if (system.root / "run/.containerenv").exists():
        return "Podman"
    group = system.text(system.proc / "1/cgroup")
    named = (("kubepods", "Kubernetes"), ("docker", "Docker"), ("lxc", "LXC"))
    return next((name for key, name in named if key in group), None)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _programs(system: System) -> dict[str, str]:
    """Return the versions of installed programs: llama.cpp's build as `b9831`, nvcc's release."""
    found = {}
    for name in PROGRAMS:
        if shutil.which(name) is None:
            continue
        if name == "llama-server":
            build = re.search(r"version:\s*(\d+)", system.run(name, "--version"))
            found["llama.cpp"] = f"b{build[1]}" if build else "unknown"
        elif name == "nvcc":
            release = re.search(r"release (\d+\.\d+), V(\S+)", system.run(name, "--version"))
            found[name] = release[2] if release else "unknown"
        else:
            found[name] = "installed"
    return found


# ---- GPUs


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the initialized NVML module, or None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _visible(ask: _NvmlCalls, handles: list[Any], wanted: str | None) -> list[Any]:
    """Return the devices that a process can use: those that CUDA_VISIBLE_DEVICES selects, by index
    or UUID prefix, up to the first invalid entry. NVML itself ignores the variable.

    Of the instances of GPUs that are split into such (MIG), a process can use one, and no whole GPU
    besides; without a choice CUDA takes the first.
    Source: NVIDIA's MIG user guide, "CUDA Device Enumeration".
    """
    if wanted is None:
        return _instances(ask, handles)[:1] or handles
    known = [*handles, *_instances(ask, handles)]
    ids = [ask.text("nvmlDeviceGetUUID", h) or "" for h in known]
    out: list[Any] = []
    for word in wanted.split(","):
        name = word.strip()
        if name.isdigit() and int(name) < len(handles):
            found = handles[int(name)]
        else:
            starts = [h for h, id in zip(known, ids, strict=True) if name and id.startswith(name)]
            if len(starts) != 1:
                break
            found = starts[0]
        if found in out or (out and found not in handles):
            break
        out.append(found)
        if found not in handles:
            return out
    return _instances(ask, out)[:1] or out


def _instances(ask: _NvmlCalls, handles: list[Any]) -> list[Any]:
    """Return the instances of the GPUs that are split into such (MIG)."""
    found = [
        ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
        for handle in handles
        for i in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    ]
    return [instance for instance in found if instance is not None]


def _gpus(
    facts: Facts, memory: Mapping[str, int], notes: list[str], visible: str | None
) -> tuple[list[Gpu], str | None, str | None, bool | None]:
    """Return the cards, driver version, newest supported CUDA, and True if NVLink is active."""
    with _nvml() as nvml:
        if nvml is None:
            notes.append("no NVIDIA driver was found on this machine")
            return [], None, None, None
        ask = _NvmlCalls(nvml)
        driver = ask.text("nvmlSystemGetDriverVersion")
        number = ask("nvmlSystemGetCudaDriverVersion_v2") or ask("nvmlSystemGetCudaDriverVersion")
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
        handles = []
        for i in range(ask("nvmlDeviceGetCount") or 0):
            handle = ask("nvmlDeviceGetHandleByIndex", i)
            if handle is not None:
                handles.append(handle)
        every = len(handles)
        handles = _visible(ask, handles, visible)
        if visible is not None and len(handles) < every:
            notes.append(f"CUDA_VISIBLE_DEVICES={visible}: {len(handles)} of {every} GPUs are used")
        gpus = [
            replace(
                _gpu(facts, ask, handle, memory, notes),
                measured=_measured(ask, handle, driver, notes),
            )
            for handle in handles
        ]
        linked = (
            any(ask("nvmlDeviceGetNvLinkState", handles[0], link) == 1 for link in range(4))
            if len(handles) > 1
            else None
        )
        if not gpus:
            notes.append("the NVIDIA driver is loaded, but no GPU is visible to this process")
        return gpus, driver, cuda, linked


def _measured(
    ask: _NvmlCalls, handle: Any, driver: str | None, notes: list[str]
) -> Measurement | None:
    """Return what the self-test measured on a card with this driver, or None."""
    uuid = ask.text("nvmlDeviceGetUUID", handle)
    return measured.load(uuid, driver, notes) if uuid is not None else None


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None without one."""
    with _nvml() as nvml:
        return _NvmlCalls(nvml).text("nvmlSystemGetDriverVersion") if nvml is not None else None


class _NvmlCalls:
    """Calls NVML functions; returns None if the device or driver does not support one."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def __call__(self, name: str, *args: Any) -> Any:
        function = getattr(self.nvml, name, None)
        if function is None:
            return None
        try:
            return function(*args)
        except self.nvml.NVMLError:
            return None

    def text(self, name: str, *args: Any) -> str | None:
        value = self(name, *args)
        return None if value is None else _text(value)


def _gpu(
    facts: Facts, ask: _NvmlCalls, handle: Any, memory: Mapping[str, int], notes: list[str]
) -> Gpu:
    name = (ask.text("nvmlDeviceGetName", handle) or "unknown GPU")[:NAME_ONLY_LIMIT]
    whole = ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    if whole is not None:
        gpu = ask.text("nvmlDeviceGetName", whole)
        notes.append(f"{name}: a MIG instance, a part of {gpu}; its bandwidth is not known")
    card = find_card(facts, name) if whole is None else None
    cc = ask("nvmlDeviceGetCudaComputeCapability", handle if whole is None else whole)
    info = ask("nvmlDeviceGetMemoryInfo", handle)
    total, free = (info.total, info.free) if info is not None else (None, None)
    unified = bool(card and card.unified)
    ram = memory.get("MemTotal")
    if total and ram and abs(total - ram) < 0.1 * ram and card is None and whole is None:
        unified = True
    if unified or total is None:
        # NVML does not report memory on GB10; elsewhere it counts the page cache as used.
        total, free = ram, memory.get("MemAvailable")
        notes.append(f"{name}: memory is shared with the CPU and read from /proc/meminfo")
    others = tuple(_processes(ask, handle))
    bandwidth = None
    if whole is None:
        listed, sizes = (card.bandwidth, card.memory) if card else ((), ())
        bandwidth = _bandwidth(ask, handle, listed, sizes, total)
    return Gpu(
        name,
        tuple(cc) if cc is not None else None,
        total,
        free,
        bandwidth,
        card.id if card else None,
        unified,
        others,
    )


def _bandwidth(
    ask: _NvmlCalls,
    handle: Any,
    listed: tuple[float, ...],
    sizes: tuple[int, ...],
    total: int | None,
) -> float | None:
    """Return GB/s: the vendor's figure of a known card, else bus width x memory clock."""
    if listed:
        if len(listed) != len(sizes) or total is None:
            return listed[-1]
        return listed[min(range(len(sizes)), key=lambda i: abs(sizes[i] - total / 2**30))]
    width = ask("nvmlDeviceGetMemoryBusWidth", handle)
    clock = ask("nvmlDeviceGetMaxClockInfo", handle, 2)  # NVML_CLOCK_MEM, MHz
    return round(2 * clock * 1e6 * width / 8 / 1e9, 1) if width and clock else None


def _processes(ask: _NvmlCalls, handle: Any) -> Iterator[str]:
    """Yield the other processes that use the card, as `name (MiB)`."""
    own = os.getpid()
    for kind in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in ask(kind, handle) or ():
            if process.pid == own:
                continue
            used = (
                f"{process.usedGpuMemory / 2**20:.0f} MiB" if process.usedGpuMemory else "unknown"
            )
            name = ask.text("nvmlSystemGetProcessName", process.pid) or f"process {process.pid}"
            yield f"{Path(name).name[:40]} ({used})"
