"""`dflash_config`: each key is read as its trainers define it, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from g4spec.convert import convert
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from tests.cpu.test_config_keys import edit
from tests.support import tiny, tiny_drafts

CAUSAL = "g4spec.dflash.layer_causal"
WINDOW, PATTERN = "dflash.attention.sliding_window", "dflash.attention.sliding_window_pattern"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("made") / "target")


def converted(target: Path, work: Path, **values: Any) -> GGUF:
    """Return the converted draft with these settings; `dflash_config__x` sets a nested one."""
    draft = edit(tiny.zlab_dflash(work / "draft", target), **values)
    convert(draft, work / "draft.gguf", target=target)
    return GGUF(work / "draft.gguf")


CAUSALITY: dict[str, tuple[dict[str, Any], bool | None]] = {
    "as trained": ({}, None),
    "JetSpec": ({"dflash_config__causal_head": True}, True),
    "top": ({"is_causal": True}, True),
    "top first": ({"is_causal": False, "dflash_config__causal": True}, False),
    "inner is_causal": ({"dflash_config__is_causal": False}, False),
    "inner causal": ({"dflash_config__causal": True}, True),
    "head off": ({"dflash_config__causal_head": False, "is_causal": False}, False),
}


@pytest.mark.parametrize("name", CAUSALITY)
def test_causality_is_read_from_the_configuration(target: Path, tmp_path: Path, name: str) -> None:
    values, wanted = CAUSALITY[name]
    with converted(target, tmp_path, **values) as file:
        sliding = file.get(PATTERN)
        assert True in sliding and False in sliding
        assert file.get(CAUSAL) == (sliding if wanted is None else [wanted] * len(sliding))


def test_use_swa_makes_all_layers_slide(target: Path, tmp_path: Path) -> None:
    values = {"dflash_config__use_swa": True, "dflash_config__swa_window_size": 24}
    with converted(target, tmp_path, **values) as file:
        assert file.get(WINDOW) == 24
        assert all(file.get(PATTERN))
        assert all(file.get(CAUSAL))


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({}, 8.0),
        ({"dflash_config__input_embedding_scale": 3.0}, 3.0),
        ({"input_embedding_scale": 5.0}, 5.0),
        ({"input_embedding_scale": 1.0}, None),
    ],
)
def test_the_embedding_scale_is_the_configured_one(
    target: Path, tmp_path: Path, values: dict[str, Any], scale: float | None
) -> None:
    with converted(target, tmp_path, **values) as file:
        assert file.get("dflash.embedding_scale") == scale
        assert math.isqrt(file.get("dflash.embedding_length")) == 8


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "LiLiCorr": ({"dflash_config__lilicorr_enabled": True}, "LiLiCorr"),
    "Domino": ({"dflash_config__projector_type": "domino"}, "Domino"),
    "adapter": ({"dflash_config__target_hidden_size": 96}, "target_hidden_size"),
    "other depth": ({"dflash_config__num_target_layers": 60}, "num_target_layers"),
    "shifted": ({"dflash_config__shift_label": True}, "shift_label"),
    "contradiction": ({"dflash_config__causal_head": True, "is_causal": False}, "causal_head"),
    "no window": ({"dflash_config__use_swa": True}, "swa_window_size"),
    "multiplier": ({"dflash_config__output_multiplier": 0.5}, "output_multiplier"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_by_name(target: Path, tmp_path: Path, name: str) -> None:
    values, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        converted(target, tmp_path, **values)


def test_a_pickled_mask_row_is_named(target: Path, tmp_path: Path) -> None:
    draft = tiny.zlab_dflash(tmp_path / "draft", target)
    (draft / "mask_embedding.pt").write_bytes(b"pickle")
    with pytest.raises(Unsupported, match=r"mask_embedding\.pt"):
        convert(draft, tmp_path / "x.gguf", target=target, dry_run=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dflash_config": {"use_swa": True, "swa_window_size": 8}}, "use_swa"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding layers"),
        ({"dflash_config": {"markov_rank": 4}}, "markov_rank"),
    ],
)
def test_deepspec_drafts_of_other_layers_are_refused(
    target: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    draft = edit(tiny_drafts.deepspec_dspark(tmp_path / "draft", target), **values)
    with pytest.raises(InputError, match=message):
        convert(draft, tmp_path / "x.gguf", target=target, dry_run=True)


def test_nvidia_exports_convert_and_upstream_refuses_them(target: Path, tmp_path: Path) -> None:
    """llama.cpp norms values only if V = K."""
    draft = tiny_drafts.deepspec_dspark(tmp_path / "draft", target, own_values=True, softcap=None)
    convert(draft, tmp_path / "x.gguf", target=target)
    with GGUF(tmp_path / "x.gguf") as file:
        assert file.get("general.architecture") == "dflash-g4spec"
        assert "blk.0.attn_v.weight" in file.tensors
