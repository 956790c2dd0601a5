"""Run llama.cpp's programs and parse the drafts in their debug log."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

CTX, NEW = 2048, 96
"""Context of a run, and tokens to generate."""


def gelu_table(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU as upstream's CPU backend does for float32: the argument is rounded to
    float16 and the value is read from a float16 table (GGML_GELU_FP16 in ggml-cpu/vec.h)."""
    h = x.half().float()
    inner = math.sqrt(2.0 / math.pi) * h * (1.0 + 0.044715 * h * h)
    y = (0.5 * h * (1.0 + torch.tanh(inner))).half().float()
    return torch.where(x <= -10.0, 0.0, torch.where(x >= 10.0, x, y))


@dataclass
class Round:
    """One cycle of upstream: proposals that follow token `anchor` at `position`."""

    position: int
    anchor: int
    drafted: list[int]
    accepted: int


class Upstream:
    """Upstream's programs. `source`: its source folder, or None. `patches`: what was changed in
    it before it was built."""

    def __init__(self, binaries: Path, source: Path | None, patches: Sequence[str] = ()) -> None:
        self.binaries, self.source, self.patches = binaries, source, patches

    def run(self, program: str, *args: object) -> bytes:
        done = subprocess.run(
            [self.binaries / program, *map(str, args)], capture_output=True, check=False
        )
        if done.returncode:
            said = [x for x in done.stderr.splitlines() if b" E " in x] or [done.stderr[-2000:]]
            raise SystemExit(f"{program}: exit {done.returncode}\n" + b"\n".join(said).decode())
        return done.stdout + done.stderr

    def version(self) -> str:
        text = self.run("llama-speculative-simple", "--version").decode()
        return ", with ".join([text.strip().splitlines()[0], *self.patches])

    def tokenize(self, model: Path, prompt: Path) -> list[int]:
        out = self.run("llama-tokenize", "-m", model, "-f", prompt, "--ids", "--log-disable")
        found = re.findall(rb"^\[([\d, ]+)\]", out, re.M)
        return [int(i) for i in found[-1].split(b",")]

    def draft(
        self, target: Path, draft: Path, kind: str, n_max: int, prompt: Path, ids: list[int]
    ) -> tuple[list[int], list[Round]]:
        """Return the greedy text after the prompt, and every round."""
        f32 = [a for k in ("-ctk", "-ctv", "-ctkd", "-ctvd") for a in (k, "f32")]
        for _ in range(10):
            log = self.run(
                "llama-speculative-simple",
                "-m",
                target,
                "-md",
                draft,
                "--spec-type",
                kind,
                "--spec-draft-n-max",
                n_max,
                "-n",
                NEW,
                "--temp",
                0,
                "-lv",
                10,
                "-c",
                CTX,
                "-fa",
                "off",
                "-t",
                1,
                "-td",
                1,
                "-f",
                prompt,
                "--ignore-eos",
                *f32,
            )
            # Its logger loses its last 511 lines if they are all still to be written at the end.
            if b"n_drafted " in log:
                return parse(log, ids)
        raise SystemExit("llama-speculative-simple: the end of its log is lost, ten times over")


def parse(log: bytes, ids: list[int]) -> tuple[list[int], list[Round]]:
    """Return the rounds in a debug log. The first anchor is the last token of the prompt."""
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
