"""`dflash_config`: each key is read as its trainers define it, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from g4spec.advisor import model_files
from g4spec.advisor.facts import facts
from g4spec.advisor.like_published import SHORT
from g4spec.convert import convert
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.models import dspark
from g4spec.runtime.engine import Engine
from g4spec.validate import validate
from tests.cpu.test_config_keys import edit
from tests.support import faults, tiny, tiny_drafts

CAUSAL = "g4spec.dflash.layer_causal"
SCALE = "dflash.embedding_scale"
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


SWA = {"dflash_config__use_swa": True, "dflash_config__swa_window_size": 24}
FULL = {"layer_types": ["full_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("values", "causal"),
    [
        (SWA, [True, False]),
        (SWA | FULL, [False, False]),
        (SWA | {"layer_types": None}, [False, False]),
        (SWA | FULL | {"dflash_config__causal": True}, [True, True]),
    ],
)
def test_use_swa_makes_all_layers_slide(
    target: Path, tmp_path: Path, values: dict[str, Any], causal: list[bool]
) -> None:
    """vLLM's `_resolve_layer_attention`: only layers that `layer_types` calls sliding are causal by
    default. NVIDIA trains such drafts with full attention inside the block."""
    with converted(target, tmp_path, **values) as file:
        assert file.get(WINDOW) == 24
        assert all(file.get(PATTERN))
        assert file.get(CAUSAL) == causal


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"dflash_config__use_swa": True}, 8),
        ({"dflash_config__swa_window_size": 24}, 24),
        ({"dflash_config__swa_window_size": 24, "use_sliding_window": False}, None),
    ],
)
def test_either_key_gives_the_window(
    target: Path, tmp_path: Path, values: dict[str, Any], window: int | None
) -> None:
    """Take `swa_window_size`, else `sliding_window`, as llama.cpp does."""
    with converted(target, tmp_path, **values) as file:
        assert file.get(WINDOW) == window


def nested(folder: Path, **values: Any) -> Path:
    """Set keys of `transformer_layer_config`; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    inner = config["transformer_layer_config"] | values
    config["transformer_layer_config"] = {k: v for k, v in inner.items() if v is not None}
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("used", [None, False])
@pytest.mark.parametrize("model_type", [None, "qwen3", "llama"])
def test_a_window_that_qwen3_does_not_use_is_dropped(
    target: Path, tmp_path: Path, model_type: str | None, used: bool | None
) -> None:
    """Qwen3Config of transformers, which speculators uses without a `model_type` as well, has no
    window unless `use_sliding_window` is set. Such layers are trained as full ones: they see the
    whole context, and all of the block. LlamaConfig does not know the key."""
    draft = nested(
        tiny.speculators_dflash(tmp_path / "draft", target, window=24),
        use_sliding_window=used,
        model_type=model_type,
    )
    convert(draft, tmp_path / "draft.gguf", target=target)
    with GGUF(tmp_path / "draft.gguf") as file:
        assert file.get(WINDOW) == (24 if model_type == "llama" else None)
        slides = [True, False] if model_type == "llama" else [False, False]
        assert file.get(CAUSAL, [False, False]) == slides
    draft = nested(
        tiny_drafts.eagle3(tmp_path / "eagle", target, window=24),
        use_sliding_window=used,
        model_type=model_type,
    )
    convert(draft, tmp_path / "eagle.gguf", target=target)
    with GGUF(tmp_path / "eagle.gguf") as file:
        window = file.get("eagle3.attention.sliding_window")
        assert window == (24 if model_type == "llama" else None)


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"max_window_layers": 1}, [False, True]),
        ({"max_window_layers": 0}, [True, True]),
        ({}, None),
        ({"max_window_layers": 1, "use_sliding_window": False}, None),
    ],
)
def test_without_layer_types_the_last_layers_slide(
    target: Path, tmp_path: Path, values: dict[str, Any], pattern: list[bool] | None
) -> None:
    """Qwen3Config of transformers fills in `layer_types`: layers from `max_window_layers` (28) on
    slide."""
    with converted(target, tmp_path, layer_types=None, **values) as file:
        found = file.get(PATTERN)
        assert found == pattern or (pattern is None and not any(found or ()))


@pytest.mark.parametrize("kind", ["z-lab", "speculators", "eagle3"])
def test_heads_of_qwen3_have_128_values_by_default(target: Path, tmp_path: Path, kind: str) -> None:
    """The default of Qwen3Config in transformers, and of `doctor`; in LlamaConfig it is the hidden
    size per head."""
    if kind == "z-lab":
        draft = edit(tiny.zlab_dflash(tmp_path / "x", target, head_dim=128), head_dim=None)
    elif kind == "speculators":
        draft = tiny.speculators_dflash(tmp_path / "x", target, head_dim=128)
        nested(draft, head_dim=None)
    else:
        draft = nested(
            tiny_drafts.eagle3(tmp_path / "x", target, head_dim=128, qwen=True), head_dim=None
        )
    convert(draft, tmp_path / "x.gguf", target=target)
    with GGUF(tmp_path / "x.gguf") as file:
        assert file[f"{file['general.architecture']}.attention.key_length"] == 128


def test_heads_of_specforge_drafts_share_the_hidden_size(target: Path, tmp_path: Path) -> None:
    """Their class is LlamaConfig, also without a `model_type`."""
    draft = tiny_drafts.eagle3(tmp_path / "x", target, layout="specforge", head_dim=16)
    edit(draft, head_dim=None, model_type=None)
    convert(draft, tmp_path / "x.gguf", target=target)
    with GGUF(tmp_path / "x.gguf") as file:
        assert file["eagle3.attention.key_length"] == 16


def test_an_eagle3_draft_is_for_a_target_of_its_own_hidden_size(
    target: Path, tmp_path: Path
) -> None:
    """Unless it says target_hidden_size, as for doctor; convert took it for any target's draft."""
    draft = nested(tiny_drafts.eagle3(tmp_path / "x", target), hidden_size=128)
    with pytest.raises(InputError, match="target's hidden size must equal its target's"):
        convert(draft, tmp_path / "x.gguf", target=target)


def test_doctor_counts_the_window_of_use_swa(target: Path, tmp_path: Path) -> None:
    draft = edit(tiny.zlab_dflash(tmp_path / "draft", target), **SWA, **FULL)
    of = model_files.read_target(facts(), target, str(target))
    found = model_files.read_draft(facts(), draft, str(draft), of)
    assert found.kv_token == 0
    layer = 2 * SHORT * 2 * 16
    assert found.kv_fixed == 2 * 24 * layer


CONFIGURED: dict[str, dict[str, Any]] = {
    "JetSpec": {"dflash_config__causal_head": True} | FULL,
    "all causal": {"is_causal": True},
    "window": SWA | FULL,
    "scale": {"dflash_config__input_embedding_scale": 3.0},
    "no scale": {"input_embedding_scale": 1.0},
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_configured_drafts_are_valid(target: Path, tmp_path: Path, name: str) -> None:
    """`validate` has no finding and runs all rules, with and without the source."""
    convert(target, tmp_path / "target.gguf")
    converted(target, tmp_path, **CONFIGURED[name]).close()
    for source in (None, tmp_path / "draft"):
        report = validate(tmp_path / "draft.gguf", tmp_path / "target.gguf", source)
        assert {f.rule.id for f in report.failures} <= {"G4-BLK-009"}
        assert not report.skipped or source is None


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
    "adapter": ({"dflash_config__target_hidden_size": 96}, "target_hidden_size 96.*adapter"),
    "other depth": ({"dflash_config__num_target_layers": 60}, "num_target_layers"),
    "shifted": ({"dflash_config__shift_label": True}, "shift_label"),
    "contradiction": ({"dflash_config__causal_head": True, "is_causal": False}, "causal_head"),
    "no window": ({"dflash_config__use_swa": True, "sliding_window": None}, "sliding_window"),
    "multiplier": ({"dflash_config__output_multiplier": 0.5}, "output_multiplier"),
    "outer multiplier": ({"output_multiplier": 0.5}, "output_multiplier"),
    "pairs": ({"rope_is_neox_style": False}, "rope_is_neox_style"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_by_name(target: Path, tmp_path: Path, name: str) -> None:
    values, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        converted(target, tmp_path, **values)


def test_the_weights_of_an_adapter_are_refused_with_the_reason(
    target: Path, tmp_path: Path
) -> None:
    """JetSpec's, which is initialized at random."""
    weights = tiny.Weights(3, "BF16")
    weights.matrix("hidden_dim_adapter.proj.weight", 64, 96)
    draft = tiny_drafts.extend(tiny.zlab_dflash(tmp_path / "draft", target), weights)
    with pytest.raises(Unsupported, match=r"hidden_dim_adapter\.proj\.weight.*adapter.*random"):
        convert(draft, tmp_path / "x.gguf", target=target)


@pytest.mark.parametrize("own", [None, True, False])
def test_a_token_table_that_the_draft_does_not_use_is_dropped(
    target: Path, tmp_path: Path, own: bool | None
) -> None:
    weights = tiny.Weights(3, "BF16")
    weights.matrix("embed_tokens.weight", tiny.VOCAB, 64)
    draft = tiny.zlab_dflash(tmp_path / "draft", target)
    tiny_drafts.extend(draft, weights, has_embed_tokens=own)
    convert(draft, tmp_path / "x.gguf", target=target)
    with GGUF(tmp_path / "x.gguf") as file:
        assert ("token_embd.weight" in file.tensors) == (own is not False)


@pytest.mark.parametrize("made_here", [True, False])
def test_a_run_of_a_draft_without_its_settings_says_so(
    target: Path, tmp_path: Path, made_here: bool
) -> None:
    """llama.cpp's converter has no key for the scale and causality of z-lab's drafts."""
    convert(target, tmp_path / "target.gguf")
    converted(target, tmp_path).close()
    file = faults.read(tmp_path / "draft.gguf")
    for key in [k for k in file.kv if k.startswith("g4spec.") or k == SCALE]:
        if not made_here:
            del file.kv[key]
    with Engine.load(tmp_path / "target.gguf", file.write(tmp_path / "x.gguf"), n_ctx=64) as engine:
        assert [("causality" in note) for note in engine.notes] == [True] * (not made_here)


def test_a_pickled_mask_row_is_named(target: Path, tmp_path: Path) -> None:
    draft = tiny.zlab_dflash(tmp_path / "draft", target)
    (draft / "mask_embedding.pt").write_bytes(b"pickle")
    with pytest.raises(Unsupported, match=r"mask_embedding\.pt"):
        convert(draft, tmp_path / "x.gguf", target=target, dry_run=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding layers"),
        ({"dflash_config": {"markov_rank": 4}}, "markov_rank"),
        ({"num_kv_shared_layers": 1, "use_double_wide_mlp": True}, "use_double_wide_mlp"),
    ],
)
def test_deepspec_drafts_of_other_layers_are_refused(
    target: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    draft = edit(tiny_drafts.deepspec_dspark(tmp_path / "draft", target), **values)
    with pytest.raises(InputError, match=message):
        convert(draft, tmp_path / "x.gguf", target=target, dry_run=True)


@pytest.mark.parametrize(
    "copied",
    [
        {"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {"num_kv_shared_layers": 1},
    ],
)
@pytest.mark.parametrize("own_values", [False, True])
def test_deepspec_drafts_of_targets_with_shared_layers_have_their_own_keys(
    target: Path, tmp_path: Path, own_values: bool, copied: dict[str, Any]
) -> None:
    draft = tiny_drafts.deepspec_dspark(tmp_path / "draft", target, own_values=own_values)
    convert(draft, tmp_path / "plain.gguf", target=target)
    convert(edit(draft, **copied), tmp_path / "draft.gguf", target=target)
    with GGUF(tmp_path / "draft.gguf") as file, GGUF(tmp_path / "plain.gguf") as plain:
        config, wanted = (dspark.parse_gguf(x.kv, x.shapes()) for x in (file, plain))
        assert config == wanted and all(s.kv_from is None for s in config.layers)


def test_deepspec_drafts_have_the_settings_of_dflash(target: Path, tmp_path: Path) -> None:
    settings = {
        "use_swa": True,
        "swa_window_size": 24,
        "causal": True,
        "input_embedding_scale": 3.0,
        "final_logit_softcapping": 20.0,
        "block_size": 3,
    }
    draft = edit(tiny_drafts.deepspec_dspark(tmp_path / "draft", target), dflash_config=settings)
    convert(draft, tmp_path / "draft.gguf", target=target)
    with GGUF(tmp_path / "draft.gguf") as file:
        assert file.get(WINDOW) == 24 and all(file.get(PATTERN)) and all(file.get(CAUSAL))
        assert file.get("dflash.embedding_scale") == 3.0
        assert file.get("dflash.final_logit_softcapping") == 20.0
        assert file.get("dflash.block_size") == 3
        assert (file.array("rope_freqs.weight") == 1).sum() == 4


def test_nvidia_exports_convert_and_upstream_refuses_them(target: Path, tmp_path: Path) -> None:
    """llama.cpp norms values only if V = K."""
    draft = tiny_drafts.deepspec_dspark(tmp_path / "draft", target, own_values=True, softcap=None)
    convert(draft, tmp_path / "x.gguf", target=target)
    with GGUF(tmp_path / "x.gguf") as file:
        assert file.get("general.architecture") == "dflash-g4spec"
        assert "blk.0.attn_v.weight" in file.tensors


def test_heads_without_dimensions(target: Path, tmp_path: Path) -> None:
    """A malformed file may have them; the tensors' shapes are checked later."""
    draft = tiny_drafts.speculators_dspark(tmp_path / "draft", target)
    convert(draft, tmp_path / "x.gguf", target=target)
    with GGUF(tmp_path / "x.gguf") as file:
        shapes = file.shapes() | {"markov_w1.weight": (), "conf_proj.weight": ()}
        config = dspark.parse_gguf(file.kv, shapes)
    assert (config.rank, config.confidence) == (0, "none")
