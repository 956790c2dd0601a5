"""Keys of `config.json` are read or refused, never ignored; values that upstream assumes are
written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from g4spec.convert import convert
from g4spec.errors import G4Error, InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.models.fields import Fields
from tests.support import tiny


def edit(folder: Path, **values: Any) -> Path:
    """Set keys of the text configuration; two underscores in a name separate nested keys."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config") or config
    for name, value in values.items():
        *outer, last = name.split("__")
        inner = text
        for key in outer:
            inner = inner[key]
        inner[last] = value
    path.write_text(json.dumps(config))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scaled": ({"rope_parameters__full_attention__factor": 8.0}, "factor"),
    "sliding scaled": ({"rope_parameters__sliding_attention__factor": 2.0}, "factor"),
    "of older versions": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
    "unknown": ({"rope_parameters__full_attention__beta_fast": 32}, "beta_fast"),
    "flat": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
    "a kind missing": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_theta"),
    "sliding part": (
        {"rope_parameters__sliding_attention__partial_rotary_factor": 0.5},
        "partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rope_parameters_of_a_target_that_are_not_read_are_refused(
    tmp_path: Path, name: str
) -> None:
    values, message = REFUSED[name]
    folder = edit(tiny.target(tmp_path / "target"), **values)
    with pytest.raises(InputError, match=message):
        convert(folder, tmp_path / "x.gguf", dry_run=True)


PER_LAYER: dict[str, tuple[dict[str, Any], str]] = {
    "another key": ({"2": {"rms_norm_eps": 0.1}}, "rms_norm_eps"),
    "a kind of layer": ({"full_attention": {"head_dim": 32}}, "'full_attention'"),
    "no such layer": ({"6": {"head_dim": 32}}, "'6'"),
    "sizes of heads": ({"0": {"head_dim": 32}}, "different sizes"),
}


@pytest.mark.parametrize("name", PER_LAYER)
def test_values_of_single_layers_that_are_not_read_are_refused(tmp_path: Path, name: str) -> None:
    """transformers refuses them, too."""
    values, message = PER_LAYER[name]
    folder = edit(tiny.target(tmp_path / "target", layers=6), per_layer_config=values)
    with pytest.raises(InputError, match=message):
        convert(folder, tmp_path / "x.gguf", dry_run=True)


def test_the_last_layer_of_a_target_is_full(tmp_path: Path) -> None:
    """transformers computes it so even if `layer_types` calls it sliding."""
    folder = tiny.target(tmp_path / "target", layers=4, period=2)
    kinds = ["sliding_attention", "full_attention"] + 2 * ["sliding_attention"]
    convert(edit(folder, layer_types=kinds), tmp_path / "x.gguf")
    with GGUF(tmp_path / "x.gguf") as file:
        pattern = file.get("gemma4.attention.sliding_window_pattern")
    assert pattern == [True, False, True, False]


def test_redundant_rope_parameters_are_accepted(tmp_path: Path) -> None:
    folder = edit(
        tiny.target(tmp_path / "target"),
        rope_parameters__full_attention__factor=1.0,
        rope_parameters__sliding_attention__beta_fast=None,
    )
    convert(folder, tmp_path / "x.gguf", dry_run=True)


def test_partial_rotary_factor_defaults_to_one(tmp_path: Path) -> None:
    """Compare with transformers: 0.25 is the default only without any RoPE settings."""
    folder = tiny.target(tmp_path / "target")
    edit(folder, rope_parameters__full_attention={"rope_type": "proportional", "rope_theta": 1e6})
    convert(folder, tmp_path / "x.gguf")
    with GGUF(tmp_path / "x.gguf") as file:
        assert file.get("g4spec.rope_partial") == 1.0
        assert (file.array("rope_freqs.weight") == 1).all()
    edit(folder, rope_parameters=None)
    convert(folder, tmp_path / "x.gguf")
    with GGUF(tmp_path / "x.gguf") as file:
        assert file.get("g4spec.rope_partial") is None
        assert (file.array("rope_freqs.weight") == 1).sum() == 4


def test_heads_of_full_layers_have_512_values_by_default(tmp_path: Path) -> None:
    """The default of Gemma4TextConfig in transformers, and of `doctor`."""
    folder = tiny.target(tmp_path / "target", layers=4, period=2, global_head_dim=512)
    convert(edit(folder, global_head_dim=None), tmp_path / "x.gguf")
    with GGUF(tmp_path / "x.gguf") as file:
        assert file.get("gemma4.attention.key_length") == 512
        assert file.get("gemma4.attention.key_length_swa") == 16


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"rope_theta": 1e6, "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_rope_parameters_of_a_draft_that_are_not_read_are_refused(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    target = tiny.target(tmp_path / "target")
    draft = edit(tiny.zlab_dflash(tmp_path / "draft", target), **values)
    with pytest.raises(G4Error):
        convert(draft, tmp_path / "x.gguf", target=target, dry_run=True)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny.VOCAB},
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
        },
    ],
)
def test_assistants_with_parts_that_are_not_computed_are_refused(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    target = tiny.target(tmp_path / "target")
    draft = edit(tiny.assistant(tmp_path / "draft", target), **values)
    with pytest.raises(Unsupported, match="per-layer embeddings or experts"):
        convert(draft, tmp_path / "x.gguf", target=target, dry_run=True)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_logit_softcapping_is_always_written(tmp_path: Path, cap: float | None) -> None:
    """llama.cpp caps at 30 if the key is missing."""
    convert(tiny.target(tmp_path / "target", softcap=cap), tmp_path / "x.gguf")
    with GGUF(tmp_path / "x.gguf") as file:
        assert file.get("gemma4.final_logit_softcapping") == (cap or 0.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    """A draft whose `logit_scale` is NaN proposes nothing, and passed `validate`."""
    fields = Fields({"dflash.logit_scale": value}, "GGUF metadata", "dflash.")
    with pytest.raises(InputError, match=r"'dflash\.logit_scale': expected a finite number, found"):
        fields.get(float, "logit_scale", 1.0)
