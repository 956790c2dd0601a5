"""Samples the error counters of network links twice, to detect a bad cable.

In one report a cable counted thousands of errors in 15 s while the engine showed only timeouts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from g4spec.advisor.machine_probe import System

SECONDS = 15
FIX = "reseat or replace the cable (DAC) of that port, then watch again"
ERRORS = re.compile(r"(err|crc|symbol|discard|link_downed|fault|bad|corrected)", re.IGNORECASE)
STATISTICS = (
    "rx_errors",
    "tx_errors",
    "rx_crc_errors",
    "rx_frame_errors",
    "rx_missed_errors",
    "tx_carrier_errors",
)

Counters = dict[str, int]


@dataclass(frozen=True, slots=True)
class CounterLine:
    """A line of the report: one counter or link."""

    text: str
    rising: bool


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Result of `watch`. `changes`: rising counters -> (before, after); `ok`: none is rising."""

    lines: tuple[CounterLine, ...]
    summary: str
    ok: bool
    changes: Mapping[str, tuple[int, int]]

    def json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "summary": self.summary,
            "seconds": SECONDS,
            "rising": {k: {"before": a, "after": b} for k, (a, b) in self.changes.items()},
        }


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def sample(system: System | None = None) -> Counters:
    """Read all error counters of all ports: kernel statistics, InfiniBand, and `ethtool -S`, which
    has the counters of the lanes."""
    system = system or System()
    out: Counters = {}
    for folder in sorted((system.root / "sys/class/net").glob("*")):
        if folder.name == "lo" or folder.name.startswith(("veth", "docker", "br-", "tap")):
            continue
        for name in STATISTICS:
            value = _number(system.text(folder / "statistics" / name))
            if value is not None:
                out[f"{folder.name} {name}"] = value
        for name, value in ethtool(system.run("ethtool", "-S", folder.name)).items():
            out[f"{folder.name} {name}"] = value
    for path in sorted((system.root / "sys/class/infiniband").glob("*/ports/*/counters/*")):
        value = _number(system.text(path))
        if value is not None and ERRORS.search(path.name):
            out[f"{path.parts[-5]} port {path.parts[-3]} {path.name}"] = value
    return out


def ethtool(text: str) -> Counters:
    """Parse the error counters in the output of `ethtool -S`."""
    found = re.findall(r"^\s*([\w\[\]. -]+?):\s*(\d+)\s*$", text, re.MULTILINE)
    return {name.strip(): int(value) for name, value in found if ERRORS.search(name)}


def compare(before: Counters, after: Counters) -> LinkReport:
    """Report the counters that rose between two samples."""
    rising = {k: (before[k], v) for k, v in after.items() if k in before and v > before[k]}
    lines = [
        CounterLine(f"{name}: {a:,} -> {b:,} (+{b - a:,} in {SECONDS} s)", True)
        for name, (a, b) in rising.items()
    ]
    links = sorted({k.split(" ")[0] for k in after})
    if not links:
        return LinkReport((), "No network links with counters were found.", True, {})
    lines += [
        CounterLine(f"{link}: no errors rising", False)
        for link in links
        if not any(k.split(" ")[0] == link for k in rising)
    ]
    summary = (
        f"{len(rising)} error counters are rising: {FIX}." if rising else "No link counts errors."
    )
    return LinkReport(tuple(lines), summary, not rising, rising)


def watch(
    take: Callable[[], Counters] = sample, sleep: Callable[[float], None] = time.sleep
) -> LinkReport:
    """Take two samples, SECONDS apart, and compare them."""
    before = take()
    sleep(SECONDS)
    return compare(before, take())
