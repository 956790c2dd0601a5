"""Bias, penalties, masks and log-probabilities; the rows of a step are chosen as in single
steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec.cli._logit_options import logit_bias
from g4spec.errors import InputError, Unsupported, UsageError
from g4spec.ops.logits import History, choose_rows, edit_logits, logprobs, sampled_logprobs
from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.runtime.cuda.step.sampler import CudaSampler

V = 37  # odd: rows of a step start at addresses of every alignment
PROMPT = [3, 3, 5, 8]
OUTPUT = [5, 9, 9, 9, 11]
CPU = torch.device("cpu")


def rows(seed: int, count: int = 1, n_vocab: int = V) -> torch.Tensor:
    return torch.randn(count, n_vocab, generator=torch.Generator().manual_seed(seed)) * 4


def history(output: Sequence[int] = OUTPUT, n_vocab: int = V) -> History:
    made = History(PROMPT, n_vocab)
    made.extend(output)
    return made


# --- edited


@pytest.mark.parametrize("penalty", [1.3, 0.6, 100.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = rows(1)[0]
    want = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([PROMPT + OUTPUT]), logits[None].clone()
    )[0]
    got = edit_logits(logits, Sampler(repetition_penalty=penalty), history())
    assert torch.equal(got, want)
    assert not torch.equal(got, logits)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(V)
    frequency = edit_logits(logits, Sampler(frequency_penalty=0.5), history())
    assert {i: v for i, v in enumerate(frequency.tolist()) if v} == {5: -0.5, 9: -1.5, 11: -0.5}
    presence = edit_logits(logits, Sampler(presence_penalty=-1.5), history())
    assert {i: v for i, v in enumerate(presence.tolist()) if v} == {5: 1.5, 9: 1.5, 11: 1.5}


def test_bias_comes_before_penalties_and_the_input_stays() -> None:
    logits = torch.full((V,), 2.0)
    sampler = Sampler(
        logit_bias=((9, 6.0), (8, -4.0), (3, -100.0), (0, -math.inf)),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    got = edit_logits(logits, sampler, history()).tolist()
    assert got[9] == (2 + 6) / 2 - 3 * 0.5 - 0.25
    assert got[8] == (2 - 4) * 2  # prompt: repetition only
    assert got[3] == (2 - 100) * 2
    assert got[5] == 2 / 2 - 0.5 - 0.25
    assert got[0] == -math.inf
    assert got[1] == 2
    assert logits.tolist() == [2.0] * V


def test_bias_of_an_unknown_token_is_refused() -> None:
    with pytest.raises(UsageError, match=f"`logit_bias`: expected token ids 0 to 36, found {V}"):
        edit_logits(rows(0)[0], Sampler(logit_bias=((V, 1.0),)))


def test_bfloat16_logits_are_edited_in_float32() -> None:
    logits = rows(2)[0].bfloat16()
    sampler = Sampler(presence_penalty=0.001)
    assert torch.equal(
        edit_logits(logits, sampler, history()), edit_logits(logits.float(), sampler, history())
    )


def test_truncate_undoes_extend() -> None:
    made = history()
    made.extend([9, 5, 20])
    assert made.counts[[5, 9, 20]].tolist() == [2, 4, 1]
    made.truncate(len(OUTPUT))
    assert made.output == OUTPUT
    assert torch.equal(made.counts, history().counts)
    assert made.prompted.nonzero().flatten().tolist() == sorted(set(PROMPT))


# --- choose_rows

samplers = st.builds(
    Sampler,
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    suppress=st.sampled_from([(), (4, 9)]),
    logit_bias=st.sampled_from([(), ((7, 3.5), (2, -math.inf), (11, -100.0))]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.9]),
    frequency_penalty=st.sampled_from([0.0, 1.1, -0.7]),
    top_n_sigma=st.sampled_from([0.0, 1.2]),
)


def parity(tokens: Sequence[int]) -> torch.Tensor | None:
    """Return a mask with a state: the excluded third of the tokens depends on all tokens before."""
    state = sum((i + 1) * t for i, t in enumerate(tokens)) % 4
    return None if state == 3 else torch.arange(V) % 3 != state


def one_by_one(
    logits: torch.Tensor, position: int, sampler: Sampler, output: list[int], masked: bool
) -> list[int]:
    """Choose a token for every row, each in a separate step that knows only the tokens before."""
    chosen: list[int] = []
    for row in logits:
        alone = edit_logits(row.clone(), sampler, history([*output, *chosen]))
        allowed = parity([*output, *chosen]) if masked else None
        if allowed is not None:
            alone[~allowed] = -math.inf
        chosen.append(sampler.without_edits().choose(alone, position + len(chosen)))
    return chosen


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    samplers,
    st.integers(0, 2**32),
    st.lists(st.integers(0, V - 1), max_size=12),
    st.integers(1, 16),
    st.integers(0, 15),
    st.booleans(),
)
def test_a_step_chooses_as_single_steps_do(
    sampler: Sampler, seed: int, output: list[int], count: int, right: int, masked: bool
) -> None:
    logits, position = rows(seed, count), 1000 + len(output)
    want = one_by_one(logits, position, sampler, output, masked)
    drafted = want[: count - 1]
    if right < len(drafted):  # the first `right` tokens of the draft are accepted
        drafted[right] = (drafted[right] + 1) % V
        drafted[right + 1 :] = [0] * len(drafted[right + 1 :])
    kept, before = history(output), logits.clone()
    got = choose_rows(logits, drafted, position, sampler, kept, parity if masked else None)
    assert got == want[: right + 1]
    assert torch.equal(logits, before)
    assert kept.output == output
    assert torch.equal(kept.counts, history(output).counts)
    # T steps of one row, which is how decoding without a draft calls it.
    for i, token in enumerate(got):
        mask = parity if masked else None
        assert choose_rows(logits[i : i + 1].clone(), [], position + i, sampler, kept, mask) == [
            token
        ]
        kept.extend([token])


def test_penalties_see_drafted_tokens() -> None:
    logits = torch.zeros(3, V)
    logits[:, 7], logits[:, 6] = 3.0, 2.5
    sampler = Sampler(presence_penalty=1.0)
    assert choose_rows(logits, [7, 6], 0, sampler, history()) == [7, 6, 7]
    assert choose_rows(logits, [7, 7], 0, sampler, history()) == [7, 6]


def test_plain_samplers_choose_as_the_loop_accepts() -> None:
    for seed, sampler in enumerate((Sampler(), Sampler(1.0, seed=3), Sampler(2.0, top_k=4))):
        logits = rows(seed, 6)
        drafted = [sampler.choose(row, 11 + i) for i, row in enumerate(logits[:3])] + [0, 0]
        want = accept(logits, drafted, 11, sampler)
        assert choose_rows(logits, drafted, 11, sampler) == want
        assert choose_rows(logits, drafted, 11, sampler, history(), lambda _: None) == want


def test_the_given_chooser_gets_edited_rows() -> None:
    seen: list[tuple[torch.Tensor, int]] = []

    class Recorder:
        def choose(self, logits: torch.Tensor, position: int) -> int:
            seen.append((logits, position))
            return int(logits.argmax())

        def choose_rows(self, logits: torch.Tensor, position: int) -> list[int]:
            raise AssertionError("not for edited rows")

    sampler, logits = Sampler(frequency_penalty=2.0), rows(5)
    choose_rows(logits, [], 40, sampler, history(), chooser=Recorder())  # type: ignore[arg-type]
    assert torch.equal(seen[0][0], edit_logits(logits[0], sampler, history()))
    assert seen[0][1] == 40


def test_masks_see_accepted_tokens_only() -> None:
    asked: list[list[int]] = []

    def mask(tokens: Sequence[int]) -> torch.Tensor:
        asked.append(list(tokens))
        return torch.arange(V) == 20 + len(tokens)

    assert choose_rows(rows(3, 5), [20, 21, 30, 31], 0, Sampler(), History([], V), mask) == [
        20,
        21,
        22,
    ]
    assert asked == [[], [20], [20, 21]]


def test_a_mask_is_applied_before_filters() -> None:
    logits = torch.arange(V, dtype=torch.float32)[None]
    low = torch.arange(V) < 10
    for position in range(20):
        sampler = Sampler(5.0, top_k=1, seed=position)
        assert choose_rows(logits, [], position, sampler, history(), lambda _: low) == [9]


@pytest.mark.parametrize(
    "allowed,found",
    [([], "none"), ([4], "only suppressed or banned ones"), ([2, 4], "only suppressed or")],
)
def test_a_mask_without_a_token_is_an_error(allowed: list[int], found: str) -> None:
    def grammar(tokens: Sequence[int]) -> torch.Tensor:
        return torch.isin(torch.arange(V), torch.tensor(allowed, dtype=torch.int64))

    kept = history()
    sampler = Sampler(suppress=(4,), logit_bias=((2, -math.inf), (3, 1.0)))
    with pytest.raises(InputError, match=f"mask grammar after 5 output tokens.*found {found}"):
        choose_rows(rows(0, 2), [1], 0, sampler, kept, grammar)
    assert kept.output == OUTPUT


def test_an_error_in_a_later_row_leaves_the_history() -> None:
    logits = torch.zeros(2, V)
    logits[0, 6], logits[1, 0] = 5.0, math.nan
    kept = history()
    # It ends what is chosen, as the end of a proposal does. After a wrong draft it is not read.
    for drafted in (6, 7):
        assert choose_rows(logits, [drafted], 0, Sampler(presence_penalty=1.0), kept) == [6]
        assert kept.output == OUTPUT
        assert torch.equal(kept.counts, history().counts)
    with pytest.raises(NotFinite):
        choose_rows(logits[1:], [], 1, Sampler(presence_penalty=1.0), kept)


# --- logprobs


def test_logprobs_are_the_log_softmax_of_the_row() -> None:
    logits = rows(7, 5, 4001)
    for row in logits:
        want = row.clone().log_softmax(0)
        token, best = logprobs(row, 17, 4001)
        assert token == float(want[17])
        assert dict(best) == dict(enumerate(want.tolist()))
        assert [v for _, v in best] == sorted(want.tolist(), reverse=True)
        assert math.fsum(math.exp(v) for _, v in best) == pytest.approx(1, abs=1e-5)
        alone = logprobs(row.clone(), 17, 5)
        assert alone == (token, best[:5])


def test_equal_logits_are_listed_by_lowest_id() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 3.0])
    assert [i for i, _ in logprobs(logits, 0, 4)[1]] == [1, 3, 5, 2]
    assert [i for i, _ in logprobs(logits, 0, 2)[1]] == [1, 3]
    assert [i for i, _ in logprobs(logits, 0, 9)[1]] == [1, 3, 5, 2, 4, 0]
    assert logprobs(logits, 0, 0)[1] == []


def test_sampled_logprobs_describe_the_sampled_distribution() -> None:
    """Frequencies of sampled tokens agree with the probabilities; excluded tokens have none."""
    row = torch.tensor([1.0, 2.0, 0.5, 2.5, -1.0, 3.0])
    sampler = Sampler(temperature=0.7, top_k=3, logit_bias=((5, -math.inf), (0, 1.2)))
    history = History([1], 6)
    allowed = torch.tensor([True, True, True, True, True, False])
    counts = [0] * 6
    for position in range(4000):
        (token,) = choose_rows(row[None], [], position, sampler, history, lambda _: allowed)
        counts[token] += 1
    value, top = sampled_logprobs(row, 3, 6, sampler, history, lambda _: allowed)
    assert [i for i, _ in top] == [3, 0, 1] and value == top[0][1]
    assert sum(math.exp(logprob) for _, logprob in top) == pytest.approx(1)
    for i, logprob in top:
        assert counts[i] / 4000 == pytest.approx(math.exp(logprob), abs=0.03)
    greedy = Sampler(suppress=(5,), repetition_penalty=2.0)
    assert sampled_logprobs(row, 3, 6, greedy, History([5], 6)) == (0.0, [(3, 0.0)])


def test_logprobs_of_broken_logits_are_refused() -> None:
    with pytest.raises(NotFinite):
        logprobs(torch.tensor([0.0, math.nan]), 0, 1)


# --- options

PENALTIES = [
    {"logit_bias": ((1, 2.0),)},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
]


@pytest.mark.parametrize("kw", PENALTIES)
def test_raw_logits_are_never_sampled_without_their_edits(kw: dict[str, float]) -> None:
    sampler = Sampler(**kw)  # type: ignore[arg-type]
    assert not sampler.plain
    assert sampler.uses_history == ("logit_bias" not in kw)
    name = next(iter(kw))
    with pytest.raises(Unsupported, match=f"^`{name}`: "):
        sampler.choose(rows(0)[0], 0)
    with pytest.raises(Unsupported, match=f"^`{name}`: "):
        next(sampler.choose_rows(rows(0), 0))
    with pytest.raises(Unsupported, match=f"^`{name}`: "):
        CudaSampler(sampler, CPU)
    assert sampler.without_edits() == Sampler()
    assert hash(sampler) == hash(replace(sampler))


@pytest.mark.parametrize(
    "text,want",
    [
        ("15043+1", 1.0),
        ("15043-1.5", -1.5),
        ("15043=2", 2.0),
        ("15043=-3e1", -30.0),
        ("15043-inf", -math.inf),
        ("15043=-inf", -math.inf),
    ],
)
def test_logit_bias_is_parsed(text: str, want: float) -> None:
    assert logit_bias([text, "1+0"]) == ((15043, want), (1, 0.0))
    assert logit_bias(None) == ()


@pytest.mark.parametrize("text", ["", "5", "+1", "5+", "5+-1", "-5+1", "a=1", "5=nan", "5=1.2.3"])
def test_a_malformed_logit_bias_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--logit-bias: expected ID"):
        logit_bias([text])


def accept(logits: torch.Tensor, drafted: list[int], position: int, sampler: Sampler) -> list[int]:
    """Choose tokens row by row, up to the first that differs from the draft."""
    chosen: list[int] = []
    for i, row in enumerate(logits):
        chosen.append(sampler.choose(row, position + i))
        if i == len(drafted) or chosen[-1] != drafted[i]:
            break
    return chosen


def test_a_bias_given_as_a_mapping_is_refused() -> None:
    bias: Any = {5: 1.0}
    with pytest.raises(UsageError, match=r"pairs.*Pass tuple\(logit_bias.items\(\)\)"):
        Sampler(logit_bias=bias)
