"""Assistants compared with transformers' assisted generation: proposals and logits of every round.

transformers 5.22.2 differs from g4spec, and from llama.cpp, in two ways that each have a test here:

- Its window in the assistant's sliding layers reaches `sliding_window` + 1 rows back from the
  newest row that the target has read. The target's own layers, and g4spec, count the query as one
  of the window's rows, which leaves `sliding_window` - 1. The oracle gets a window two smaller.
- After a partial rejection it leaves rows of rejected tokens in the keys and values that it passes
  to the assistant: one in full layers, all of them in sliding layers. `CleanCaches` removes them.

A random assistant is never right. The spies therefore replace the start of each verified proposal
by 0, 1, 2, ... tokens of the target's text in turn. The assistant's own proposals are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import build, hf
from tests.support import tiny
from tests.support.selection import sample

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WINDOW, VOCAB, NEW = 16, 512, 24
SHAPE: dict[str, Any] = {"layers": 6, "period": 3, "window": WINDOW, "vocab": VOCAB, "dtype": "F32"}


@dataclass
class Round:
    position: int
    drafted: list[int]
    read: list[int]
    logits: torch.Tensor
    clean: bool
    hidden: list[torch.Tensor]
    """`read`: tokens that the target verified. `clean`: True if no row of a rejected token was
    among the keys and values. `hidden`: the input of each proposal beside its token, [1, B]."""


class Spy:
    """A candidate generator that records its proposals."""

    rounds: list[Round]
    hidden: list[torch.Tensor]
    truth: list[int]
    tidy = False
    _drafted = 0

    def get_candidates(
        self,
        input_ids: Any,
        model_kwargs: Any,
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **kw: Any,
    ) -> Any:
        rejected = self._drafted - int(n_last_matches)
        if self.tidy and rejected and not is_first_iteration:
            model_outputs.shared_kv_states = {
                k: tuple(x[:, :, : x.shape[2] - rejected] for x in v)
                for k, v in model_outputs.shared_kv_states.items()
            }
        ids, logits = super().get_candidates(
            input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kw
        )
        n = input_ids.shape[1]
        self._drafted = ids.shape[1] - n
        if self._drafted:
            own = ids[0, n:].tolist()
            right = len(self.rounds) % (len(own) + 1)
            ids[0, n : n + right] = torch.tensor(self.truth[n : n + right])
            self.rounds.append(
                Round(
                    n - 1,
                    own,
                    ids[0, n:].tolist(),
                    logits[0],
                    self.tidy or not rejected,
                    self.hidden[-self._drafted :],
                )
            )
        return ids, logits


class CleanCaches(Spy):
    tidy = True


def oracle(
    folders: tuple[Path, Path], ids: list[int], count: int, spy: type[Spy], shift: int = 2
) -> tuple[list[int], list[Round]]:
    """Return transformers' text and rounds; `shift` is subtracted from the assistant's window."""
    from transformers.generation.candidate_generator import (
        SinglePositionMultiTokenCandidateGenerator as Generator,
    )

    target, assistant = hf.target(folders[0]), hf.assistant(folders[1])
    assistant.generation_config.num_assistant_tokens = count
    assistant.config.get_text_config().sliding_window = WINDOW - shift
    rounds: list[Round] = []
    hidden: list[torch.Tensor] = []
    assistant.register_forward_pre_hook(
        lambda _, args, given: hidden.append(given["inputs_embeds"][0].chunk(2, dim=1)[1]),
        with_kwargs=True,
    )
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        truth = target.generate(torch.tensor([ids]), **settings)[0].tolist()
    here = type(
        "Here", (spy, Generator), {"rounds": rounds, "hidden": hidden, "truth": truth + [0] * 16}
    )
    target._get_candidate_generator = lambda **kw: here(
        assistant_model=assistant,
        target_model_input_embeddings=target.get_input_embeddings(),
        generation_config=kw["generation_config"],
    )
    with torch.no_grad():
        out = target.generate(torch.tensor([ids]), assistant_model=assistant, **settings)
    out = out[0].tolist()
    assert out == truth, "transformers' own text changed with the draft"
    return out[len(ids) :], rounds


def chain(draft: Any, anchor: int, r: Round, chooser: Any) -> list[int]:
    found: list[int] = draft.propose(anchor, r.position, len(r.drafted), chooser)
    return found


def single_proposals(draft: Any, anchor: int, r: Round, chooser: Any) -> list[int]:
    """Compute each token separately from the inputs of transformers' assistant."""
    out: list[int] = []
    for token, hidden in zip([anchor, *r.drafted[:-1]], r.hidden, strict=True):
        draft._last_hidden.copy_(hidden)
        out += draft.propose(token, r.position, 1, chooser)
    return out


def differences(
    rounds: list[Round],
    folders: tuple[Path, Path],
    every: list[int],
    change: Callable[[Any], None] = lambda draft: None,
    propose: Callable[[Any, int, Round, Any], list[int]] = chain,
) -> list[tuple[bool, float]]:
    """Replay the oracle's rounds over its text `every`.

    Returns, for each round, whether the proposals agree, and the largest difference of logits that
    the centroid head did not mask, up to the first token that differs.
    """
    target = build.target(folders[0])
    draft = build.draft(folders[1], target)
    change(draft.draft)
    build.prefill(target, draft, every[: rounds[0].position])
    out = []
    for i, r in enumerate(rounds):
        seen = build.Recorder()
        drafted = propose(draft, every[r.position], r, seen)
        worst = 0.0
        for mine, its, a, b in zip(seen.rows, r.logits, drafted, r.drafted, strict=True):
            worst = max(worst, float((mine - its)[torch.isfinite(mine)].abs().max()))
            if a != b:
                break
        out.append((drafted == r.drafted, worst))
        end = rounds[i + 1].position if i + 1 < len(rounds) else r.position + 1
        # Rejected tokens are read too: their rows must not be seen afterwards.
        step = target.step([every[r.position], *r.read], r.position)
        draft.commit(step.read, end - r.position)
    return out


@pytest.fixture(scope="module", params=["dense", "centroids"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Path]:
    """A target, and an assistant that is sometimes right."""
    where = tmp_path_factory.mktemp("assistant")
    target = tiny.target(where / "target", nested=False, **SHAPE)
    n = 16 if request.param == "centroids" else 0
    return target, tiny.assistant(where / "draft", target, centroids=n, dtype="F32")


@pytest.mark.parametrize("length", sample([WINDOW // 2, 3 * WINDOW + 5], 1))
def test_every_round(folders: tuple[Path, Path], length: int) -> None:
    ids = build.prompt(length, VOCAB, length)
    for count, tolerance in ((1, 1e-4), (4, 1e-4), (15, 1e-3)):  # of a chain see the next test
        text, rounds = oracle(folders, ids, count, CleanCaches)
        found = differences(rounds, folders, ids + text)
        assert len(found) >= 3 and all(same for same, _ in found), (count, found)
        assert max(worst for _, worst in found) < tolerance, (count, found)


@pytest.mark.parametrize("length", [WINDOW // 2, 3 * WINDOW + 5])
def test_every_depth_by_itself(folders: tuple[Path, Path], length: int) -> None:
    ids = build.prompt(length, VOCAB, length)
    text, rounds = oracle(folders, ids, 15, CleanCaches)
    found = differences(rounds, folders, ids + text, propose=single_proposals)
    assert len(found) >= 3 and all(same for same, _ in found), found
    assert max(len(r.drafted) for r in rounds) == 15
    assert max(worst for _, worst in found) < 1e-4, found


def test_long_chains_are_within_float32_error(folders: tuple[Path, Path]) -> None:
    """Rounding errors grow along a chain of 15: transformers itself differs more between float32
    and float64."""
    ids = build.prompt(3 * WINDOW + 5, VOCAB, 3 * WINDOW + 5)
    text, rounds = oracle(folders, ids, 15, CleanCaches)
    with hf.in_double():
        again, exact = oracle(folders, ids, 15, CleanCaches)
    assert text == again and exact[0].logits.dtype is torch.float64
    pairs = [
        (r.logits, e.logits) for r, e in zip(rounds, exact, strict=True) if r.drafted == e.drafted
    ]
    its = max(float((a - b)[torch.isfinite(a)].abs().max()) for a, b in pairs)
    ours = max(worst for _, worst in differences(rounds, folders, ids + text))
    assert 1e-6 < ours < its, (ours, its)


def test_unmodified_transformers_differs_only_after_rejections(
    folders: tuple[Path, Path],
) -> None:
    """Unmodified, and inside the window, it agrees with g4spec whenever nothing was rejected
    before."""
    ids = build.prompt(3, VOCAB, 9)
    text, rounds = oracle(folders, ids, 2, Spy, shift=0)
    found = differences(rounds, folders, ids + text)
    inside = [(r, f) for r, f in zip(rounds, found, strict=True) if r.position < WINDOW - 2]
    clean = [worst for r, (_, worst) in inside if r.clean]
    rest = [worst for r, (_, worst) in inside if not r.clean]
    assert len(clean) >= 2 and max(clean) < 1e-4
    assert rest and min(rest) > 1e-3


def unscaled(draft: Any) -> None:
    embed = draft.target.embed
    draft.target.embed = lambda ids: embed(ids, 1.0)


def swapped(draft: Any) -> None:
    w = draft.w["nextn.pre_projection.weight"]
    draft.w["nextn.pre_projection.weight"] = torch.cat(w.chunk(2, dim=1)[::-1], dim=1)


def first_row(draft: Any) -> None:
    commit = draft.commit
    draft.commit = lambda rows, accepted: commit(rows, accepted * 0)


def no_scalar(draft: Any) -> None:
    for name in draft.w:
        if "layer_output_scale" in name:
            draft.w[name] = torch.ones(1)


def full_rotation(draft: Any) -> None:
    draft._freqs = [draft.ops.rope_freqs(s.rope_base, s.head_dim) for s in draft.config.layers]


@pytest.mark.parametrize("bug", [unscaled, swapped, first_row, no_scalar, full_rotation])
def test_the_oracle_detects_planted_bugs(
    folders: tuple[Path, Path], bug: Callable[[Any], None]
) -> None:
    ids = build.prompt(WINDOW, VOCAB, 4)
    text, rounds = oracle(folders, ids, 2, CleanCaches)
    found = differences(rounds[:3], folders, ids + text, bug)
    assert max(worst for _, worst in found) > 1e-2
