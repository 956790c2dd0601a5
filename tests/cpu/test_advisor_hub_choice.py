"""The GGUF file that a run takes from a hub repository with several types."""

from __future__ import annotations

import pytest

from g4spec.advisor import cards, hub_choice, lookup
from g4spec.advisor.facts import facts
from g4spec.advisor.machine import Machine
from g4spec.errors import EnvironmentProblem

REPOSITORY = "org/gemma-4-31B-it-GGUF"
GB = 10**9
SIZES = {
    "gemma-4-31B-it-BF16-00001-of-00002.gguf": 61 * GB,
    "gemma-4-31B-it-Q8_0.gguf": 33 * GB,
    "UD/gemma-4-31B-it-UD-Q6_K_XL.gguf": 26 * GB,
    "gemma-4-31B-it-Q4_K_M.gguf": 19 * GB,
    "gemma-4-31B-it-IQ4_XS.gguf": 17 * GB,
    "gemma-4-31B-it-IQ3_M.gguf": 14 * GB,
    "gemma-4-31B-it-Q3_K_M.gguf": 15 * GB,
    "mtp-gemma-4-31B-it-Q8_0.gguf": GB // 2,
    "imatrix.gguf": GB // 50,
}


def chosen(machine: str, context: int | None = None) -> str | None:
    found = cards.assume(facts(), machine)
    return hub_choice.best_file(facts(), found, REPOSITORY, SIZES, context)


def test_the_best_type_that_leaves_room_for_a_context() -> None:
    assert chosen("H200") == "gemma-4-31B-it-BF16-00001-of-00002.gguf"
    assert chosen("A100 40GB") == "gemma-4-31B-it-Q8_0.gguf"
    assert chosen("RTX 5090") == "UD/gemma-4-31B-it-UD-Q6_K_XL.gguf"
    assert chosen("RTX 3090") == "gemma-4-31B-it-IQ4_XS.gguf"
    assert chosen("RTX 3090", 8192) == "gemma-4-31B-it-Q4_K_M.gguf"


def test_mixes_that_quantize_does_not_write() -> None:
    """IQ3_M and Q8_K_XL were skipped, as if they were no models."""
    sizes = {name: n for name, n in SIZES.items() if "IQ3_M" in name}
    machine = cards.assume(facts(), "RTX 4090")
    assert hub_choice.best_file(facts(), machine, REPOSITORY, sizes, 2048) == next(iter(sizes))
    best = {"gemma-4-31B-it-UD-Q8_K_XL.gguf": 35 * GB, **SIZES}
    machine = cards.assume(facts(), "RTX PRO 6000")
    assert hub_choice.best_file(facts(), machine, REPOSITORY, best) == next(iter(best))


def test_without_a_gpu_not_the_largest_download() -> None:
    machine = Machine((), ram=256 << 30, ram_free=256 << 30)
    assert hub_choice.best_file(facts(), machine, REPOSITORY, SIZES) == (
        "UD/gemma-4-31B-it-UD-Q6_K_XL.gguf"
    )


def test_nothing_fits() -> None:
    with pytest.raises(EnvironmentProblem, match=r"none of its 7 types.*31B-it-IQ3_M\.gguf"):
        chosen("RTX 3060 12GB")


@pytest.mark.parametrize("name", ["org/gemma-4-it-GGUF", "org/other"])
def test_a_repository_of_unknown_size_is_not_guessed(name: str) -> None:
    machine = cards.assume(facts(), "H200")
    assert hub_choice.best_file(facts(), machine, name, SIZES) is None


def test_files_without_a_known_type_are_not_taken() -> None:
    machine = cards.assume(facts(), "H200")
    others = {"a-31B.gguf": 19 * GB, "a-31B-Q9_Z.gguf": 19 * GB, "mtp-Q8_0.gguf": GB}
    assert hub_choice.best_file(facts(), machine, REPOSITORY, others) is None


@pytest.mark.parametrize(
    "name,type",
    [
        ("gemma-4-31B-it-Q4_K_M.gguf", "Q4_K_M"),
        ("gemma-4-31b-it.q8_0.gguf", "Q8_0"),
        ("UD-Q4_K_XL/gemma-UD-Q4_K_XL-00001-of-00002.gguf", "Q4_K_XL"),
        ("gemma-4-31B-it-UD-IQ2_M.gguf", "IQ2_M"),
        ("gemma-4-31B-it-IQ3_XS.gguf", "IQ3_XS"),
        ("gemma-4-31B-it-UD-Q8_K_XL.gguf", "Q8_K_XL"),
        ("gemma-4-31B-it-UD-IQ4_NL_XL.gguf", "IQ4_NL_XL"),
        ("gemma-mxfp4_moe.gguf", "MXFP4_MOE"),
        ("gemma-4-31B-it.gguf", ""),
        ("imatrix.gguf", ""),
    ],
)
def test_types_in_names(name: str, type: str) -> None:
    assert lookup.type_of(name) == type
