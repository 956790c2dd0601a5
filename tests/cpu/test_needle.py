"""The trained target retrieves a fact from the start of 3,359 tokens, with every draft.

The fact is far outside every sliding window (128), so that only the global layers can retrieve it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from g4spec.convert import convert
from g4spec.runtime.engine import Engine, Options
from tests.support.selection import sample

FAMILY = Path(__file__).parents[2] / "examples" / "tiny"
DRAFTS = ("dflash", "dflash-speculators", "assistant", "dflash-other")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("family")
    convert(FAMILY / "target", made / "target.gguf")
    for name in DRAFTS:
        convert(FAMILY / name, made / f"{name}.gguf", target=made / "target.gguf")
    return made


@pytest.mark.parametrize("draft", sample([*DRAFTS, None, "ngram"], 1))
def test_the_fact_is_retrieved(folder: Path, draft: str | None) -> None:
    path = folder / f"{draft}.gguf" if draft in DRAFTS else draft
    engine = Engine.load(folder / "target.gguf", path, n_ctx=3584)
    prompt = engine.tokenizer.encode((FAMILY / "needle.txt").read_text())
    assert len(prompt) == 3359
    run = engine.generate(prompt, Options(n_predict=8, draft_max=4))
    for _ in run:
        pass
    assert run.text.startswith(" 48213."), run.text


def test_without_the_fact_the_answer_differs(folder: Path) -> None:
    """Shows that the test above can fail: the answer is nowhere else in the prompt."""
    engine = Engine.load(folder / "target.gguf", n_ctx=3584)
    text = (FAMILY / "needle.txt").read_text()
    assert text.count("48213") == 1
    run = engine.generate(engine.tokenizer.encode(text.replace("48213", "90756")), Options(8))
    for _ in run:
        pass
    assert run.text.startswith(" 90756."), run.text
