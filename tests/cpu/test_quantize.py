"""Mixes choose types as llama-quantize does. Quantized files load and generate, and losses are
reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from g4spec import cli, quant
from g4spec.cli import _types
from g4spec.convert import convert, quantize
from g4spec.errors import InputError, Unsupported, UsageError
from g4spec.gguf import GGUF, TensorData, string, write
from g4spec.quant import policy, sizes
from g4spec.quant.policy import Policy
from g4spec.runtime.engine import Engine, Options
from g4spec.validate import scan, validate
from g4spec.validate.loss import losses, total
from tests.support import faults, tiny
from tests.support.kinds import CONVERSION
from tests.support.nvfp4_files import with_nvfp4
from tests.support.quant_blocks import random_blocks
from tests.support.selection import sample

ROOT = Path(__file__).parents[2]
DEEP = {"layers": 12, "hidden": 256, "inter": 512}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("deep") / "target", **DEEP)


@pytest.fixture(scope="module")
def full(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full") / "target.gguf"
    convert(deep, path, type="bf16")
    return path


def types(path: Path) -> dict[str, str]:
    """Return the types of the quantized tensors by name, without `.weight`."""
    with GGUF(path) as g:
        return {
            n.removesuffix(".weight"): t.format.name
            for n, t in g.tensors.items()
            if t.format.quantized
        }


def blocks(name: str, *layers: int) -> set[str]:
    return {f"blk.{i}.{name}" for i in layers}


# What `llama-quantize FILE OUT Q4_K_M` of llama.cpp made of the same files: per type, the tensors;
# every other one has the first type. Q5_K_M differs in q5_k and q5_1 for q4_k and q5_0.
OBSERVED = {
    "target": (
        "q4_k",
        {
            "q6_k": {"token_embd"}
            | blocks("ffn_down", 0, 3, 6, 9, 10, 11)
            | blocks("attn_v", 0, 3, 7, 9, 10),
            "q5_0": blocks("attn_output", *range(12)),
        },
    ),
    "zlab": (
        "q4_k",
        {
            "q6_k": blocks("attn_v", 2, 4),
            "q8_0": blocks("ffn_down", 2, 4),
            "q5_0": blocks("attn_output", *range(5)) | blocks("ffn_down", 0, 1, 3),
        },
    ),
    "speculators": (
        "q4_k",
        {
            "q6_k": {"output"} | blocks("attn_v", 1),
            "q8_0": blocks("ffn_down", 1),
            "q5_0": blocks("attn_output", 0, 1) | blocks("ffn_down", 0),
        },
    ),
    "assistant": (
        "q5_0",
        {
            "q4_k": {"nextn.pre_projection"},
            "q8_0": {"token_embd"} | blocks("ffn_down", 2, 3),
        },
    ),
}
DRAFTS = {
    "zlab": (tiny.zlab_dflash, {"layers": 5}),
    "speculators": (tiny.speculators_dflash, {}),
    "assistant": (tiny.assistant, {}),
}


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_k_m"])
@pytest.mark.parametrize("kind", list(OBSERVED))
def test_mixes_choose_as_upstream(kind: str, mix: str, deep: Path, tmp_path: Path) -> None:
    source = deep
    if kind != "target":
        make, options = DRAFTS[kind]
        source = make(tmp_path / kind, deep, **options)
    out = tmp_path / "out.gguf"
    convert(source, out, target=None if kind == "target" else deep, type=mix)
    rest, others = OBSERVED[kind]
    named = {name: form for form, names in others.items() for name in names}
    renamed = {"q4_k": "q5_k", "q5_0": "q5_1"} if mix == "q5_k_m" else {}
    found = types(out)
    assert named.keys() <= found.keys()
    expected = {name: named.get(name, rest) for name in found}
    assert found == {name: renamed.get(form, form) for name, form in expected.items()}
    with GGUF(out) as g:
        assert g["general.file_type"] == {"q4_k_m": 15, "q5_k_m": 17}[mix]


def test_every_mix_chooses_as_upstream(deep: Path, tmp_path: Path) -> None:
    """`tests/data/mixes.json` contains the types chosen by `llama-quantize`: source -> mix -> type
    -> part -> layers."""
    wide = {"layers": 18, "hidden": 256, "inter": 256}
    targets = {"wide": {"heads": 8, "kv": 2}, "experts": {"experts": 4, "expert_inter": 256}}
    observed = json.loads((ROOT / "tests" / "data" / "mixes.json").read_text())
    named = {m for m in policy.names() if policy.parse_type(m).overrides} | {"q3_k_s", "q5_k_s"}
    named -= {"q4_0", "q5_0"}  # mixes only with an imatrix, see `test_imatrix.py`
    for kind, mixes in observed.items():
        if kind in targets:
            source = tiny.target(tmp_path / kind, **wide, **targets[kind])
        else:
            make, options = DRAFTS[kind]
            source = make(tmp_path / kind, deep, **options)
        assert mixes.keys() == named
        for mix, wanted in mixes.items():
            pair = None if kind in targets else deep
            plan = convert(source, tmp_path / "x", target=pair, type=mix, dry_run=True).plan
            found = {r.name: r.type for r in plan.tensors if r.action == "copy"}
            expected = {
                f"blk.{i}.{part}.weight" if i else f"{part}.weight": form.upper()
                for form, parts in wanted.items()
                for part, layers in parts.items()
                for i in layers.split() or [""]
            }
            assert {n: t for n, t in found.items() if t not in ("F32", "F16")} == expected, mix


@pytest.mark.parametrize(
    ("asked", "name", "shape", "role", "expected", "why"),
    [
        ("q8_0", "blk.0.x.weight", (64, 64), "matrix", "q8_0", ""),
        ("q8_0", "blk.0.x.weight", (64,), "vector", "f32", "stay F32"),
        ("q8_0", "blk.0.x.weight", (64,), "matrix", "f32", "stay F32"),
        ("q8_0", "conf_proj.weight", (1, 64), "matrix", "f32", "stay F32"),
        ("q8_0", "blk.0.x.weight", (64, 48), "matrix", "f16", "48"),
        ("q8_0", "d2t", (64,), "index", "i64", "ids"),
        ("q8_0", "token_embd.weight", (512, 64), "embed", "q8_0", ""),
        ("q8_0", "blk.0.ffn_gate_inp.weight", (64, 64), "matrix", "f32", "routing"),
        ("q8_0", "blk.0.ffn_down_exps.scale", (64, 64), "matrix", "f32", "never"),
        ("q4_0", "token_embd.weight", (512, 256), "embed", "q6_k", "tied"),
        ("q4_0", "token_embd.weight", (512, 96), "embed", "q8_0", "96"),
        ("q4_k", "blk.0.x.weight", (64, 704), "matrix", "q5_0", "704"),
        ("q5_k", "blk.0.x.weight", (64, 2112), "matrix", "q5_1", "2112"),
        ("q6_k", "blk.0.x.weight", (64, 64), "matrix", "q8_0", "64"),
        ("q4_k", "blk.0.x.weight", (64, 48), "matrix", "f16", "48"),
        ("bf16", "token_embd.weight", (512, 48), "embed", "bf16", ""),
        ("q2_k", "blk.0.x.weight", (64, 704), "matrix", "q4_0", "704"),
        ("q3_k", "blk.0.x.weight", (64, 96), "matrix", "q4_0", "96"),
        ("iq4_xs", "blk.0.x.weight", (64, 704), "matrix", "iq4_nl", "704"),
        ("iq4_xs", "blk.0.x.weight", (64, 48), "matrix", "f16", "48"),
        ("iq4_nl", "token_embd.weight", (512, 256), "embed", "q6_k", "tied"),
    ],
)
def test_policy(
    asked: str, name: str, shape: tuple[int, ...], role: policy.Role, expected: str, why: str
) -> None:
    form, reason = Policy(policy.parse_type(asked), {name: shape}).choose(name, shape, role)
    assert form.name == expected and why in reason and bool(reason) == bool(why)


def test_types_chosen_by_tensor_name(full: Path, tmp_path: Path) -> None:
    patterns = ["blk.1.ffn=q8_0", r"^token_embd\.=q4_0", "attn_output=q6_k", "ffn=q5_0"]
    result = quantize(full, tmp_path / "a.gguf", "q3_k_s", tensor_types=patterns)
    found = types(tmp_path / "a.gguf")
    assert {found[n] for n in blocks("ffn_up", 1) | blocks("ffn_down", 1)} == {"q8_0"}
    assert {found[n] for n in blocks("ffn_up", *range(2, 12))} == {"q5_0"}
    assert found["token_embd"] == "q4_0" and found["blk.0.attn_q"] == "q3_k"
    assert found["blk.0.attn_output"] == "q8_0"  # rows of 32 do not divide
    assert next(r for r in result.plan.tensors if r.name == "token_embd.weight").note == "asked for"
    plain = Policy(policy.parse_type("bf16", ["x=q8_0"]), {"blk.0.x.weight": (64, 64)})
    assert plain.choose("blk.0.x.weight", (64, 64), "matrix")[0].name == "q8_0"
    for wrong, says in (
        ("x", "PATTERN=TYPE"),
        ("=q8_0", "PATTERN=TYPE"),
        ("ffn=q4_k_m", "q4_k_m"),
        ("ffn=iq2_xs", "iq2_xs"),
        ("(=q8_0", "regular"),
        ("mlp=q8_0", "no tensor"),
        ("attn_norm=q8_0", "only tensors that are never quantized"),
    ):
        with pytest.raises(UsageError, match=says):
            quantize(full, tmp_path / "b.gguf", "q8_0", tensor_types=[wrong])


def test_types_that_rows_do_not_divide_into_are_noted(full: Path, tmp_path: Path) -> None:
    """Both for `tensor_types` and for `type`. Tensors that have the type asked for are not."""
    asked = ["attn_output=q6_k", "blk.1.attn_q=q3_k"]
    noted = quantize(full, tmp_path / "a.gguf", "q8_0", tensor_types=asked).notes
    assert noted == [
        "attn_output: 10 tensors are Q8_0, not Q6_K: rows of 64 do not divide into blocks of 256",
        "attn_output: 2 tensors are Q8_0, not Q6_K: rows of 128 do not divide into blocks of 256",
    ]
    source = tiny.target(tmp_path / "t", layers=2, hidden=256, inter=96)
    why = "rows of 96 do not divide into blocks of 256"
    made = convert(source, tmp_path / "t.gguf", type="q3_k_s", tensor_types=["blk.0.ffn_down=q5_k"])
    downs = [note for note in made.notes if "rows of 96" in note]
    assert downs == [
        f"blk.0.ffn_down: 1 tensor is Q5_1, not Q5_K: {why}",
        f"q3_k_s: 1 tensor is Q4_0, not Q3_K: {why}",
    ]
    assert not convert(source, tmp_path / "b.gguf", type="bf16").notes


@pytest.mark.parametrize("type", ["q3_k", "q4_k", "q5_k"])
def test_names_that_llama_cpp_uses_for_mixes_are_noted(
    type: str, deep: Path, full: Path, tmp_path: Path
) -> None:
    """Its users expect the mix. Patterns name types there too."""
    note = f"{type}: one type for all layers; in llama.cpp {type.upper()} is the mix {type}_m"
    for of in (type.upper(), f"{type}_m", "q8_0"):
        asked = ["attn_q=q4_k"]
        made = quantize(full, tmp_path / "a.gguf", of, dry_run=True, tensor_types=asked)
        assert (note in made.notes) is (of == type.upper())
    assert note in convert(deep, tmp_path / "b.gguf", type=type, dry_run=True).notes


@pytest.mark.parametrize("kind", ["dspark", "dspark rnn", "p-eagle"])
def test_quantize_and_convert_choose_the_same_types(kind: str, deep: Path, tmp_path: Path) -> None:
    """A confidence head and a mask are vectors that are stored as matrices of one row."""
    make, options = CONVERSION[kind]
    draft, out = make(tmp_path / "draft", deep, **options), tmp_path / "bf16.gguf"
    convert(draft, out, target=deep, type="bf16")
    quantize(out, tmp_path / "a.gguf", "q4_k_m")
    convert(draft, tmp_path / "b.gguf", target=deep, type="q4_k_m")
    assert types(tmp_path / "a.gguf") == types(tmp_path / "b.gguf")


def test_norms_may_be_asked_for_as_f32(full: Path, tmp_path: Path) -> None:
    """They are F32 anyway; `validate --probe` asks for the type that each tensor has."""
    quantize(full, tmp_path / "a.gguf", "q8_0", tensor_types=["attn_norm=f32"])
    with GGUF(tmp_path / "a.gguf") as file:
        assert file.tensors["blk.0.attn_norm.weight"].format.name == "f32"


def test_which_layers_get_more_bits() -> None:
    """For 30, 35, 48 and 60 layers: the first and last eighth, and layers between."""
    assert [i for i in range(30) if policy.TensorPosition(i, 30, 1).more_bits] == [
        0,
        1,
        2,
        5,
        8,
        11,
        14,
        17,
        20,
        23,
        26,
        27,
        28,
        29,
    ]
    for n in (35, 42, 48, 60):
        chosen = {i for i in range(n) if policy.TensorPosition(i, n, 1).more_bits}
        assert {*range(n // 8), *range(7 * n // 8, n)} <= chosen and len(chosen) < n * 0.55


def test_an_untied_output_does_not_change_the_type_of_the_embedding() -> None:
    shapes = {"token_embd.weight": (512, 256), "output.weight": (512, 256)}
    choice = Policy(policy.parse_type("q4_k_m"), shapes)
    found = [choice.choose(n, shape, "embed")[0].name for n, shape in shapes.items()]
    assert found == ["q4_k", "q6_k"]


def test_names_of_types_and_mixes() -> None:
    mixes = ["q3_k_l", "q3_k_m", "q3_k_s", "q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s"]
    assert policy.names() == [*quant.writable_names(), *mixes]
    assert sorted(policy.names()) == _types.TYPES  # which --help lists without importing them
    assert policy.parse_type("Q4_K_M").file_type == 15
    with pytest.raises(UsageError, match="q4_k_m"):
        policy.parse_type("q4_k_l")


def test_types_that_are_only_read_can_be_timed() -> None:
    assert policy.readable_mix("IQ3_S").base is quant.get("iq3_s")
    assert policy.readable_mix("q3_k") == policy.parse_type("q3_k")
    ((pattern, form),) = policy.readable_mix("iq3_s", ["attn_v=q4_k"]).tensor_types
    assert pattern.search("blk.0.attn_v.weight") and form is quant.get("q4_k")
    with pytest.raises(UsageError, match="q4_k_m"):
        policy.readable_mix("q4_k_l")


@pytest.mark.parametrize("type", [f.name for f in sizes.FORMATS if f.quantized])
@pytest.mark.parametrize("allow", [False, True])
def test_types_without_a_dequantizer_are_named_with_a_way_out(
    type: str, allow: bool, full: Path, tmp_path: Path
) -> None:
    """A file of such a type cannot be requantized either, so that is not the advice."""
    file = faults.read(full)
    name = next(n for n in file.tensors if n.endswith("ffn_gate.weight"))
    shape, packed = file.tensors[name].shape, quant.get(type)
    data = bytes(packed.nbytes(shape, name))
    file.tensors[name] = replace(file.tensors[name], type=packed.type, data=data)
    path = file.write(tmp_path / "x.gguf")
    with pytest.raises(Unsupported) as error:
        quantize(path, tmp_path / "y.gguf", "q8_0", allow_requantize=allow)
    said = str(error.value)
    assert f"tensor {name}: type {type.upper()} has no dequantizer" in said
    assert "use a file of another type" in said.lower() and "requantize" not in said


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("ending", ["attn_q.weight", "attn_norm.weight"])
def test_f64_is_named_before_anything_is_written(
    ending: str, dry_run: bool, full: Path, tmp_path: Path
) -> None:
    file = faults.read(full)
    name = next(n for n in file.tensors if n.endswith(ending))
    data, f64 = bytes(8 * np.prod(file.tensors[name].shape)), quant.get("f64").type
    file.tensors[name] = replace(file.tensors[name], type=f64, data=data)
    path = file.write(tmp_path / "x.gguf")
    with pytest.raises(Unsupported, match=f"tensor {name}: type F64 has no dequantizer"):
        quantize(path, tmp_path / "y.gguf", "q8_0", dry_run=dry_run)


@pytest.mark.parametrize("type", ["q8_0", "q4_0", "q4_k_m"])
def test_quantized_files_need_permission(type: str, full: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    quantize(full, once, type)
    with pytest.raises(InputError, match=r"quantized already.*`allow_requantize`"):
        quantize(once, twice, "q5_k_m")
    assert not twice.exists()
    quantize(once, twice, "q5_k_m", allow_requantize=True)
    assert validate(twice).ok
    quantize(once, tmp_path / "same.gguf", type)  # nothing changes, so nothing is lost
    assert (tmp_path / "same.gguf").read_bytes() == once.read_bytes()


def test_routers_keep_their_type(tmp_path: Path) -> None:
    target = tiny.target(tmp_path / "t", experts=4)
    convert(target, tmp_path / "t.gguf", type="bf16")
    quantize(tmp_path / "t.gguf", tmp_path / "q.gguf", "q4_k_m")
    with GGUF(tmp_path / "t.gguf") as before, GGUF(tmp_path / "q.gguf") as after:
        routers = [n for n in before.tensors if n.endswith("ffn_gate_inp.weight")]
        assert routers
        assert all(before.tensors[n].type == after.tensors[n].type for n in routers)


@pytest.mark.parametrize("type", sample(["q4_0", "q5_1", "q4_k_m", "q5_k_m", "q6_k"], 2))
def test_quantized_drafts_do_not_change_the_text(type: str, deep: Path, tmp_path: Path) -> None:
    """The text of a quantized target with a quantized draft is that of plain decoding."""
    convert(deep, tmp_path / "t.gguf", type=type)
    draft = tiny.zlab_dflash(tmp_path / "z", deep, inter=256)
    convert(draft, tmp_path / "d.gguf", target=deep, type=type)
    assert validate(tmp_path / "d.gguf", tmp_path / "t.gguf", draft).ok
    prompt = list(range(200, 230))

    def text(with_draft: bool) -> list[int]:
        path = tmp_path / "d.gguf" if with_draft else None
        engine = Engine.load(tmp_path / "t.gguf", path, n_ctx=256)
        run = engine.generate(prompt, Options(n_predict=12, ignore_eos=True))
        return [i for cycle in run for i in cycle.tokens]

    assert text(True) == text(False)


def test_logits_differ_by_the_error_of_the_format(full: Path, tmp_path: Path) -> None:
    """The logits of a Q8_0 file differ little from BF16's, those of Q4_0 more."""
    quantize(full, tmp_path / "a.gguf", "q6_k")
    with GGUF(full) as a, GGUF(tmp_path / "a.gguf") as b:
        for name in ("blk.0.ffn_down.weight", "token_embd.weight"):
            want, got = a.array(name), b.array(name)
            assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_every_type_that_can_be_read_runs(full: Path, tmp_path: Path) -> None:
    """A target with a matrix of each type gives the text of a target with the same values in
    F32."""
    names = [n for n, f in quant.readable().items() if f.quantized]
    assert len(names) <= 2 * DEEP["layers"], "a type without a matrix: more layers"
    places = [f"blk.{i // 2}.ffn_{'up' if i % 2 else 'down'}.weight" for i in range(len(names))]
    texts = []
    for dequantized in (False, True):
        path = tmp_path / f"{dequantized}.gguf"
        with GGUF(full) as g:
            data = []
            for name, info in g.tensors.items():
                form, raw = info.format, g.raw(name)
                if name in places:
                    form = quant.get(names[places.index(name)])
                    raw = random_blocks(form.name, *info.shape)
                    if dequantized:
                        form, raw = quant.get("f32"), form.dequantize(raw)
                data.append(TensorData(name, info.shape, form.type, [raw]))
            write(path, {key: g.value(key) for key in g}, data)
        found = validate(path)
        assert not [f for f in found.failures if f.rule.id.startswith("G4-VAL")]
        engine = Engine.load(path, None, n_ctx=64)
        run = engine.generate([5, 6, 7], Options(n_predict=6, ignore_eos=True))
        texts.append([i for cycle in run for i in cycle.tokens])
    assert texts[0] == texts[1]


def test_losses(full: Path, tmp_path: Path) -> None:
    found = {}
    some = {f"{name}.weight" for name in blocks("ffn_down", *range(12))}
    for type in ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0"):
        quantize(full, tmp_path / f"{type}.gguf", type)
        report = losses(full, tmp_path / f"{type}.gguf")
        assert {r.difference.name for r in report} >= some
        found[type] = total(report)
    errors = [t.relative_rms for t in found.values() if t]
    assert errors == sorted(errors) and 0.004 < errors[0] < 0.006 < errors[-1] < 0.1
    bits = [t.bits for t in found.values() if t]
    assert bits == sorted(bits, reverse=True) and bits[0] == 8.5
    assert losses(full, full) == [] and total([]) is None


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (2, 0, 32), (0,)])
def test_a_report_leaves_out_tensors_without_values(shape: tuple[int, ...], tmp_path: Path) -> None:
    source, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    values = np.ones((2, 32), np.float16)
    data = [
        TensorData("x.weight", values.shape, quant.get("f16").type, [values]),
        TensorData("empty.weight", shape, quant.get("f16").type, []),
    ]
    write(source, {}, data)
    quantize(source, out, "q8_0")
    assert [r.difference.name for r in losses(source, out)] == ["x.weight"]


def test_report_on_the_command_line(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["quantize", str(full), str(tmp_path / "a.gguf"), "--type", "q4_k_m", "--report"]
    assert cli.run(args) == 0
    output = capsys.readouterr().out
    assert "relative RMS error" in output and "blk.0.ffn_down.weight" in output and "bits" in output
    assert cli.run([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = next(r for r in found["report"] if r["name"] == "blk.1.ffn_up.weight")
    assert row["type"] == "Q4_K" and row["bits_per_weight"] == 4.5 and row["source"] == "BF16"
    assert 0.03 < row["relative_rms"] < 0.1 and row["max_abs"] > 0
    assert 4.5 < found["report_total"]["bits_per_weight"] < 6.6
    assert cli.run([*args, "--dry-run"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("type", ["q4_0", "q5_0", "q8_0"])
def test_lost_scales_are_counted(type: str) -> None:
    """Blocks whose scale became zero count as lost, unless all their values were zero."""
    x = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    x[1:3] *= 1e-9
    x[4] = 0
    stats = scan.Stats()
    scan._blocks(quant.get(type).quantize(x).reshape(-1), quant.get(type), stats)
    assert stats.lost_blocks == 2 and not stats.zero


def test_nvfp4_weights_with_factors_keep_their_type(full: Path, tmp_path: Path) -> None:
    """With another type g4spec would refuse the factors; weights without them are quantized."""
    path = with_nvfp4(full, tmp_path / "nvfp4.gguf")
    with pytest.raises(Unsupported, match=r"attn_q.weight is multiplied by .*attn_q.scale"):
        quantize(path, tmp_path / "out.gguf", "q8_0", allow_requantize=True)
    plain = TensorData("blk.0.ffn_down_exps.weight", (2, 1, 64), 40, [bytes(72)])
    gains = TensorData("blk.0.ffn_down_exps.scale", (2,), 0, [bytes(8)])
    write(tmp_path / "experts.gguf", {"general.architecture": string("gemma4")}, [plain, gains])
    quantize(tmp_path / "experts.gguf", tmp_path / "q8.gguf", "q8_0", allow_requantize=True)
    with GGUF(tmp_path / "q8.gguf") as file:
        assert file.tensors[plain.name].format.name == "q8_0"
