"""The bundled trained family: a draft is as good three windows into a text as at its start.

The same held-out lines follow a short and a long unrelated text; the number of proposed tokens that
agree with the lines is compared. Only this test finds rings that wrap wrongly, or positions that
drift, with real acceptance.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any

import pytest

from g4spec import convert
from g4spec.core import StepRows
from g4spec.runtime.batches import merge_steps
from g4spec.runtime.engine import Engine
from tests.support.one_sequence import single_sequence_with_draft
from tests.support.selection import sample

TINY = Path(__file__).parents[2] / "examples" / "tiny"
DRAFTS = ["dflash", "dflash-speculators", "assistant"]
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not all((TINY / d / "config.json").exists() for d in ["target", *DRAFTS]),
        reason="the trained family is not in this checkout",
    ),
]
NEAR, FAR, LINES, COUNT = 32, 3 * 256, 128, 5
STEP = 4  # rows between two proposals


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return long enough Python files that were not in the training data, in the archive's
    order."""
    out = []
    with tarfile.open(TINY / "corpus.tar.xz") as tar:
        for member in tar:
            held = int(hashlib.sha256(member.name.encode()).hexdigest(), 16) % 20 == 7
            if held and member.name.endswith(".py") and member.size > 12_000:
                file: Any = tar.extractfile(member)
                out.append(file.read().decode("utf-8"))
            if len(out) == COUNT + 1:
                return out
    raise AssertionError("too few held-out files")


def load(where: Path, name: str) -> Engine:
    convert.convert(TINY / "target", where / "target.gguf", type="f32")
    convert.convert(TINY / name, where / "draft.gguf", target=TINY / "target", type="f32")
    return Engine.load(where / "target.gguf", where / "draft.gguf", n_ctx=FAR + LINES + 32)


def agreement(engine: Engine, before: list[int], lines: list[int]) -> float:
    """Return the mean number of proposed tokens that agree with `lines`, over anchors in them."""
    ids = [2, *before, *lines]
    start = 1 + len(before) + 24  # the first lines identify the text
    with single_sequence_with_draft(engine) as (target, draft):
        # The target's rings are long enough to hold the lines and the windows before them.
        read = merge_steps(list(target.prefill(ids)))
        for at in range(0, start, 256):
            draft.commit(part(read, at, min(start, at + 256)))
        right = cycles = 0
        most = 7 if draft.name == "dflash" else 3  # the assistant computes them one by one
        for at in range(start, len(ids) - 8, STEP):
            drafted = draft.propose(ids[at], at, most)
            true = ids[at + 1 : at + 1 + len(drafted)]
            right += next((i for i, t in enumerate(true) if drafted[i] != t), len(true))
            cycles += 1
            draft.commit(part(read, at, at + STEP))
    return right / cycles


def part(rows: StepRows, first: int, last: int) -> StepRows:
    """Return rows first .. last - 1 of one sequence."""
    return rows.rows(first, last, (last - first,))


@pytest.mark.parametrize("name", sample(DRAFTS, 1))
def test_three_windows_out(tmp_path: Path, texts: list[str], name: str) -> None:
    engine = load(tmp_path, name)
    near = far = 0.0
    other = engine.tokenizer.encode(texts[-1], bos=False)
    for text in texts[:COUNT]:
        ids = engine.tokenizer.encode(text, bos=False)
        lines = ids[600 : 600 + LINES]
        near += agreement(engine, other[:NEAR], lines)
        far += agreement(engine, other[:FAR], lines)
    assert near / COUNT > 0.5, "acceptance is too low for this comparison"
    assert abs(far - near) < 0.1 * near, (near / COUNT, far / COUNT)


def other_layers(engine: Engine) -> None:
    """Read the features of the layers below."""
    engine.target.taps = tuple(i - 1 for i in engine.target.taps)


def drift(engine: Engine) -> None:
    """Shift keys and values by three rows."""
    draft: Any = engine.draft
    for kv in draft.caches or engine.target.caches:

        def rolled(*args: Any, blocks: Any = kv.blocks) -> Any:
            positions, *rows = blocks(*args)
            return (positions, *(x.roll(3, 2) for x in rows))

        kv.blocks = rolled


@pytest.mark.parametrize("name,bug", [("dflash", other_layers), ("dflash", drift)])
def test_the_measure_detects_planted_bugs(
    tmp_path: Path, texts: list[str], name: str, bug: Any
) -> None:
    engine = load(tmp_path, name)
    ids = engine.tokenizer.encode(texts[0], bos=False)
    whole = agreement(engine, ids[:NEAR], ids[600 : 600 + LINES])
    bug(engine)
    assert agreement(engine, ids[:NEAR], ids[600 : 600 + LINES]) < 0.9 * whole
