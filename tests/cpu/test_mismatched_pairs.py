"""Drafts with another target than their own: refused if the files show it, and reported if only the
acceptance does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from g4spec.cli import run
from g4spec.cli._notes import low_acceptance_note
from g4spec.convert import convert
from g4spec.errors import InputError
from g4spec.gguf import ValueType
from g4spec.runtime.engine import Engine
from g4spec.validate import validate
from tests.cpu.gguf_fixtures import File
from tests.support import faults

TINY = Path(__file__).parents[2] / "examples" / "tiny"


def other_token(file: File) -> None:
    file.kv["tokenizer.ggml.tokens"].data[300] = "another"


def other_depth(file: File) -> None:
    file.set("g4spec.target.block_count", ValueType.U32, 60)


def other_width(file: File) -> None:
    file.set("g4spec.target.embedding_length", ValueType.U32, 5376)


@pytest.mark.parametrize(
    ("change", "message", "rule"),
    [
        (other_token, "tokens differ from the target's", "G4-PAIR-003"),
        (other_depth, "another number of layers", "G4-PAIR-006"),
        (other_width, "another hidden size", "G4-PAIR-013"),
    ],
)
def test_pairs_that_validate_rejects_are_refused_at_load(
    tmp_path: Path, change: Callable[[File], None], message: str, rule: str
) -> None:
    target = tmp_path / "target.gguf"
    convert(TINY / "target", target)
    convert(TINY / "dflash", tmp_path / "good.gguf", target=target)
    file = faults.read(tmp_path / "good.gguf")
    change(file)
    draft = file.write(tmp_path / "bad.gguf")
    assert rule in {f.rule.id for f in validate(draft, target).failures}
    with pytest.raises(InputError, match=message):
        Engine.load(target, draft, n_ctx=64)


def test_a_draft_for_another_target_is_reported_by_its_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target.gguf"
    convert(TINY / "target", target)
    words = [
        "generate",
        "-m",
        str(target),
        "-p",
        "def f(x):",
        "-n",
        "24",
        "--draft-max",
        "3",
        "--ignore-eos",
        "-c",
        "128",
    ]
    for name, strange in (("dflash-other", True), ("dflash", False)):
        draft = tmp_path / f"{name}.gguf"
        convert(TINY / name, draft, target=target)
        assert run([*words, "-md", str(draft)]) == 0
        assert ("not trained for this target" in capsys.readouterr().err) == strange


@pytest.mark.parametrize(
    ("drafted", "accepted", "strange"),
    [(0, 0, False), (15, 0, False), (16, 0, True), (100, 3, True), (100, 4, False)],
)
def test_few_proposals_give_no_warning(drafted: int, accepted: int, strange: bool) -> None:
    assert (low_acceptance_note(drafted, accepted) is not None) == strange


@pytest.mark.parametrize(
    ("drafted", "accepted", "says"),
    [
        (5, 0, None),
        (6, 0, "0 of 6 first tokens, too few to be sure"),
        (15, 0, "--draft-max 3"),
        (15, 1, None),
        (16, 0, "probably not trained"),
    ],
)
def test_few_proposals_of_auto_raise_a_suspicion(
    drafted: int, accepted: int, says: str | None
) -> None:
    """`auto` stops drafting when nothing is accepted, so that a text of usual length has too few
    proposals for a statement."""
    note = low_acceptance_note(drafted, accepted, auto=True)
    assert note is None if says is None else says in str(note)
