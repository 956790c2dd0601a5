"""Rank the best token by the upper two bits of a Q6_K output table (`cuda.step.screen`).

    python benchmarks/upper_bits.py

For each row from which a draft of the bundled family reads a token, on the CPU: the rank of the
best token when all are ordered by these bits alone; then the same for accepted tokens only.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.gguf import GGUF
from g4spec.models.dflash_drafter import Drafter
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine, Options
from tests.support.upper_bits import tables

FAMILY = Path(__file__).parent.parent / "examples" / "tiny"
PROMPTS = (
    "The ",
    "Once upon a time",
    "def main():",
    "In the year",
    "She said that",
    "A list of",
    "What is",
    "import numpy",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target.gguf"
        convert.convert(FAMILY / "target", target, type="q6_k")
        file, name = GGUF(target), "token_embd.weight"
        exact, coarse = tables(np.array(file.raw(name)).reshape(file.tensors[name].shape[0], -1))
        print(f"error {float((coarse - exact).std() / exact.std()):.3f} of the weights")
        for name in ("dflash", "dflash-speculators"):
            draft = Path(folder) / f"{name}.gguf"
            convert.convert(FAMILY / name, draft, target=FAMILY / "target", type="q8_0")
            every, accepted = rows(Engine.load(target, draft, n_ctx=1024, device="cpu"))
            for label, x in (("all", every), ("accepted", accepted)):
                best, found = (x @ exact.t()).argmax(1, keepdim=True), x @ coarse.t()
                place = (found > found.gather(1, best)).sum(1)
                shares = [f"{n}: {float((place < n).double().mean()):.4f}" for n in (1, 4, 16, 64)]
                print(name, label, len(x), "within", *shares, "last", int(place.max()) + 1)


def rows(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [T, H] from which proposals were read, and those whose proposal was
    accepted."""
    every, accepted = list[torch.Tensor](), list[torch.Tensor]()
    draft_rows = Drafter.draft_rows

    def noted(self: Drafter, rows: torch.Tensor, count: int) -> torch.Tensor:
        found = draft_rows(self, rows, count)
        every.append(found.flatten(0, 1).clone())
        return found

    with mock.patch.object(Drafter, "draft_rows", noted):
        for prompt in PROMPTS:
            ids = engine.tokenizer.encode(prompt)
            for cycle in engine.generate(ids, Options(64, Sampler(), 15, ignore_eos=True)):
                if cycle.drafted:
                    accepted.append(every[-1][: cycle.accepted])
    return torch.cat(every), torch.cat(accepted)


if __name__ == "__main__":
    main()
