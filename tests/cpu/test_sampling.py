"""Sampling: noise is keyed by (seed, position, token); filters and distributions are right."""

from __future__ import annotations

import inspect
import math
import random
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from g4spec.cli import _llama_flags, _sampling_defaults, bench, chat, generate, serve
from g4spec.cli._notes import greedy_note
from g4spec.errors import UsageError
from g4spec.measure import verify
from g4spec.ops.sampling import EDITS, NotFinite, Sampler, gumbel, philox
from g4spec.ranges import RANGES
from g4spec.runtime.cuda.step import choose
from g4spec.server import llamacpp, request_errors
from g4spec.server.fields import Sampling
from tests.fuzz import requests
from tests.gpu import test_choose
from tests.support import batch_invariance


@pytest.mark.parametrize(
    "counter,key,want",
    [  # known answers of the Random123 library
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    words = [[int(w, 16) for w in text.split()] for text in (counter, key, want)]
    got = philox(np.array([words[0]], dtype=np.uint64), (words[1][0], words[1][1]))
    assert got[0].tolist() == words[2]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float) -> None:
    logits = torch.tensor([5.0, 30.0, 29.0, -1.0])
    for more in ({}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.01}):
        sampler = Sampler(temperature, **more)  # type: ignore[arg-type]
        assert [sampler.choose(logits, at) for at in range(20)] == [1] * 20
        assert sampler.sampled_logits(logits).softmax(0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e39, 1e300])
def test_a_huge_temperature_chooses_no_suppressed_token(temperature: float) -> None:
    sampler = Sampler(temperature, suppress=(1,))
    logits = torch.tensor([5.0, 30.0, 29.0, -1.0])
    assert {sampler.choose(logits, at) for at in range(100)} == {0, 2, 3}


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**80])
def test_kernels_hold_the_largest_parameters(top_k: int) -> None:
    sampler = Sampler(1e300, top_k, 1.0, 1.0, 2**64 - 1, top_n_sigma=1e300)
    form = "<" + "".join(choose.NUMBERS.values())
    struct.pack(form, *(getattr(sampler, name) for name in choose.NUMBERS))
    assert sampler.top_k == (top_k if top_k < 2**31 else 0) and sampler.top_n_sigma == 0


def test_suppressed_tokens_have_no_probability() -> None:
    logits = torch.tensor([5.0, 30.0, 29.0, -1.0])
    for temperature in (0.0, 0.5):
        shares = Sampler(temperature, suppress=(1,)).sampled_logits(logits).softmax(0)
        assert shares[1] == 0 and int(shares.argmax()) == 2


def test_noise_depends_on_seed_position_and_token_only() -> None:
    assert torch.equal(gumbel(1, 5, 100), gumbel(1, 5, 1000)[:100])
    assert not torch.equal(gumbel(1, 5, 100), gumbel(2, 5, 100))
    assert not torch.equal(gumbel(1, 5, 100), gumbel(1, 6, 100))
    assert torch.equal(gumbel(7, 2**40, 64), gumbel(7, 2**40, 64))
    assert not torch.equal(gumbel(7, 2**40, 64), gumbel(7, 0, 64))
    seeds = (7, 7 + 2**32, 7 + 2**33, 7 + 2**63)
    noise = {tuple(gumbel(seed, 5, 8).tolist()) for seed in seeds}
    assert len(noise) == len(seeds), "all 64 bits of a seed matter"


def test_noise_is_that_of_gumbel_and_each_token_has_its_own() -> None:
    noise = gumbel(3, 9, 200_000)
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    assert len(noise.unique()) > 197_000  # of 2^24 values, 1,200 are expected to be repeated


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])
    sampler, n = Sampler(temperature=0.8, seed=11), 4000
    counts = np.bincount([sampler.choose(logits, p) for p in range(n)], minlength=5) / n
    want = (logits / 0.8).softmax(0).numpy()
    assert np.abs(counts - want).max() < 4 * math.sqrt(0.25 / n)


@pytest.mark.parametrize(
    "kw,allowed",
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),  # softmax: .64 .24 .09 .03
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.2}, {0, 1}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1}),
        ({"top_n_sigma": 1.0}, {0, 1}),  # standard deviation: 1.118
        ({"top_n_sigma": 2.7}, {0, 1, 2, 3}),
        ({"top_n_sigma": 1.0, "top_k": 3}, {0, 1}),  # 0.816 among the first three
        ({"top_n_sigma": 1e-9}, {0}),
    ],
)
def test_filters_keep_the_right_tokens(kw: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = Sampler(temperature=3.0, seed=1, **kw)  # type: ignore[arg-type]
    assert {sampler.choose(logits, p) for p in range(200)} == allowed


@pytest.mark.parametrize("n", [0.3, 1.0, 1.5, 2.0, 5.0])
def test_top_n_sigma_is_that_of_llama_cpp(n: float) -> None:
    """Compute it as llama-sampler.cpp does: value by value, without those at -inf."""
    generator = torch.Generator().manual_seed(int(10 * n))
    for scale in (0.5, 4.0, 30.0):
        row = (torch.randn(3000, generator=generator) * scale).tolist()
        row[::7] = [-math.inf] * len(row[::7])
        there = [x for x in row if x != -math.inf]
        mean = sum(there) / len(there)
        least = max(there) - n * math.sqrt(sum((x - mean) ** 2 for x in there) / len(there))
        kept = Sampler(1.0, top_n_sigma=n).sampled_logits(torch.tensor(row)).tolist()
        assert kept == [x if x >= least else -math.inf for x in row]
        assert all(abs(x - least) > 1e-4 for x in there), "no value at the edge"


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    assert Sampler().choose(torch.tensor([0.0, 3.0, 3.0, 1.0]), 0) == 1


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_logits_without_a_largest_one_are_refused(bad: list[float]) -> None:
    for sampler in (Sampler(), Sampler(temperature=1.0, top_k=1)):
        with pytest.raises(NotFinite, match="not finite"):
            sampler.choose(torch.tensor(bad), 0)


@pytest.mark.parametrize(
    "kw",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_n_sigma": -1.0},
        {"top_n_sigma": math.inf},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"top_k": 2.5},
        {"top_k": True},
        {"temperature": "1"},
        {"temperature": None},
        {"top_k": None},
        {"top_p": None},
        {"seed": None},
        {"repetition_penalty": None},
    ],
)
def test_settings_out_of_range_are_usage_errors(kw: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"^`\w+`: expected"):
        Sampler(**kw)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message,kw",
    [
        ("`repetition_penalty`: expected", {"repetition_penalty": 0.0}),
        ("`repetition_penalty`: expected", {"repetition_penalty": math.inf}),
        ("`presence_penalty`: expected", {"presence_penalty": 2.1}),
        ("`presence_penalty`: expected", {"presence_penalty": math.nan}),
        ("`frequency_penalty`: expected", {"frequency_penalty": -2.1}),
        ("`logit_bias`: expected a tuple of pairs", {"logit_bias": (1, 2)}),
        ("`logit_bias`: expected a tuple of pairs", {"logit_bias": ((1, 2.0, 3),)}),
        ("`logit_bias`: expected a tuple of pairs", {"logit_bias": None}),
        ("`logit_bias`: expected a token id", {"logit_bias": ((-1, 0.0),)}),
        ("`logit_bias`: expected a token id", {"logit_bias": ((1.5, 0.0),)}),
        ("`logit_bias` of token 7", {"logit_bias": ((7, "1"),)}),
        ("`logit_bias`: expected each token id once", {"logit_bias": ((1, 0.0), (1, 2.0))}),
        ("`logit_bias` of token 7", {"logit_bias": ((7, 100.5),)}),
        ("`logit_bias` of token 7", {"logit_bias": ((7, -100.5),)}),
        ("`logit_bias` of token 7", {"logit_bias": ((7, math.inf),)}),
        ("`logit_bias` of token 7", {"logit_bias": ((7, math.nan),)}),
    ],
)
def test_edits_out_of_range_name_their_option(message: str, kw: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=message):
        Sampler(**kw)  # type: ignore[arg-type]


def test_edits_at_their_limits_are_accepted() -> None:
    Sampler(
        logit_bias=((0, -math.inf), (1, -100), (2, 100)),
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
    )


def test_every_field_is_used_everywhere() -> None:
    """A field that a device does not read would be ignored there without an error."""
    names = {f.name for f in fields(Sampler)} - {"suppress"}
    assert names == {*choose.NUMBERS, *EDITS}, "choose.NUMBERS (kernels) or sampling.EDITS (host)"
    assert names - {"logit_bias"} <= RANGES.keys()
    spelt = {"temperature": "temp", "repetition_penalty": "repeat_penalty"}
    options = inspect.signature(generate.command).parameters
    assert {spelt.get(name, name) for name in names} <= set(options), "g4spec generate"
    for command in (bench.measure, chat.command, serve.command):
        options = inspect.signature(command).parameters
        missing = {spelt.get(name, name) for name in choose.NUMBERS} - set(options)
        assert not missing, command.__module__
    asked = {*_sampling_defaults.OPTIONS.values()}
    assert asked == {*choose.NUMBERS} - {"seed"}, "OPTIONS of cli/_sampling_defaults.py"
    own = {f"--{spelt.get(name, name).replace('_', '-')}" for name in names}
    assert not own & _llama_flags.REFUSED.keys(), "_REFUSED of cli/_llama_flags.py"
    assert not names & llamacpp.DISABLED_VALUES.keys(), "DISABLED_VALUES of server/llamacpp.py"
    assert names <= set(Sampling.model_fields), "requests to the server"
    assert names <= request_errors.FIELDS.keys(), "error responses of the server"
    assert names <= requests.FIELDS.keys(), "requests of the fuzzer"
    drawn = [ask.options.sampler for ask in batch_invariance.random_requests(random.Random(0), 300)]
    still = {
        name for name in names if all(getattr(s, name) == getattr(Sampler(), name) for s in drawn)
    }
    assert not still, "tests/support/batch_invariance.py never draws it"


def test_every_filter_is_used_everywhere() -> None:
    filters = choose.NUMBERS.keys() - {"seed", "temperature"}
    logits, hot = torch.randn(99, generator=torch.Generator().manual_seed(0)), Sampler(1.0)
    for ask in batch_invariance.random_requests(random.Random(0), 300):
        drawn = {name: getattr(ask.options.sampler, name) for name in filters}
        sampler = replace(hot, **drawn)
        assert (choose.mode_of(sampler, len(logits)) == "sampled") == (sampler == hot), drawn
        assert (sampler._filtered(logits) is logits) == (sampler == hot), drawn
    assert filters <= {name for setting in verify.SETTINGS for name in setting}, "g4spec verify"
    off = {f"--{name.replace('_', '-')}" for name in filters}
    named = greedy_note(Sampler(top_k=1, top_p=0.5, min_p=0.5, top_n_sigma=0.5)) or ""
    assert off <= {*named.replace(",", "").replace(":", "").split()}, "greedy_note of cli/_notes.py"
    for name in filters:
        others = {getattr(s, name) for s in test_choose.SAMPLERS.values()}
        assert others > {getattr(hot, name)}, f"{name}: tests/gpu/test_choose.py"
