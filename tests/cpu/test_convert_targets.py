"""Targets of every size, and quantized checkpoints, are converted to GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from g4spec import quant
from g4spec.convert import (
    CheckpointFolder,
    convert,
    detect,
    prequantized,
    quant_methods,
    safetensors,
)
from g4spec.convert import tensors as stored
from g4spec.convert.pipeline import Result
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, ValueType
from g4spec.models import gemma4
from g4spec.runtime.engine import Engine, Options
from g4spec.validate import validate
from tests.support import tiny, tiny_quantized
from tests.support.selection import sample

PLE: dict[str, Any] = {"ple": 32, "shared": 6, "k_eq_v": False}
CASES: dict[str, dict[str, Any]] = {
    "experts": {"experts": 8, "expert_inter": 32},
    "per-layer": PLE,
    "spare": PLE | {"spare": True},
    "unified": {"unified": True, "vision": True, "suppress": [7, 9]},
}


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_arrives(tmp_path: Path, name: str) -> None:
    folder = tiny.target(tmp_path / "t", dtype="F32", **CASES[name])
    result = convert(folder, tmp_path / "t.gguf", type="f32")
    source = load_file(folder / "model.safetensors")
    with GGUF(tmp_path / "t.gguf") as g:
        config = gemma4.parse_gguf(g.kv, g.shapes())
        specs = {s.name: s for s in gemma4.tensors(config)}
        assert set(g.tensors) == {n for n, s in specs.items() if not s.optional or name == "spare"}
        for n in g.tensors:
            if made := specs[n].source:
                assert np.array_equal(g.array(n), source["model.language_model." + made]), n
        assert validate(tmp_path / "t.gguf", against=folder).ok
    dropped = {r.source: r.note for r in result.plan.with_action("drop")}
    assert len(dropped) == (3 if name == "unified" else 0)
    assert all("vision and audio" in note for note in dropped.values())


def test_keys_of_each_size(tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        convert(tiny.target(tmp_path / name, **case), tmp_path / f"{name}.gguf")
        with GGUF(tmp_path / f"{name}.gguf") as g:
            found[name] = dict(g.kv)
            assert (
                name != "unified" or g.value("tokenizer.ggml.suppress_tokens").item is ValueType.I32
            )
    a = "gemma4."
    assert [
        found["experts"][a + k]
        for k in ("expert_count", "expert_used_count", "expert_feed_forward_length")
    ] == [8, 2, 32]
    assert found["per-layer"][a + "feed_forward_length"] == [96] * 6 + [192] * 6
    assert found["per-layer"][a + "attention.shared_kv_layers"] == 6
    assert found["per-layer"][a + "embedding_length_per_layer_input"] == 32
    assert found["unified"]["tokenizer.ggml.suppress_tokens"] == [7, 9]
    assert "gemma4.expert_count" not in found["unified"]


def test_types_of_routers_and_tables(tmp_path: Path) -> None:
    """Check that routers are F32 for every requested type, as in upstream's converter."""
    for case, asked in (("experts", "bf16"), ("experts", "q8_0"), ("per-layer", "q8_0")):
        convert(tiny.target(tmp_path / case, **CASES[case]), tmp_path / "t.gguf", type=asked)
        with GGUF(tmp_path / "t.gguf") as g:
            types = {n: t.format.name for n, t in g.tensors.items()}
        if case == "experts":
            assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ffn_gate_inp.scale"] == "f32"
            assert types["blk.0.ffn_gate_up_exps.weight"] == asked
        else:
            assert types["per_layer_token_embd.weight"] == types["blk.7.inp_gate.weight"] == "q8_0"


def test_the_engine_never_chooses_a_suppressed_token(tmp_path: Path) -> None:
    folder = tiny.target(tmp_path / "t", layers=6, period=3)
    convert(folder, tmp_path / "t.gguf")
    options = Options(n_predict=24, ignore_eos=True)
    run = Engine.load(tmp_path / "t.gguf").generate([2, 300, 301], options)
    list(run)
    loud = sorted(set(run.ids))
    tiny.target(tmp_path / "s", layers=6, period=3, suppress=loud)
    convert(tmp_path / "s", tmp_path / "s.gguf")
    engine = Engine.load(tmp_path / "s.gguf", "ngram")
    again = engine.generate([2, 300, 301], options)
    list(again)
    assert engine.tokenizer.suppress_ids == tuple(loud)
    assert not set(again.ids) & set(loud)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size_per_layer_input": -1},
        {"num_experts": 0},
        {"num_kv_shared_layers": 12},
        {"num_kv_shared_layers": 99},
        {"vocab_size_per_layer_input": 100},
        {"use_bidirectional_attention": "all"},
    ],
)
def test_nonsense_in_the_configuration(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tiny.target(tmp_path / "t", experts=8, ple=8)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        convert(folder, tmp_path / "t.gguf")
    assert not (tmp_path / "t.gguf").exists()


# ---- quantized checkpoints

Make = Callable[[Path], dict[str, np.ndarray]]
Q = tiny_quantized
QUANTIZED: dict[str, tuple[Make, str, str]] = {
    "w4a16": (Q.compressed, "q4_0", "INT4 in groups of 32, exact"),
    "w4a16, wide groups": (lambda f: Q.compressed(f, group=64), "q4_0", "of 64, exact"),
    "w8a16": (lambda f: Q.compressed(f, bits=8), "q8_0", "INT8 in groups of 32, exact"),
    "autoround": (Q.autoround, "q4_0", "exact"),
    "autoround, wide groups": (lambda f: Q.autoround(f, group=64), "q4_0", "exact"),
    # No block type can store these values; with --type F32 they must still be right.
    "autoround, zero points": (lambda f: Q.autoround(f, symmetric=False), "f32", "no type holds"),
    "small scales": (lambda f: Q.compressed(f, tiny_scale=True), "f32", "no type holds"),
    "small groups": (lambda f: Q.compressed(f, group=16), "f32", "no type holds"),
    "shuffled": (lambda f: Q.autoround(f, shuffled=True), "f32", "no type holds"),
    "fp8 rows": (Q.fp8, "f32", "FP8"),
    "fp8 tensors": (lambda f: Q.fp8(f, per_tensor=True), "f32", "FP8"),
    "fp8 blocks": (lambda f: Q.fp8(f, block=(48, 48)), "f32", "FP8"),
    # Rows of 64: as many blocks as rows. With blocks of 128 x 128, rows of 16,384 have as many.
    "fp8, a block per row": (lambda f: Q.fp8(f, block=(8, 8)), "f32", "FP8"),
}


def source(folder: Path, **kw: Any) -> Path:
    return tiny.target(folder, dtype="F32", layers=6, inter=128, **kw)


def check(path: Path, meant: dict[str, np.ndarray], form: str | None) -> None:
    """Check that every quantized weight has the same values as before, to the last bit."""
    with GGUF(path) as g:
        config = gemma4.parse_gguf(g.kv, g.shapes())
        names = {"model.language_model." + (s.source or ""): s.name for s in gemma4.tensors(config)}
        for name, values in meant.items():
            assert form in (None, g.tensors[names[name]].format.name), name
            assert np.array_equal(g.array(names[name]), values), name


def notes(result: Result) -> dict[str, str]:
    return {r.name or "": r.note for r in result.plan.tensors}


@pytest.mark.parametrize("name", sample(QUANTIZED, 5))
def test_quantized_weights_keep_every_bit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "BLOCK_VALUES", 64 * 7)  # blocks that end inside a word
    make, form, note = QUANTIZED[name]
    meant = make(source(tmp_path / "t"))
    result = convert(tmp_path / "t", tmp_path / "t.gguf", type="f32")
    check(tmp_path / "t.gguf", meant, form)
    assert note in notes(result)["blk.1.attn_q.weight"]
    assert validate(tmp_path / "t.gguf", against=tmp_path / "t").ok


@pytest.mark.parametrize("k,group", [(96, 64), (704, 128)])
@pytest.mark.parametrize("packing", ["compressed-tensors", "auto-round", "with g_idx"])
def test_the_last_group_of_a_row_may_be_shorter(
    tmp_path: Path, packing: str, k: int, group: int
) -> None:
    """704 columns, as of the 26B-A4B's experts, in groups of 128 were read as groups of 118."""
    rng, n, count = np.random.default_rng(0), 16, -(-k // group)
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scale = np.exp2(rng.integers(-6, 0, (n, count))).astype(np.float32)
    settings: dict[str, Any] = {"quant_method": "auto-round", "group_size": group}
    tensors = {
        "a.qweight": (Q._words(codes.T, 4, 0), "I32"),
        "a.qzeros": (Q._words(np.full((count, n), 7), 4, 1), "I32"),
        "a.scales": (scale.T, "F16"),
    }
    if packing == "with g_idx":
        tensors["a.g_idx"] = (np.arange(k) // group, "I32")
    if packing == "compressed-tensors":
        weights = {"weights": {"group_size": group}}
        settings = {"quant_method": packing, "format": "pack-quantized"}
        settings["config_groups"] = {"group_0": weights}
        tensors = {
            "a.weight_packed": (Q._words(codes, 4, 1), "I32"),
            "a.weight_scale": (scale, "BF16"),
            "a.weight_shape": (np.array([n, k]), "I64"),
        }
    found = unpack(tmp_path, tensors, settings)
    assert found.format is quant.get("q4_0")
    spread = np.repeat(scale, group, axis=1)[:, :k]
    assert np.array_equal(found.array(), spread * (codes.astype(np.float32) - 8))
    if packing != "with g_idx":
        settings["group_size"] = settings["config_groups"] = None
        if k % count:
            with pytest.raises(Unsupported, match=f"{count} groups of {k} values"):
                unpack(tmp_path, tensors, settings)


@pytest.mark.parametrize("named", [[8, 16], "8x16"])
def test_the_last_fp8_block_may_be_smaller(tmp_path: Path, named: object) -> None:
    """compressed-tensors names the size of blocks in its groups; it was divided from the shapes."""
    codes = np.random.default_rng(0).integers(1, 127, (20, 24))
    scale = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    tensors = {"a.weight": (codes, "F8_E4M3"), "a.weight_scale": (scale, "F32")}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"block_structure": named}}},
    }
    spread = np.repeat(np.repeat(scale, 8, axis=0), 16, axis=1)[:20, :24]
    assert np.array_equal(unpack(tmp_path, tensors, settings).array(), Q.E4M3[codes] * spread)


def unpack(
    folder: Path, tensors: dict[str, tuple[np.ndarray, str]], settings: dict[str, Any]
) -> stored.StoredTensor:
    """Return the weight `a.weight` that these tensors stand for."""
    path = tiny.save(folder / "a.safetensors", tensors)
    config = {"quantization_config": settings}
    return prequantized.unpack(config, safetensors.read_all([path]))["a.weight"]


def test_zero_points(tmp_path: Path) -> None:
    """Q4_1 can only store zero points for which scale times zero point fits half precision."""
    meant = Q.compressed(source(tmp_path / "a"), symmetric=False, powers=True)
    convert(tmp_path / "a", tmp_path / "a.gguf")
    check(tmp_path / "a.gguf", meant, "q4_1")
    for i, make in enumerate((Q.compressed, Q.autoround)):
        meant = make(source(tmp_path / f"{i}"), symmetric=False)
        result = convert(tmp_path / f"{i}", tmp_path / "t.gguf", type="f32")
        check(tmp_path / "t.gguf", meant, None)
        notes_by_type = {r.type: r.note for r in result.plan.tensors if r.note.startswith("INT")}
        assert set(notes_by_type) <= {"Q4_1", "F32"}
        assert "no type holds them exactly" in notes_by_type["F32"]


def test_a_loss_is_reported(tmp_path: Path) -> None:
    Q.fp8(source(tmp_path / "t"))
    notes_by_name = notes(convert(tmp_path / "t", tmp_path / "t.gguf", type="q8_0", dry_run=True))
    assert notes_by_name["blk.1.attn_q.weight"].startswith(
        "FP8 with scales, dequantized; relative error"
    )
    assert 0 < float(notes_by_name["blk.1.attn_q.weight"].split()[-1].rstrip("%")) < 1


@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_a_nan_in_one_of_the_experts_is_refused(tmp_path: Path, type: str) -> None:
    """Experts that are only stacked, without a change of type, were not checked."""
    folder = source(tmp_path / "t", experts=4, expert_inter=32)
    Q.one_by_one(folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("experts.1.down_proj.weight"))
    tensors[name][2, 3] = np.nan
    tiny.save(folder / "model.safetensors", {n: (x, "F32") for n, x in tensors.items()})
    with pytest.raises(InputError, match=r"experts.down_proj cannot be stored as .* column 3"):
        convert(folder, tmp_path / "t.gguf", type=type)
    assert not (tmp_path / "t.gguf").exists()


@pytest.mark.parametrize("number", ["999999999", "9" * 5000])
def test_a_huge_number_of_an_expert_costs_nothing(tmp_path: Path, number: str) -> None:
    """A checkpoint of 1 KB with expert 999,999,999 took all memory, to list the missing ones."""
    folder = source(tmp_path / "t")
    path = folder / "model.safetensors"
    tensors = {n: (x, "F32") for n, x in load_file(path).items()}
    name = f"model.language_model.layers.0.experts.{number}.gate_proj.weight"
    tiny.save(path, tensors | {name: (np.zeros((4, 32), np.float32), "F32")})
    with pytest.raises(InputError, match=r"experts are missing|no rule for it"):
        convert(folder, tmp_path / "t.gguf")


@pytest.mark.parametrize("quantized", [False, True])
def test_experts_one_by_one(tmp_path: Path, quantized: bool) -> None:
    whole = source(tmp_path / "a", experts=4, expert_inter=32)
    parts = source(tmp_path / "b", experts=4, expert_inter=32)
    Q.one_by_one(parts)
    if quantized:
        Q.LINEAR, kept = Q.re.compile(r".*_proj\.weight"), Q.LINEAR
        meant = Q.compressed(parts)
        Q.LINEAR = kept
    convert(whole, tmp_path / "a.gguf", type="f32")
    convert(parts, tmp_path / "b.gguf", type="f32")
    with GGUF(tmp_path / "a.gguf") as a, GGUF(tmp_path / "b.gguf") as b:
        assert a.shapes() == b.shapes()
        for name in a.tensors:
            if not quantized:
                assert np.array_equal(a.raw(name), b.raw(name)), name
        if quantized:
            p = "model.language_model.layers.2.experts.3."
            gate_up = np.concatenate([meant[p + f"{x}_proj.weight"] for x in ("gate", "up")])
            assert b.tensors["blk.2.ffn_gate_up_exps.weight"].format.name == "q4_0"
            assert np.array_equal(b.array("blk.2.ffn_gate_up_exps.weight")[3], gate_up)
            assert np.array_equal(
                b.array("blk.2.ffn_down_exps.weight")[3], meant[p + "down_proj.weight"]
            )


def rotated(*locations: str) -> dict[str, Any]:
    """Return settings of compressed-tensors that rotate in these places, as QuIP and SpinQuant."""
    apply = [{"targets": ["Linear"], "location": place} for place in locations]
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}}


def test_rotations_that_the_weights_contain_are_read(tmp_path: Path) -> None:
    settings = {"quant_method": "compressed-tensors", "format": "dense"}
    weight = {"a.weight": (np.ones((2, 32)), "F32")}
    found = unpack(tmp_path, weight, settings | rotated("weight_input", "weight_output"))
    assert np.array_equal(found.array(), weight["a.weight"][0])


def test_fp8_of_modelopt(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(1, 127, (20, 24))
    tensors = {
        "a.weight": (codes, "F8_E4M3"),
        "a.weight_scale": (np.float32(0.25), "F32"),
        "a.input_scale": (np.float32(3), "F32"),
    }
    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert np.array_equal(unpack(tmp_path, tensors, settings).array(), Q.E4M3[codes] / 4)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_an_older_export_of_modelopt_has_a_file_of_settings(algorithm: str, tmp_path: Path) -> None:
    folder = tiny.target(tmp_path / "t", dtype="F32", layers=6)
    meant = Q.fp8(folder, per_tensor=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    if algorithm == "FP8":
        source = detect(folder).source
        assert isinstance(source, CheckpointFolder)
        found = source.tensors
        assert all(np.array_equal(found[n].array(), values) for n, values in meant.items())
        return
    with pytest.raises(Unsupported, match="found modelopt NVFP4"):
        detect(folder)


@pytest.mark.parametrize("name,method", quant_methods.MARKS.items())
def test_quantized_weights_without_a_configuration_are_named(name: str, method: str) -> None:
    with pytest.raises(Unsupported, match=f"is missing.*found {method}, by tensor a{name}"):
        quant_methods.refuse_unnamed(["a.weight", f"a{name}"])


def test_unsupported_quantization_is_refused(tmp_path: Path) -> None:
    folder = source(tmp_path / "t")
    Q.compressed(folder)
    path = folder / "config.json"
    config = json.loads(original := path.read_text())
    for change, says in (
        ({"quant_method": "awq"}, "quantization_config.*awq"),
        ({"quant_method": "bitsandbytes"}, "quantization_config.*bitsandbytes"),
        ({"format": "nvfp4-pack-quantized"}, "quantization_config.*nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "found modelopt .*NVFP4"),
        (rotated("input", "weight_input"), "rotates activations.*found input"),
    ):
        path.write_text(
            json.dumps(config | {"quantization_config": config["quantization_config"] | change})
        )
        with pytest.raises(Unsupported, match=says):
            convert(folder, tmp_path / "t.gguf")
    config.pop("quantization_config")
    for change, says in (
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, "MLX with 4 bits"),
        ({}, "quantization_config is missing.*found compressed-tensors, by tensor .*packed"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(Unsupported, match=says):
            convert(folder, tmp_path / "t.gguf")
    path.write_text(original)
    head, body = (
        (folder / "model.safetensors").read_bytes().split(b"layers.0.mlp.up_proj.weight_s", 1)
    )
    (folder / "model.safetensors").write_bytes(head + b"layers.0.mlp.up_proj.weight_x" + body)
    with pytest.raises(InputError, match="parts of the quantized weight are missing"):
        convert(folder, tmp_path / "t.gguf")
