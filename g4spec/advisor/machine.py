"""The machine that facts are evaluated for. A probed machine and an assumed one (`--assume`) are
the same type and take the same code path."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from g4spec.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Measurement:
    """State how fast a card reads its memory. `read`: GB/s. `date`: as 2026-11-29."""

    read: float
    date: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.

    Attributes:
        cc: compute capability, as (8, 6); None if unknown.
        memory, free: bytes; None if unknown. `bandwidth`: nominal, in GB/s, or None.
        card: id of its row, or None if the facts do not have the card.
        unified: True if it shares memory with the CPU.
        processes: other processes that use it, as `name (MiB)`.
        measured: what the self-test measured, or None. It differs a little between equal cards.
    """

    name: str
    cc: tuple[int, int] | None
    memory: int | None
    free: int | None = None
    bandwidth: float | None = None
    card: str | None = None
    unified: bool = False
    processes: tuple[str, ...] = ()
    measured: Measurement | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """One node, or several identical nodes.

    Attributes:
        gpus: the cards of one node. `nodes`: number of nodes.
        driver: NVIDIA driver version, as 580.159.04. `cuda`: newest CUDA version it supports.
        ram, ram_free, disk_free: bytes.
        tools: engine or package -> version (vllm, sglang, llama.cpp, torch, transformers, ...).
        nvlink: True if the cards are connected by NVLink; None if unknown.
        torch_arches: capabilities that the installed torch has code for; empty if unknown.
        other: id of the row (`schema.OtherGpuFact`) of a GPU that is not NVIDIA's, or None.
        supposed: versions given with --with, as vllm=0.19.2; they need not be installed.
        notes: messages about what could not be determined.
    """

    gpus: tuple[Gpu, ...]
    nodes: int = 1
    driver: str | None = None
    cuda: str | None = None
    ram: int | None = None
    ram_free: int | None = None
    disk_free: int | None = None
    wsl: bool = False
    container: str | None = None
    nvlink: bool | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    torch_arches: tuple[str, ...] = ()
    env: frozenset[str] = field(default_factory=frozenset)
    assumed: bool = False
    other: str | None = None
    supposed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cc(self) -> tuple[int, int] | None:
        """Compute capability of the weakest card."""
        known = [g.cc for g in self.gpus if g.cc is not None]
        return min(known) if known else None

    @property
    def mixed(self) -> bool:
        return len({g.cc for g in self.gpus}) > 1

    @property
    def unified(self) -> bool:
        return any(g.unified for g in self.gpus)

    @property
    def memory(self) -> int | None:
        """Memory of the smallest card, in bytes."""
        known = [g.memory for g in self.gpus if g.memory is not None]
        return min(known) if known else None

    @property
    def free(self) -> int | None:
        """Lowest free memory of the cards in bytes (total memory where free is unknown); without
        a card, free RAM."""
        if not self.gpus:
            return self.ram_free
        known = [g.free if g.free is not None else g.memory for g in self.gpus]
        return min((k for k in known if k is not None), default=None)

    @property
    def bandwidth(self) -> float | None:
        """Nominal bandwidth of the slowest card in GB/s; None unless all are known."""
        known = [g.bandwidth for g in self.gpus if g.bandwidth]
        return min(known) if known and len(known) == len(self.gpus) else None

    @property
    def measured(self) -> Measurement | None:
        """Measurement of the slowest card; None unless all were measured."""
        known = [g.measured for g in self.gpus if g.measured is not None]
        all_known = bool(known) and len(known) == len(self.gpus)
        return min(known, key=lambda m: m.read) if all_known else None

    @property
    def total_gpus(self) -> int:
        return len(self.gpus) * self.nodes

    @property
    def title(self) -> str:
        """Short description, as `2x RTX 3090` or `a machine without an NVIDIA GPU`."""
        if not self.gpus:
            ram = f", {self.ram / GIB:.0f} GiB of RAM" if self.ram is not None else ""
            return f"a machine without an NVIDIA GPU{ram}"
        names = [assumed_name(g) if self.assumed else g.name for g in self.gpus]
        parts = []
        for name in dict.fromkeys(names):
            n = names.count(name) * self.nodes
            parts.append(f"{n}x {name}" if n > 1 else name)
        return " + ".join(parts) + (f" ({self.nodes} nodes)" if self.nodes > 1 else "")


def upgraded(machine: Machine, engine: str) -> Machine:
    """Return the machine with the newest version of an engine, torch and transformers."""
    old = {engine, "torch", "transformers"}
    return replace(
        machine,
        tools={name: version for name, version in machine.tools.items() if name not in old},
        supposed=tuple(pair for pair in machine.supposed if pair.split("=")[0] not in old),
    )


def assumed_name(gpu: Gpu) -> str:
    """Return a card as `--assume` takes it: `RTX 4060 Ti 16GB`, `sm_86 24GB`, `GB10`."""
    name = f"sm_{gpu.cc[0]}{gpu.cc[1]}" if gpu.cc and not gpu.card else gpu.name
    return name + (f" {gpu.memory / GIB:.0f}GB" if gpu.memory and not gpu.unified else "")


def assume_options(machine: Machine) -> str:
    """Return the options --assume, --nodes and --with that describe the machine, each preceded by a
    space; "" for a probed machine."""
    supposed = "".join(f" --with {shlex.quote(pair)}" for pair in machine.supposed)
    if not machine.assumed:
        return supposed
    if not machine.gpus:
        return f' --assume "CPU {(machine.ram or 0) / GIB:.0f}GB"{supposed}'
    parts = []
    for gpu, same in groupby(machine.gpus):
        n = len(list(same)) * (machine.nodes if gpu.unified else 1)
        count = f"{n}x " if n > 1 else ""
        parts.append(f"{count}{assumed_name(gpu)}")
    linked = " nvlink" if machine.nvlink else ""
    nodes = f" --nodes {machine.nodes}" if machine.nodes > 1 and not machine.unified else ""
    return f' --assume "{" + ".join(parts)}{linked}"{nodes}{supposed}'


MAX_NODES = 64
"""Maximum number of nodes."""


def on_nodes(machine: Machine, nodes: int | None) -> Machine:
    """Return the machine with `nodes` nodes. `4x GB10` already has four."""
    if nodes is None or nodes == machine.nodes:
        return machine
    if nodes > MAX_NODES:
        raise UsageError("--nodes", expected=f"at most {MAX_NODES}", found=nodes)
    if machine.nodes > 1:
        raise UsageError(f"--nodes {nodes}, but the machine has {machine.nodes}", fix="say it once")
    return replace(machine, nodes=nodes)
