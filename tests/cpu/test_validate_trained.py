"""Statistical rules on trained weights: silent on the published files, and reporting damaged
ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from g4spec.convert import convert
from g4spec.gguf import GGUF
from g4spec.models.assistant import ORDERING
from g4spec.validate import validate
from g4spec.validate.rules import taps

TINY = Path(__file__).parents[2] / "examples" / "tiny"
DRAFTS = ("dflash", "dflash-other", "dflash-speculators", "assistant")
KNOWN = {"G4-BLK-009", "G4-D2T-010"}
"""Notes that are true: mixed causality, and a draft vocabulary without `<|tool_response>`."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    convert(TINY / "target", folder / "target.gguf", type="q8_0")
    for name in DRAFTS:
        convert(TINY / name, folder / f"{name}.gguf", target=TINY / "target", type="q8_0")
    return folder


@pytest.mark.parametrize("name", ("target", *DRAFTS))
def test_trained_files_are_healthy(family: Path, name: str) -> None:
    target = None if name == "target" else family / "target.gguf"
    report = validate(family / f"{name}.gguf", target)
    assert {f.rule.id for f in report.failures} <= KNOWN


@pytest.mark.parametrize(("value", "rule"), [(1, "G4-VAL-010"), (-1, "G4-VAL-009")])
@pytest.mark.parametrize("name", ("target", *DRAFTS))
def test_shifted_norms_are_noticed(
    family: Path, tmp_path: Path, name: str, value: int, rule: str
) -> None:
    data = bytearray((family / f"{name}.gguf").read_bytes())
    with GGUF(family / f"{name}.gguf") as file:
        for tensor, info in file.tensors.items():
            if tensor.endswith("norm.weight"):
                start = file.data_start + info.offset
                x = np.frombuffer(data, "<f4", info.nbytes // 4, start)
                x += value
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert {f.rule.id for f in validate(path).failures} - KNOWN == {rule}


def test_an_inverse_ordering_is_noticed(family: Path, tmp_path: Path) -> None:
    data = (family / "assistant.gguf").read_bytes()
    with GGUF(family / "assistant.gguf") as file:
        order = np.asarray(file.number_array(ORDERING)).astype("<i4")
    assert data.count(order.tobytes()) == 1
    path = tmp_path / "x.gguf"
    path.write_bytes(data.replace(order.tobytes(), np.argsort(order).astype("<i4").tobytes()))
    assert {f.rule.id for f in validate(path).failures} == {"G4-CEN-008"}


@pytest.mark.parametrize("n", (30, 48, 60))
def test_conventions_of_layer_ids_are_named(n: int) -> None:
    """No trainer uses evenly divided ids, counted from any base, so they are reported."""
    even = tuple(n * i // 7 for i in range(1, 7))
    assert "divided evenly" in (taps._computed(even, n) or "")
    assert "plus one" in (taps._computed(tuple(i + 1 for i in even), n) or "")
    assert not taps._trained(even, n)
    assert taps._trained((2, n // 2, n - 3), n)
