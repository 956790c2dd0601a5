"""The machine that facts are evaluated for. A real one (`probe`) and an assumed one are the same
object and go through the same code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from g4spec.advisor.facts import Facts
from g4spec.advisor.schema import Capability, Card
from g4spec.advisor.versions import parse
from g4spec.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.

    Attributes:
        cc: compute capability, as (8, 6); None if it could not be read.
        memory, free: bytes; None where nothing reports them. `bandwidth`: GB/s or None.
        card: id of its row, or None for a card that is not in the data.
        processes: what others run on it, as `name (MiB)`.
    """

    name: str
    cc: tuple[int, int] | None
    memory: int | None
    free: int | None = None
    bandwidth: float | None = None
    card: str | None = None
    unified: bool = False
    processes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """One node, or several equal ones.

    Attributes:
        nodes: nodes with these cards each. `driver`: of NVIDIA, as 580.159.04.
        cuda: newest CUDA that the driver knows. `ram`, `ram_free`, `disk_free`: bytes.
        tools: engine or package -> version (vllm, sglang, llama.cpp, torch, transformers, ...).
        nvlink: whether the cards are linked; None if unknown.
        torch_arches: capabilities that the installed torch has code for; empty if unknown.
        supposed: versions that were asked about, as vllm=0.19.2, which need not be installed.
        notes: what could not be found out, in words.
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
    supposed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cc(self) -> tuple[int, int] | None:
        """Capability of the weakest card."""
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
        """Bytes of the smallest card."""
        known = [g.memory for g in self.gpus if g.memory is not None]
        return min(known) if known else None

    @property
    def free(self) -> int | None:
        """Bytes free on the fullest card, its size where free memory is not known; the system's
        memory where there is no card."""
        if not self.gpus:
            return self.ram_free
        known = [g.free if g.free is not None else g.memory for g in self.gpus]
        return min((k for k in known if k is not None), default=None)

    @property
    def bandwidth(self) -> float | None:
        """GB/s of the slowest card."""
        known = [g.bandwidth for g in self.gpus if g.bandwidth]
        return min(known) if known and len(known) == len(self.gpus) else None

    @property
    def total_gpus(self) -> int:
        return len(self.gpus) * self.nodes

    @property
    def title(self) -> str:
        """As `2x RTX 3090`, or `a machine without an NVIDIA GPU`."""
        if not self.gpus:
            return "a machine without an NVIDIA GPU"
        names = [g.name for g in self.gpus]
        parts = []
        for name in dict.fromkeys(names):
            n = names.count(name) * self.nodes
            parts.append(f"{n}x {name}" if n > 1 else name)
        return " + ".join(parts) + (f" ({self.nodes} nodes)" if self.nodes > 1 else "")


def words(text: str) -> list[str]:
    """Lower-case words of a product name without the vendor's: `NVIDIA GeForce RTX 3090`."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return [w for w in found if w not in ("nvidia", "geforce", "tesla", "gpu", "graphics")]


def find_card(facts: Facts, name: str) -> Card | None:
    """The row of a product by its name; the longest name that occurs in it wins, as whole words,
    so that `RTX 3090 Ti` is not an `RTX 3090`."""
    asked, best, length = words(name), None, 0
    for card in facts.all(Card):
        for alias in (card.name, *card.aliases):
            w = words(alias)
            spots = range(len(asked) - len(w) + 1)
            if w and len(w) > length and any(asked[i : i + len(w)] == w for i in spots):
                best, length = card, len(w)
    if best is not None:
        named = set(words(best.name)) | {w for a in best.aliases for w in words(a)}
        extra = set(asked) - named
        if extra & {"ti", "super", "laptop", "mobile", "max", "d", "s"}:
            return None  # another product whose figures are not in the data
    return best


def card_gpu(card: Card, name: str, size: float | None) -> Gpu:
    """A GPU from a row; `size` in GB picks among the card's versions, by default the largest."""
    sizes = card.memory
    gb = max(sizes) if size is None else min(sizes, key=lambda s: abs(s - size))
    if size is not None and abs(gb - size) > max(1.5, 0.05 * gb):
        raise UsageError(
            f"{card.name} with {size:g} GB",
            expected=" or ".join(f"{s} GB" for s in sizes),
            found=f"{size:g} GB",
            fix="write the name with one of these sizes, or sm_86 24GB for any other card",
        )
    index = sizes.index(gb) if len(card.bandwidth) == len(sizes) else -1
    memory = int((card.visible or gb) * GIB)
    major, minor = parse(card.cc)
    return Gpu(
        name or card.name,
        (major, minor),
        memory,
        None,
        card.bandwidth[index],
        card.id,
        card.unified,
    )


_COUNT = re.compile(r"^(\d+)\s*[x×*]\s*(.+)$", re.IGNORECASE)
_SIZE = re.compile(r"\b(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\b", re.IGNORECASE)
_SM = re.compile(r"\bsm_?(\d{2,3})[af]?\b", re.IGNORECASE)


def assume(facts: Facts, text: str, tools: Mapping[str, str] | None = None) -> Machine:
    """A machine from words: `2x RTX 3090`, `V100 16GB`, `4x GB10`, `sm_86 24GB`,
    `RTX 4090 + RTX 3090`. UsageError, listing the known cards, for anything else.

    Cards that share memory with the CPU (GB10) are one a node, so `4x GB10` is four nodes. Cards
    that can be bridged are taken without a bridge, unless the text says nvlink.
    """
    gpus: list[Gpu] = []
    linked = bool(re.search(r"\bnvlink\b", text, re.IGNORECASE))
    bare = re.sub(r"\b(with )?nvlink\b", "", text, flags=re.IGNORECASE)
    for part in bare.split("+"):
        counted = _COUNT.match(part.strip())
        n, name = (int(counted[1][:9]), counted[2]) if counted else (1, part.strip())
        if not 1 <= n <= 64:
            raise UsageError(f"--assume {text!r}", expected="1 to 64 cards", found=n)
        gpus += [_assume_one(facts, name.strip(), text)] * n
    nodes = 1
    if gpus[0].unified and len(gpus) > 1:
        if len(set(gpus)) > 1:
            raise UsageError(f"--assume {text!r}: different nodes in one machine")
        nodes, gpus = len(gpus), gpus[:1]
    nvlink: bool | None = None
    if len(gpus) > 1 and all(g.card for g in gpus):
        kinds = {facts.get(Card, g.card or "").nvlink for g in gpus}
        # Boards are linked in the machines that they are sold in; a bridge is bought apart.
        nvlink = None if any("boards" in k for k in kinds) else False
    if linked:
        nvlink = True
    return Machine(tuple(gpus), nodes, nvlink=nvlink, tools=dict(tools or {}), assumed=True)


def _assume_one(facts: Facts, name: str, text: str) -> Gpu:
    sized = _SIZE.search(name)
    size = float(sized[1]) if sized else None
    bare = _SIZE.sub("", name).strip()
    card = find_card(facts, bare)
    if card is not None:
        return card_gpu(card, card.name, size)
    arch = _SM.search(bare)
    if arch is not None and size is not None:
        digits = arch[1]
        cc = (int(digits[:-1]), int(digits[-1]))
        known = {c for row in facts.all(Capability) for c in row.cc}
        if f"{cc[0]}.{cc[1]}" in known:
            return Gpu(f"a card of capability {cc[0]}.{cc[1]}", cc, int(size * GIB))
    cards = ", ".join(c.name for c in facts.all(Card))
    raise UsageError(
        f"--assume {text!r}: unknown card {name!r}",
        expected=f"[N x] one of: {cards}; with a size where there are several, as V100 16GB; or "
        "any card by capability and size, as sm_86 24GB",
    )


def upgraded(machine: Machine, engine: str) -> Machine:
    """With the newest version of an engine, which brings its own torch and transformers."""
    old = {engine, "torch", "transformers"}
    return replace(
        machine,
        tools={name: version for name, version in machine.tools.items() if name not in old},
        supposed=tuple(pair for pair in machine.supposed if pair.split("=")[0] not in old),
    )


def assumption(machine: Machine) -> str:
    """The options that describe what was not looked at, with a space in front; or ""."""
    supposed = "".join(f" --with {shlex.quote(pair)}" for pair in machine.supposed)
    if not machine.assumed or not machine.gpus:
        return supposed
    parts = []
    for gpu, same in groupby(machine.gpus):
        count = f"{n}x " if (n := len(list(same))) > 1 else ""
        name = f"sm_{gpu.cc[0]}{gpu.cc[1]}" if gpu.cc and not gpu.card else ""
        name = name or (gpu.card or gpu.name).replace("-", " ").upper()
        memory = f" {gpu.memory / GIB:.0f}GB" if gpu.memory and not gpu.unified else ""
        parts.append(f"{count}{name}{memory}")
    linked = " nvlink" if machine.nvlink else ""
    nodes = f" --nodes {machine.nodes}" if machine.nodes > 1 else ""
    return f' --assume "{" + ".join(parts)}{linked}"{nodes}{supposed}'
