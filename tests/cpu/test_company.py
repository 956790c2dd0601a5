"""Answers in company equal the same alone: text, logits, log-probabilities and proposals, bit for
bit, whatever arrives, ends, is cancelled, preempted or begins with a prefix hit."""

from __future__ import annotations

import random

import pytest

from g4spec.runtime.request import Options
from tests import company, memory_engine
from tests.company import Alone, Ask
from tests.memory_engine import DRAFTS


def asks(prompts: list[list[int]], **options: object) -> list[Ask]:
    """Requests that are made at once."""
    made = Options(**{"ignore_eos": True, "draft_max": 5, **options})  # type: ignore[arg-type]
    return [Ask(prompt, made, 0, None) for prompt in prompts]


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "eagle3-two-layers", "p-eagle"])
def test_texts_that_share_pages_draft_as_alone(kind: str) -> None:
    """What a draft writes for one text must not be seen by another that begins alike."""
    rng = random.Random(3)
    shared = [2, *company.tokens(rng, 511)]
    engine = memory_engine.engine(DRAFTS[kind], n_ctx=768, parallel=2, pool=2000,
                                  prefix_bytes=company.PREFIX_BYTES)  # fmt: skip
    list(engine.generate([*shared, 5], Options(1)))
    todo, alone = asks([[*shared, 33, 44], [*shared, 77, 12, 9]], n_predict=20), Alone(kind)
    crowd = company.together(engine, todo)
    assert [r.stats.cached_tokens for r in crowd.requests] == [512, 512]
    for ask, (got,) in zip(todo, crowd.answers, strict=True):
        want = alone(ask)
        assert not company.difference(got, want)
        assert not company.proposals_differ(got, want)
