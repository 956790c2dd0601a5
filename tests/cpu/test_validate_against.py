"""A file compared with its checkpoint: changes are found and located."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4spec import quant
from g4spec.cli import run
from g4spec.convert import convert
from g4spec.convert.tensors import StoredTensor
from g4spec.gguf import GGUF
from g4spec.models import assistant, dflash, gemma4
from g4spec.quant import policy
from g4spec.validate import all_rules, validate
from g4spec.validate.compare import difference
from g4spec.validate.needs import OTHER_SOURCE
from g4spec.validate.rounding import usual_rms
from g4spec.validate.rule import Severity
from tests.cpu import gguf_fixtures as fx
from tests.support import faults, tiny
from tests.support.nvfp4_files import with_nvfp4
from tests.support.quant_blocks import random_blocks, relative_rms
from tests.support.selection import sample

Tensors = dict[str, tuple[np.ndarray, str]]
F32 = quant.get("f32")

SOURCES: dict[str, tuple[Any, Callable[[], Any], str, dict[str, Any]]] = {
    "target": (gemma4, fx.target_config, "BF16", {"architectures": ["Gemma4ForCausalLM"]}),
    "zlab": (
        dflash,
        fx.zlab_config,
        "F32",
        {"architectures": ["DFlashDraftModel"], "dflash_config": {}},
    ),
    "speculators": (dflash, fx.speculators_config, "F32", {"speculators_model_type": "dflash"}),
    "assistant": (
        assistant,
        fx.assistant_config,
        "F32",
        {"architectures": ["Gemma4AssistantForCausalLM"]},
    ),
}


def checkpoint(kind: str) -> tuple[dict[str, Any], Tensors]:
    """Return configuration and tensors of a checkpoint that converts to the fixture `kind`."""
    module, make_config, dtype, config = SOURCES[kind]
    parsed = make_config()
    weights = fx.values(module, parsed)
    out: Tensors = {}
    for spec in module.tensors(parsed):
        if spec.source is not None:
            vector = spec.role == "vector"
            out[spec.source] = (weights[spec.name], "F32" if vector else dtype)
    if kind == "speculators":
        ids = fx.d2t_ids()
        out["d2t"] = (ids - np.arange(len(ids)), "I64")
        out["t2d"] = (fx.t2d_mask().astype(bool), "BOOL")
    if kind == "assistant":
        kv = fx.KINDS[kind]().kv
        centroids = np.array(kv[assistant.CENTROIDS].data, np.float32)
        out["masked_embedding.centroids.weight"] = (centroids.reshape(16, 32), "F32")
        ordering = np.array(kv[assistant.ORDERING].data, np.int64)
        out["masked_embedding.token_ordering"] = (ordering, "I64")
    return config, out


def folder(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tiny.save_all(path, tensors)
    return path


def edit(name: str, at: int, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][0].reshape(-1)[at] = value

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def reshaped(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        x, dtype = tensors[name]
        tensors[name] = (np.ascontiguousarray(x.T), dtype)

    return change


SOURCE_CHANGES: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "G4-CMP-002": ("zlab", renamed("norm.weight", "final_norm.weight"), "final_norm.weight"),
    "G4-CMP-003": ("zlab", renamed("norm.weight", "final_norm.weight"), "output_norm.weight"),
    "G4-CMP-004": ("zlab", reshaped("fc.weight"), "fc.weight"),
    "G4-CMP-005": ("zlab", edit("norm.weight", 7, 9.0), "output_norm.weight[7]"),
    "G4-CMP-006": ("zlab", edit("fc.weight", 200, 0.5), "fc.weight[1, 8]"),
    "G4-CMP-007": ("speculators", edit("t2d", 3, 1), "d2t"),
}
"""Rule -> kind of file, change of its checkpoint, and the tensor that the finding names."""
METADATA_RULES = {"G4-CMP-009", "G4-CMP-010"}
TESTED_ELSEWHERE = {"G4-CMP-001", "G4-CMP-008", *METADATA_RULES}
TENSOR_RULES = [i for i in all_rules() if i not in METADATA_RULES]
"""The folders here have no complete configuration; `test_validate_metadata.py` compares
metadata."""


def test_every_rule_has_a_source_that_breaks_it() -> None:
    assert set(SOURCE_CHANGES) | TESTED_ELSEWHERE == {
        i for i in all_rules() if i.startswith("G4-CMP")
    }


@pytest.mark.parametrize("kind", SOURCES)
def test_a_faithful_file_passes(tmp_path: Path, kind: str) -> None:
    path = fx.KINDS[kind]().write(tmp_path / "good.gguf")
    report = validate(
        path, against=folder(tmp_path / "source", *checkpoint(kind)), only=TENSOR_RULES
    )
    assert report.ok, [(f.rule.id, f.finding) for f in report.failures]
    assert not any(f.rule.family == "CMP" for f in report.failures)
    assert {t["name"] for t in report.tensors} >= set(fx.KINDS[kind]().tensors)
    for t in report.tensors:
        assert (t["max_abs"] == 0) if t["exact"] else (0 < t["relative_rms"] < 0.01), t
        assert t["relative_rms"] <= 1.1 * t["usual_rms"], t


@pytest.mark.parametrize("rule_id", SOURCE_CHANGES)
def test_each_rule_reports_its_fault(tmp_path: Path, rule_id: str) -> None:
    kind, change, where = SOURCE_CHANGES[rule_id]
    config, tensors = checkpoint(kind)
    change(tensors)
    path = fx.KINDS[kind]().write(tmp_path / "x.gguf")
    report = validate(path, against=folder(tmp_path / "source", config, tensors))
    findings = [f.finding for f in report.failures if f.rule.id == rule_id]
    assert [f.where for f in findings] == [where], [(f.rule.id, f.finding) for f in report.failures]


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_missing_in_the_file_is_found(tmp_path: Path, tied: bool) -> None:
    """`convert` drops a head only if it is the token table; any head passed as dropped here."""
    config, tensors = checkpoint("target")
    x, dtype = tensors["embed_tokens.weight"]
    tensors["lm_head.weight"] = (x if tied else x[::-1].copy(), dtype)
    path = fx.KINDS["target"]().write(tmp_path / "x.gguf")
    report = validate(path, against=folder(tmp_path / "source", config, tensors), only=TENSOR_RULES)
    found = [(f.rule.id, f.finding.where) for f in report.failures if f.rule.family == "CMP"]
    assert found == ([] if tied else [("G4-CMP-002", "lm_head.weight")])


def test_a_folder_of_another_kind_is_one_finding(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", *checkpoint("target"))
    report = validate(fx.zlab().write(tmp_path / "x.gguf"), against=source)
    assert [f.rule.id for f in report.failures if f.rule.family == "CMP"] == ["G4-CMP-001"]


@pytest.mark.parametrize("recorded", [True, False])
def test_another_model_of_the_same_kind_is_one_finding(tmp_path: Path, recorded: bool) -> None:
    family = Path(__file__).parents[2] / "examples" / "tiny"
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    convert(family / "target", target)
    convert(family / "dflash", draft, target=target)
    if not recorded:
        file = faults.read(draft)
        del file.kv["g4spec.source_digest"]
        draft = file.write(tmp_path / "foreign.gguf")
    report = validate(draft, target, family / "dflash-other")
    found = [f for f in report.failures if f.rule.severity is Severity.ERROR]
    assert [f.rule.id for f in found] == ["G4-CMP-001"]
    assert "36 of 36" in str(found[0].finding.found)
    assert {i for i, why in report.skipped.items() if why == OTHER_SOURCE} == {
        f"G4-CMP-{n:03}" for n in (2, 3, 4, 5, 6, 8, 9, 10)
    }
    assert "8 rules not checked (8 because the source is of another model)" in report.summary()
    assert "a defect of the file" not in report.summary()


def test_a_wrong_scale_everywhere_is_not_another_model(tmp_path: Path) -> None:
    config, tensors = checkpoint("zlab")
    tensors = {name: (values * 2, dtype) for name, (values, dtype) in tensors.items()}
    path = fx.zlab().write(tmp_path / "x.gguf")
    report = validate(path, against=folder(tmp_path / "source", config, tensors))
    found = {f.rule.id for f in report.failures}
    assert "G4-CMP-006" in found and "G4-CMP-001" not in found
    (text,) = {
        str(f.finding.found).partition("; ")[2]
        for f in report.failures
        if f.finding.where == "fc.weight[0, 0]"
    }
    assert text == "relative RMS error 50.00% (usual for Q8_0: 0.54%)"


@pytest.mark.parametrize("type", ["bf16", "q4_k", "iq4_nl", "q2_k"])
def test_the_usual_error_is_that_of_weights(type: str) -> None:
    form = quant.get(type)
    x = np.random.default_rng(1).normal(0, 0.02, (256, 512)).astype(np.float32)
    assert usual_rms(form) == pytest.approx(relative_rms(x, form.dequantize(form.quantize(x))), 0.1)
    assert usual_rms(quant.get("iq1_s")) is None, "it cannot be written"


def test_the_table_of_errors_shows_the_usual_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fx.zlab().write(tmp_path / "x.gguf")
    source = folder(tmp_path / "source", *checkpoint("zlab"))
    run(["validate", str(path), "--against", str(source)])
    shown = capsys.readouterr().out
    assert "usual RMS: that of normally distributed weights in this type" in shown
    assert re.search(r"weight +Q8_0 +\S+ +0\.00\d+ +0\.00538", shown)


def test_another_revision_is_noticed(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", *checkpoint("zlab"))
    file = fx.zlab()
    file.kv["g4spec.source_digest"] = fx.string("sampled-sha256:0")
    report = validate(file.write(tmp_path / "x.gguf"), against=source)
    assert [f.rule.id for f in report.failures if f.rule.family == "CMP"] == ["G4-CMP-008"]


def test_a_gguf_serves_as_source(tmp_path: Path) -> None:
    full = fx._build(dflash, fx.zlab_config(), "f32").write(tmp_path / "full.gguf")
    report = validate(fx.zlab().write(tmp_path / "q8.gguf"), against=full)
    assert report.ok
    assert max(t["relative_rms"] for t in report.tensors) < 0.01


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-4, 1.0, 3e4, 1e6])
@pytest.mark.parametrize("name", [n for n in quant.writable_names() if n != "f32"])
def test_rounding_by_the_format_is_not_reported(name: str, scale: float) -> None:
    """At any magnitude that the format can represent."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 256)) * scale).astype(np.float32)
    form = quant.get(name)
    if scale > {"f16": 1e4, "q4_1": 1e4, "q5_1": 1e4, "q4_0": 1e5, "q5_0": 1e5, "q2_k": 1e5}.get(
        name, 1e6
    ):
        pytest.skip("beyond its range")
    source = StoredTensor("x", x.shape, "F32", quant.get("f32"), x.reshape(-1).view(np.uint8))
    raw = form.quantize(x).reshape(-1)
    found = difference("x", form, raw, source)
    assert found.first is None
    assert not found.exact


def test_a_code_rounded_wrongly_is_reported() -> None:
    """One code of one Q8_0 block is off by one."""
    x = np.random.default_rng(4).standard_normal((4, 64)).astype(np.float32)
    form = quant.get("q8_0")
    raw = form.quantize(x).reshape(-1).copy()
    value = form.dequantize(raw)[5 * 32 + 9]
    raw.view(np.int8)[34 * 5 + 2 + 9] += 1 if value > x[2, 41] else -1
    source = StoredTensor("x", x.shape, "F32", quant.get("f32"), x.reshape(-1).view(np.uint8))
    assert difference("x", form, raw, source).first == (2, 41)


@pytest.mark.parametrize("name", [n for n, f in quant.readable().items() if f.bound is None])
def test_types_without_an_error_bound_are_compared_too(name: str) -> None:
    """Rows of another place, other signs and a wrong scale passed in the types of other programs'
    files."""
    form = quant.get(name)
    if not form.quantized:
        pytest.skip("its error is relative to each value")
    raw = random_blocks(name, 64, 512).reshape(-1)
    x = form.dequantize(raw).reshape(64, 512)
    x += np.random.default_rng(5).normal(0, 0.02 * x.std(), x.shape).astype(np.float32)

    def first(values: np.ndarray) -> tuple[int, ...] | None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return difference("x", form, raw, StoredTensor("x", x.shape, "F32", F32, data)).first

    assert first(x) is None
    for wrong in (np.roll(x, 1, 0), -x, x / 3):
        assert first(wrong) is not None


@pytest.mark.parametrize(
    ("first", "type"), [("bf16", "q4_0"), ("bf16", "q5_1"), ("bf16", "q8_0"), ("f16", "q8_0")]
)
def test_values_may_be_rounded_to_16_bits_before(first: str, type: str) -> None:
    """An F32 checkpoint is converted to 16 bits, and that file quantized."""
    half, form = quant.get(first), quant.get(type)
    x = 0.02 * np.random.default_rng(0).standard_normal((256, 2048), dtype=np.float32)
    source = StoredTensor("x", x.shape, "F32", F32, x.reshape(-1).view(np.uint8))
    raw = form.quantize(half.dequantize(half.quantize(x)).reshape(x.shape)).reshape(-1)
    assert difference("x", form, raw, source).first is None
    raw = form.quantize(np.float32(1.01) * x).reshape(-1)
    assert difference("x", form, raw, source).first is not None


def test_nvfp4_weights_are_compared_with_their_factors(tmp_path: Path) -> None:
    source = tiny.target(tmp_path / "t", hidden=64, inter=64, experts=4, expert_inter=64)
    convert(source, tmp_path / "t.gguf", type="f32")
    path = with_nvfp4(tmp_path / "t.gguf", tmp_path / "nvfp4.gguf")
    base = with_nvfp4(tmp_path / "t.gguf", tmp_path / "base.gguf", dequantized=True)
    report = validate(path, None, base)
    assert not [f for f in report.failures if f.rule.id.startswith("G4-CMP-00")]
    assert report.tensors and all(t["relative_rms"] < 1e-3 for t in report.tensors)
    report = validate(path, None, tmp_path / "t.gguf")
    assert "G4-CMP-006" in {f.rule.id for f in report.failures}


def test_split_experts_are_compared_with_fused_ones(tmp_path: Path) -> None:
    """llama.cpp writes gate and up projections of NVFP4 checkpoints as two tensors, also of the
    26B-A4B, whose original checkpoint has one."""
    sizes = {"hidden": 64, "inter": 64, "experts": 4, "expert_inter": 64, "layers": 2, "period": 2}
    source = tiny.target(tmp_path / "t", **sizes)
    convert(source, tmp_path / "t.gguf", type="f32")
    file = faults.read(with_nvfp4(tmp_path / "t.gguf", tmp_path / "nvfp4.gguf"))
    base = with_nvfp4(tmp_path / "t.gguf", tmp_path / "base.gguf", dequantized=True)
    for i in range(2):
        both = file.tensors.pop(f"blk.{i}.ffn_gate_up_exps.weight")
        halves = np.frombuffer(both.data, np.uint8).reshape(4, 2, -1)
        scale = file.tensors.pop(f"blk.{i}.ffn_gate_up_exps.scale")
        for half, name in enumerate(("gate", "up")):
            part = fx.Entry((4, 64, 64), both.type, halves[:, half].tobytes())
            file.tensors[f"blk.{i}.ffn_{name}_exps.weight"] = part
            file.tensors[f"blk.{i}.ffn_{name}_exps.scale"] = scale
    file.kv = {key: value for key, value in file.kv.items() if not key.startswith("g4spec.")}
    path = file.write(tmp_path / "split.gguf")
    with GGUF(base) as found:
        config = gemma4.parse_gguf(found, found.shapes())
        specs = [spec for spec in gemma4.tensors(config) if spec.source]
        tensors: Tensors = {str(s.source): (found.array(s.name), "F32") for s in specs}
    settings = json.loads((source / "config.json").read_text())
    original = folder(tmp_path / "original", settings, tensors)
    for against in (original, base):
        report = validate(path, None, against, only=TENSOR_RULES)
        assert not [f for f in report.failures if f.rule.family == "CMP"]
        names = {t["name"] for t in report.tensors}
        assert {f"blk.1.ffn_{name}_exps.weight" for name in ("gate", "up", "down")} <= names
        assert all(t["relative_rms"] < 1e-3 for t in report.tensors)
    up = file.tensors["blk.1.ffn_up_exps.weight"]
    file.tensors["blk.1.ffn_up_exps.weight"] = file.tensors["blk.1.ffn_gate_exps.weight"]
    file.tensors["blk.1.ffn_gate_exps.weight"] = up
    report = validate(file.write(path), None, original, only=["G4-CMP-006"])
    assert {f.finding.where.partition("[")[0] for f in report.failures} == {
        "blk.1.ffn_gate_exps.weight",
        "blk.1.ffn_up_exps.weight",
    }


@pytest.mark.parametrize("type", sample(policy.names(), 8))
def test_converted_files_pass_every_rule(tmp_path: Path, type: str) -> None:
    """A target, and DFlash and assistant drafts, in every type."""
    target = tiny.target(tmp_path / "target")
    pair = tmp_path / "target.gguf"
    convert(target, pair, type=type)
    assert not validate(pair, against=target).failures
    sources = (
        tiny.zlab_dflash(tmp_path / "zlab", target),
        tiny.speculators_dflash(tmp_path / "speculators", target),
        tiny.assistant(tmp_path / "assistant", target, centroids=16),
    )
    for source in sources:
        out = tmp_path / f"{source.name}.gguf"
        convert(source, out, target=target, type=type)
        report = validate(out, pair, source)
        assert report.ok, [(f.rule.id, f.finding) for f in report.failures]
        assert not report.skipped
        random_table = {"G4-PAIR-014"} if source.name == "speculators" else set()
        failed_rules = {f.rule.id for f in report.failures}
        assert failed_rules <= {"G4-BLK-009", "G4-D2T-010"} | random_table
