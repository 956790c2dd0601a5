"""Targets and drafts of every kind with unusable tensors or ids are refused at load."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4spec import cli, models
from g4spec.advisor import lookup
from g4spec.advisor.facts import facts
from g4spec.convert import convert, quantize
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, TensorData, ValueType, array, f32, string, u32
from g4spec.gguf import write as write_gguf
from g4spec.models import dflash_backbone
from g4spec.models.assistant import CENTROIDS, ORDERING, TOP_K
from g4spec.models.dflash_backbone import GEMMA_MARK
from g4spec.runtime import target_file
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.draft_file import DraftFile
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target
from g4spec.runtime.target_file import read_tokenizer
from g4spec.runtime.tokenizer import SUPPRESS
from g4spec.server.model_folder import find_models
from g4spec.validate import validate
from tests.support import kinds, malformed, tiny
from tests.support.malformed import (
    MASK,
    Change,
    bfloat16,
    changed,
    missing,
    not_finite,
    pointing,
    shorter,
)
from tests.support.nvfp4_files import with_nvfp4
from tests.support.selection import sample

TARGETS: dict[str, dict[str, Any]] = {
    "target": {},
    "own-values": {"k_eq_v": False},
    "experts": {"experts": 4},
    "per-layer": {"ple": 8, "shared": 2, "k_eq_v": False},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GGUF files of targets, and one draft of every kind for the dense target."""
    home = tmp_path_factory.mktemp("home")
    for name, shape in TARGETS.items():
        folder = tiny.target(home / name, layers=6, period=2, **shape)
        convert(folder, home / f"{name}.gguf", type="f32")
    on = home / "target"
    for name, make in kinds.HOSTILE.items():
        make(home / name, on)
        convert(home / name, home / f"{name}.gguf", target=on, type="f32")
    return home


def build(home: Path, path: Path, target: Target) -> None:
    with DraftFile(path) as other:
        other.kind.check_pair(other.config, target.config)
        other.build(TorchBackend(), target)


@pytest.fixture(scope="module")
def target(home: Path) -> Target:
    return Engine.load(home / "target.gguf", n_ctx=64).target


@pytest.mark.parametrize("how", sample(malformed.HOWS, 2))
@pytest.mark.parametrize("kind", kinds.HOSTILE)
def test_every_tensor_of_a_draft(
    home: Path, target: Target, tmp_path: Path, kind: str, how: Change
) -> None:
    source = home / f"{kind}.gguf"
    build(home, source, target)
    refused = 0
    for name, write in malformed.tensors(source, how, malformed.borrowed(kind, source)):
        broken = write(tmp_path / "broken.gguf")
        with pytest.raises(InputError) as error:
            build(home, broken, target)
        assert "broken.gguf" in str(error.value) or how is not not_finite, name
        refused += 1
    assert refused > 3


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle3", "dflash2"])
def test_head_counts_are_checked_before_the_cache_is_allocated(
    home: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A file of 68 KB claimed heads of 32,768 values, and its cache took 768 MB."""
    arch = GGUF(home / f"{kind}.gguf").kv["general.architecture"]
    sizes = "attention.key_length", "rope.dimension_count"
    key = {f"{arch}.{name}": u32(32768) for name in sizes}
    broken = changed(home / f"{kind}.gguf", tmp_path / "broken.gguf", **key)
    monkeypatch.setattr(TorchBackend, "cache", lambda *_: pytest.fail("allocated"))
    with pytest.raises(InputError, match=r"attn_q.weight: shape|key_length"):
        build(home, broken, target)


@pytest.mark.parametrize("how", sample(malformed.HOWS, 2))
@pytest.mark.parametrize("kind", TARGETS)
def test_every_tensor_of_a_target(home: Path, tmp_path: Path, kind: str, how: Change) -> None:
    for _, write in malformed.tensors(home / f"{kind}.gguf", how):
        with pytest.raises(InputError):
            Engine.load(write(tmp_path / "broken.gguf"), n_ctx=64)


@pytest.mark.parametrize("ending", ["scale", "bias", "input_scale"])
def test_tensors_that_change_a_target_are_not_ignored(
    home: Path, tmp_path: Path, ending: str
) -> None:
    """llama.cpp multiplies weights by `.scale`, here only if they are NVFP4; its `.input_scale`
    only rounds inputs."""

    def add(t: TensorData) -> list[TensorData]:
        half = np.full(1, 0.5, np.float32)
        return [t, TensorData(f"blk.0.attn_q.{ending}", (1,), malformed.F32, [half.tobytes()])]

    name = "blk.0.attn_q.weight"
    path = changed(home / "target.gguf", tmp_path / "scaled.gguf", name, add)
    if ending == "input_scale":
        Engine.load(path, n_ctx=64)
        return
    with pytest.raises(Unsupported, match=rf"scaled.gguf: tensor blk.0.attn_q.{ending} changes"):
        Engine.load(path, n_ctx=64)
    fixes = [f.finding.fix for f in validate(path).failures if f.rule.id == "G4-TNS-002"]
    assert ["NVFP4" in str(fix) for fix in fixes] == [ending == "scale"]


@pytest.mark.parametrize("kind", ["target", "experts"])
def test_nvfp4_weights_are_multiplied_by_their_factors(
    home: Path, tmp_path: Path, kind: str
) -> None:
    """A target with NVFP4 weights computes what one with the products computes."""
    paths = [
        with_nvfp4(home / f"{kind}.gguf", tmp_path / f"{i}.gguf", dequantized=bool(i))
        for i in range(2)
    ]
    texts = []
    for path in paths:
        assert not [f for f in validate(path).failures if f.rule.id.startswith("G4-TNS")]
        with Engine.load(path, n_ctx=64) as engine:
            request = engine.generate([2, *range(20, 40)], Options(16, logprobs=4))
            texts.append([(cycle.tokens, cycle.logprobs) for cycle in request])
    assert texts[0] == texts[1]


def test_a_confidence_head_in_16_bits(home: Path, tmp_path: Path) -> None:
    """llama.cpp's converter writes it so."""
    path = changed(home / "dspark.gguf", tmp_path / "d.gguf", "conf_proj.weight", bfloat16)
    assert not [f for f in validate(path).failures if f.rule.id == "G4-TNS-004"]
    with Engine.load(home / "target.gguf", path, n_ctx=64, draft_p_min=0.5) as engine:
        texts = [engine.generate([2, 20, 21], Options(16, draft_max=n)) for n in (0, 3)]
        assert len({tuple(token for c in text for token in c.tokens) for text in texts}) == 1


def test_factors_of_another_shape_are_refused(home: Path, tmp_path: Path) -> None:
    path = with_nvfp4(home / "target.gguf", tmp_path / "t.gguf")
    name = "blk.1.ffn_up.scale"
    for wrong in (np.ones(2, np.float32), np.full(1, np.nan, np.float32)):
        other = [TensorData(name, wrong.shape, malformed.F32, [wrong.tobytes()])]
        made = changed(path, tmp_path / "wrong.gguf", name, lambda _, other=other: other)
        with pytest.raises(InputError, match=name):
            Engine.load(made, n_ctx=64)


SCALED = {"rope.scaling.type": string("yarn"), "rope.scaling.factor": f32(4)}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (SCALED, "rope.scaling.factor"),
        ({"rope.scaling.factor": f32(2)}, "rope.scaling.factor"),
        ({"rope.scale_linear": f32(2)}, "rope.scale_linear"),
        (SCALED | {"rope.scaling.type": string("none")}, ""),
        (SCALED | {"rope.scaling.factor": f32(1)}, ""),
        ({"rope.scaling.factor": f32(0)}, ""),
    ],
)
@pytest.mark.parametrize("kind", ["target", "dflash", "eagle3", "assistant"])
def test_scaled_positions_are_refused(
    home: Path, tmp_path: Path, kind: str, keys: dict[str, Any], says: str
) -> None:
    """llama.cpp divides positions by the factor of the file."""
    source = home / f"{kind}.gguf"
    arch = GGUF(source).kv["general.architecture"]
    path = changed(source, tmp_path / "x.gguf", **{f"{arch}.{k}": v for k, v in keys.items()})
    pair = (path, None) if kind == "target" else (home / "target.gguf", path)
    if not says:
        Engine.load(*pair, n_ctx=64)
        return
    with pytest.raises(InputError, match=rf"{arch}.{says}"):
        Engine.load(*pair, n_ctx=64)
    assert [f for f in validate(path).failures if says in str(f.finding)]


@pytest.mark.parametrize(
    ("key", "value", "gemma"),
    [
        ("attention.value_scale", 0.5, False),
        ("rope.dimension_count", 8, False),
        ("hidden_activation", "gelu", False),
        ("hidden_activation", "silu", True),
        ("attention.scale", 1.0, False),
        ("attention.scale", 0.25, True),
        ("attention.scale", 0.0, True),
    ],
)
def test_drafts_that_llama_cpp_computes_differently_are_refused(
    home: Path, key: str, value: Any, gemma: bool
) -> None:
    """Their keys were ignored, at a loss of acceptance."""
    with GGUF(home / "dflash.gguf") as file:
        shapes = {**file.shapes(), **({GEMMA_MARK: (32,)} if gemma else {})}
        usual = {"attention.scale": 1.0 if gemma else 0.25, "rope.dimension_count": 16}
        kv = {**file.kv, **{f"dflash.{name}": value for name, value in usual.items()}}
    assert dflash_backbone.parse_gguf(kv, shapes)
    with pytest.raises(InputError, match=rf"GGUF metadata: dflash\.{key}: expected"):
        dflash_backbone.parse_gguf({**kv, f"dflash.{key}": value}, shapes)


def test_more_experts_per_token_than_a_grid_has_rows(home: Path, tmp_path: Path) -> None:
    keys = {"gemma4.expert_count": u32(5000), "gemma4.expert_used_count": u32(5000)}
    broken = changed(home / "experts.gguf", tmp_path / "broken.gguf", **keys)
    with pytest.raises(InputError, match="expert_used_count: expected at most 1024, found 5000"):
        Engine.load(broken, n_ctx=64)


# ---- ids


@pytest.mark.parametrize("kind", ["dflash-reduced", "eagle3"])
@pytest.mark.parametrize("id", [-1, 10**6, 2**40])
def test_a_reduced_vocabulary_with_ids_that_do_not_exist(
    home: Path, tmp_path: Path, kind: str, id: int
) -> None:
    broken = changed(home / f"{kind}.gguf", tmp_path / "broken.gguf", "d2t", pointing(id))
    with pytest.raises(InputError, match=rf"d2t names a token outside.*found {id}"):
        Engine.load(home / "target.gguf", broken, n_ctx=64)


@pytest.mark.parametrize("id", [-1, 10**6])
def test_an_assistants_ordering_with_ids_that_do_not_exist(
    home: Path, tmp_path: Path, id: int
) -> None:
    with GGUF(home / "assistant.gguf") as g:
        ordering = list(g.number_array(ORDERING).tolist())
    ordering[5] = id
    broken = changed(
        home / "assistant.gguf",
        tmp_path / "broken.gguf",
        **{ORDERING: array(ValueType.I32, ordering)},
    )
    with pytest.raises(InputError, match=rf"{ORDERING} names a token outside.*found {id}"):
        Engine.load(home / "target.gguf", broken, n_ctx=64)


def test_an_assistants_centroids(home: Path, tmp_path: Path) -> None:
    with GGUF(home / "assistant.gguf") as g:
        centres = g.number_array(CENTROIDS).tolist()
    for change, match in (
        ({TOP_K: u32(17)}, "centroid_top_k.*16.*found 17"),
        ({CENTROIDS: array(ValueType.F32, centres[:-1])}, "centroids.*found"),
        ({CENTROIDS: array(ValueType.F32, [*centres[:-1], math.inf])}, "centroids.*infinite"),
    ):
        broken = changed(home / "assistant.gguf", tmp_path / "broken.gguf", **change)
        with pytest.raises(InputError, match=match):
            Engine.load(home / "target.gguf", broken, n_ctx=64)


@pytest.mark.parametrize("kind", ["dflash", "dflash-reduced", "dspark", "dflash2", "p-eagle"])
def test_a_mask_token_that_does_not_exist(home: Path, tmp_path: Path, kind: str) -> None:
    broken = changed(home / f"{kind}.gguf", tmp_path / "broken.gguf", **{MASK: u32(10**6)})
    with pytest.raises(InputError, match=r"mask_token_id names a token outside.*found 1000000"):
        Engine.load(home / "target.gguf", broken, n_ctx=64)


@pytest.mark.parametrize("key", [SUPPRESS, "g4spec.stop_ids"])
@pytest.mark.parametrize("id", [-1, 10**6])
def test_suppressed_and_stop_ids_that_do_not_exist(
    home: Path, tmp_path: Path, key: str, id: int
) -> None:
    broken = changed(
        home / "target.gguf", tmp_path / "broken.gguf", **{key: array(ValueType.I32, [7, id])}
    )
    with pytest.raises(InputError, match=rf"{re.escape(key)}.*found {id}"):
        Engine.load(broken, n_ctx=64)


@pytest.mark.parametrize("kind", ["target", "assistant"])
def test_a_rotation_that_only_the_tensor_tells(home: Path, tmp_path: Path, kind: str) -> None:
    """llama.cpp converts another share of rotated pairs without a key; a quarter was rotated."""
    half = np.array([1] * 8 + [1e30] * 8, np.float32)

    def change(t: TensorData) -> list[TensorData]:
        return [TensorData(t.name, t.shape, t.type, [half.tobytes()])]

    file = changed(home / f"{kind}.gguf", tmp_path / "x.gguf", "rope_freqs.weight", change)
    with pytest.raises(InputError, match="expected 4 ones, then 1e30, found 8 ones"):
        read_tokenizer(file) if kind == "target" else DraftFile(file)


def test_lora_adapters_are_named(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their architecture is that of their model, so errors were about keys or a wrong role."""
    keys = {"general.architecture": string("gemma4"), models.ADAPTER: string("lora")}
    halves = [
        TensorData(f"blk.0.attn_q.weight.lora_{x}", (8, 8), malformed.F32, [bytes(256)])
        for x in "ab"
    ]
    write_gguf(adapter := tmp_path / "lora.gguf", keys, halves)
    target = str(home / "target.gguf")
    for command in (
        ["generate", "-m", str(adapter), "-p", "x"],
        ["generate", "-m", target, "-md", str(adapter), "-p", "x"],
        ["convert", str(adapter), "-o", str(tmp_path / "x.gguf")],
        ["quantize", str(adapter), str(tmp_path / "x.gguf"), "--type", "q8_0"],
        ["doctor", "-m", str(adapter), "--assume", "RTX 3090"],
        ["doctor", "-m", target, "-md", str(adapter), "--assume", "RTX 3090"],
        ["inspect", str(adapter)],
        ["validate", str(adapter)],
    ):
        assert cli.run(command) == {"inspect": 0, "validate": 1}.get(command[0], 3)
        shown = capsys.readouterr()
        assert "LoRA adapter" in shown.out + shown.err, command
    assert len(validate(adapter).failures) == 1
    keys["general.architecture"] = string("gemma4_mtp")  # a dialect of assistants
    write_gguf(adapter, keys, halves)
    with pytest.raises(Unsupported, match="LoRA adapter"):
        convert(adapter, tmp_path / "x.gguf", target=home / "target.gguf")


@pytest.mark.parametrize(
    ("type", "arch", "says"),
    [
        ("mmproj", "clip", "encoders of vision and audio (mmproj), not a model"),
        (None, "controlvector", "a control vector, not a model"),
        ("imatrix", None, "an importance matrix, not a model"),
    ],
)
def test_files_that_are_no_models_are_named(
    type: str | None, arch: str | None, says: str, home: Path, tmp_path: Path
) -> None:
    keys = {"general.type": type, "general.architecture": arch}
    kv = {key: string(value) for key, value in keys.items() if value}
    write_gguf(path := tmp_path / "x.gguf", kv, [TensorData("a", (8,), malformed.F32, [bytes(32)])])
    target = home / "target.gguf"
    for refused in (
        lambda: target_file.check(path),
        lambda: DraftFile(path),
        lambda: convert(path, tmp_path / "y.gguf", target=target),
        lambda: quantize(path, tmp_path / "y.gguf", "q8_0"),
        lambda: lookup.find_target(facts(), str(path)),
    ):
        with pytest.raises(Unsupported, match=re.escape(says)):
            refused()
    (failure,) = validate(path).failures
    assert failure.finding.fix == f"name a model: this is {says.removesuffix(', not a model')}"


def test_a_vocabulary_is_no_target(home: Path, tmp_path: Path) -> None:
    """Its first tensor was missing, with an impossible shape."""
    with GGUF(home / "target.gguf") as file:
        write_gguf(path := tmp_path / "vocab.gguf", {key: file.value(key) for key in file}, [])
    with pytest.raises(InputError, match="no tensors: expected a model, found only metadata"):
        target_file.check(path)


@pytest.mark.parametrize("key", ["feed_forward_length", "attention.head_count_kv"])
@pytest.mark.parametrize(
    "value",
    [
        array(ValueType.STRING, ["x"] * 6),
        array(ValueType.F32, [math.inf] * 6),
        array(ValueType.F32, [math.nan] * 6),
        array(ValueType.I32, [0] * 6),
        array(ValueType.I32, [-1] * 6),
        array(ValueType.U64, [1 << 63] * 6),
        array(ValueType.I32, [1] * 5),
    ],
)
def test_invalid_per_layer_sizes(home: Path, tmp_path: Path, key: str, value: Any) -> None:
    """Strings raised a ValueError and infinity an OverflowError."""
    broken = changed(
        home / "target.gguf",
        tmp_path / "broken.gguf",
        **{f"gemma4.{key}".replace(".", "__"): value},
    )
    with pytest.raises(InputError, match=key.replace(".", r"\.")):
        Engine.load(broken, n_ctx=64)


@pytest.mark.parametrize("kind", ["dflash", "dflash-reduced", "dflash2"])
def test_a_block_of_one_row(home: Path, tmp_path: Path, kind: str) -> None:
    """A block of the anchor alone proposes nothing. The first request ended in an IndexError."""
    broken = changed(home / f"{kind}.gguf", tmp_path / "b.gguf", dflash__block_size=u32(1))
    with pytest.raises(InputError, match=r"block_size.*2 or more, found 1"):
        Engine.load(home / "target.gguf", broken, n_ctx=64)


@pytest.mark.parametrize(
    "kind,key",
    [
        ("target", "gemma4.attention.key_length"),
        ("target", "gemma4.attention.head_count"),
        ("target", "gemma4.feed_forward_length"),
        ("target", "gemma4.embedding_length"),
        ("target", "gemma4.embedding_length_per_layer_input"),
        ("eagle3", "eagle3.attention.key_length"),
        ("dflash", "dflash.attention.key_length"),
    ],
)
def test_sizes_that_no_tensor_has_are_input_errors(
    home: Path, tmp_path: Path, kind: str, key: str
) -> None:
    """The memory was checked first, so the exit code was 4."""
    keys = [key, "dflash.rope.dimension_count"] if key.startswith("dflash") else [key]
    broken = changed(
        home / f"{kind}.gguf", tmp_path / "b.gguf", **dict.fromkeys(keys, u32(1 << 24))
    )
    pair = (broken, None) if kind == "target" else (home / "target.gguf", broken)
    with pytest.raises(InputError, match="tensor"):
        Engine.load(*pair, n_ctx=64)


def test_an_architecture_that_is_not_a_string(home: Path, tmp_path: Path) -> None:
    broken = changed(
        home / "target.gguf",
        tmp_path / "broken.gguf",
        general__architecture=array(ValueType.I32, [1, 2]),
    )
    for target, draft in ((broken, None), (home / "target.gguf", broken)):
        with pytest.raises(InputError):
            Engine.load(target, draft, n_ctx=64)
    with pytest.raises(InputError, match="not a target"):
        read_tokenizer(broken)
    with pytest.raises(InputError, match="no target model"):
        find_models(tmp_path)


def test_the_command_ends_with_3(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["generate", "-p", "x", "-n", "2", "-c", "64", "--device", "cpu"]
    norm = "blk.0.attn_norm.weight"
    target, draft = home / "target.gguf", home / "dflash.gguf"
    for m, md in (
        (target, changed(draft, tmp_path / "d.gguf", norm, missing)),
        (target, changed(draft, tmp_path / "e.gguf", norm, not_finite)),
        (changed(target, tmp_path / "t.gguf", norm, shorter), draft),
    ):
        assert cli.run([*run, "-m", str(m), "-md", str(md)]) == 3
        captured = capsys.readouterr()
        assert not captured.out and captured.err.startswith("error: ") and norm in captured.err
