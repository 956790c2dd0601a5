"""llama.cpp's programs: run them, and read from their debug log what a draft proposed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

CTX, NEW = 2048, 96
"""Context of a run, and tokens to generate."""


@dataclass
class Round:
    """One cycle of upstream: proposals from `position`, where `anchor` stands."""

    position: int
    anchor: int
    drafted: list[int]
    accepted: int


class Upstream:
    """Upstream's programs. `source`: its source folder, or None."""

    def __init__(self, binaries: Path, source: Path | None) -> None:
        self.binaries, self.source = binaries, source

    def run(self, program: str, *args: object) -> bytes:
        done = subprocess.run(
            [self.binaries / program, *map(str, args)], capture_output=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{program}: exit {done.returncode}\n{done.stderr[-2000:]!r}")
        return done.stdout + done.stderr

    def version(self) -> str:
        text = self.run("llama-speculative-simple", "--version").decode()
        return text.strip().splitlines()[0]

    def tokenize(self, model: Path, prompt: Path) -> list[int]:
        out = self.run("llama-tokenize", "-m", model, "-f", prompt, "--ids", "--log-disable")
        found = re.findall(rb"^\[([\d, ]+)\]", out, re.M)
        return [int(i) for i in found[-1].split(b",")]

    def draft(
        self, target: Path, draft: Path, kind: str, n_max: int, prompt: Path, ids: list[int]
    ) -> tuple[list[int], list[Round]]:
        """Greedy text after the prompt, and every round."""
        f32 = [a for k in ("-ctk", "-ctv", "-ctkd", "-ctvd") for a in (k, "f32")]
        log = self.run(
            "llama-speculative-simple", "-m", target, "-md", draft, "--spec-type", kind,
            "--spec-draft-n-max", n_max, "-n", NEW, "--temp", 0, "-lv", 10, "-c", CTX, "-fa", "off",
            "-t", 1, "-td", 1, "-f", prompt, "--ignore-eos", *f32,
        )  # fmt: skip
        return parse(log, ids)


def parse(log: bytes, ids: list[int]) -> tuple[list[int], list[Round]]:
    """Rounds from a debug log. The prompt's last token is the first anchor."""
    event = re.compile(
        rb"draft candidate\s+0, pos\s+\d+:\s+(\d+) \("
        rb"|accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)"
    )
    rounds, drafted, text = [], [], list(ids)
    for m in event.finditer(log):
        if m[1] is not None:
            drafted.append(int(m[1]))
            continue
        accepted, n, last = int(m[2]), int(m[3]), int(m[4])
        rounds.append(Round(len(text) - 1, text[-1], drafted[:n], accepted))
        text += [*drafted[:accepted], last]
        drafted = []
    return text[len(ids) :], rounds
