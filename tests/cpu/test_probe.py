"""`validate --probe` finds faults that no rule can see, and names them by their cost in
acceptance."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from g4spec.cli import run
from g4spec.convert import convert
from g4spec.gguf import GGUF, ValueType
from g4spec.measure import draft_probe, draft_variants, tensor_changes
from g4spec.measure.prompts import prompts
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from tests.support import faults, tiny, tiny_drafts

TINY = Path(__file__).parents[2] / "examples" / "tiny"
GATE, UP = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    convert(TINY / "target", folder / "target.gguf")
    convert(TINY / "dflash", folder / "dflash.gguf", target=TINY / "target")
    return folder


def probed(
    family: Path, draft: Path, monkeypatch: Any, keep: tuple[str, ...]
) -> draft_probe.ProbeResult:
    """Run a short probe of only the settings whose name begins with one of `keep`; tensors are
    tested only if a test replaces `better_tensors`."""
    if draft_probe.better_tensors is tensor_changes.better_tensors:
        monkeypatch.setattr(draft_probe, "better_tensors", lambda *args: iter([]))
    every = draft_probe.variants
    monkeypatch.setattr(
        draft_probe,
        "variants",
        lambda file: [(name, kv) for name, kv in every(file) if name.startswith(keep)],
    )
    return draft_probe.probe(family / "target.gguf", draft, n_predict=24, count=1)


def test_the_costly_setting_is_named(family: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = faults.read(family / "dflash.gguf")
    file.set("dflash.target_layers", ValueType.ARRAY, [1, 3, 4], ValueType.I32)
    draft = file.write(tmp_path / "x.gguf")
    settings = tuple(f"dflash.target_layers = {ids}" for ids in ([2, 3, 4], [2, 4, 5]))
    found = probed(family, draft, monkeypatch, settings)
    assert found.better[0] == "dflash.target_layers = [2, 4, 5]", found.json()
    (finding,) = found.findings
    assert finding.where == "dflash.target_layers" and "[1, 3, 4]" in str(finding.found)
    assert found.present["dflash.rope.freq_base"] == "1e+06"
    assert not found.ok
    assert len(found.run.shares()) == 15


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [("target_layers", [3, 4, 5], "[2, 4, 5]"), ("block_size", 8, "16")],
)
def test_single_layer_ids_and_halved_blocks_are_named(
    family: Path, tmp_path: Path, monkeypatch: Any, key: str, wrong: Any, right: str
) -> None:
    """Both leave more tokens per step than published drafts reach."""
    file = faults.read(family / "dflash.gguf")
    item = ValueType.I32 if isinstance(wrong, list) else None
    kind = ValueType.ARRAY if item else ValueType.U32
    file.set(f"dflash.{key}", kind, wrong, *([item] if item else []))
    draft = file.write(tmp_path / "x.gguf")
    found = probed(family, draft, monkeypatch, (f"dflash.{key} = {right}",))
    assert found.run.per_step > found.reached
    (finding,) = found.findings
    assert finding.where == f"dflash.{key}" and str(finding.expected).startswith(right)


def test_a_missing_rope_base_is_a_setting(family: Path, tmp_path: Path) -> None:
    file = faults.read(family / "dflash.gguf")
    del file.kv["dflash.rope.freq_base"]
    with GGUF(file.write(tmp_path / "x.gguf")) as draft:
        assert "dflash.rope.freq_base = 1e+06" in dict(draft_variants.variants(draft))
        assert draft_variants.present_values(draft)["dflash.rope.freq_base"] == "no value"


def test_impossible_settings_are_left_out(family: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = faults.read(family / "dflash.gguf")
    file.set("dflash.target_layers", ValueType.ARRAY, [2, 5, 6], ValueType.I32)
    draft = file.write(tmp_path / "x.gguf")
    found = probed(family, draft, monkeypatch, ("dflash.target_layers = [3, 6, 7]",))
    assert not found.others


def test_the_source_shows_what_a_wrong_tensor_costs(family: Path, tmp_path: Path) -> None:
    """The file still reaches more tokens per step than published drafts."""
    file = faults.read(family / "dflash.gguf")
    fault = {f"{f.where}: {f.name}": f for f in faults.faults(file)}[
        "blk.2.attn_output.weight: halved"
    ]
    draft = fault.plant(file).write(tmp_path / "x.gguf")
    pair = family / "target.gguf", draft, TINY / "dflash"
    found = draft_probe.probe(*pair, n_predict=24, count=1)
    assert found.reference is not None and found.run.per_step > found.reached
    (finding,) = found.findings
    assert finding.where == "acceptance" and "at position" in str(finding.found)
    assert f"{found.reference.per_step:.2f} tokens per step" in str(finding.expected)
    assert found.loss >= draft_probe.LOSS and not found.others


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "f16"])
def test_the_reference_equals_an_intact_file(family: Path, tmp_path: Path, kind: str) -> None:
    """It has the types of the file, so that rounding is no loss."""
    draft = tmp_path / "draft.gguf"
    convert(TINY / "dflash", draft, target=TINY / "target", type=kind)
    with GGUF(draft) as file:
        path = draft_variants.converted(file, TINY / "dflash", TINY / "target", tmp_path)
        with GGUF(path) as again:
            assert {n: again.raw(n).tobytes() for n in again.tensors} == {
                n: file.raw(n).tobytes() for n in file.tensors
            }


def test_a_gguf_source_is_the_reference(family: Path, tmp_path: Path) -> None:
    with GGUF(family / "dflash.gguf") as file:
        same = draft_variants.converted(
            file, family / "dflash.gguf", family / "target.gguf", tmp_path
        )
    assert same == family / "dflash.gguf"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("blk.2.attn_output.weight: halved", "blk.2.attn_output.weight * 2"),
        ("blk.2.ffn_up.weight: rows permuted", "blk.2.ffn_norm.weight * 0.5"),
        ("blk.0.ffn_gate.weight: exchanged with ffn_up", f"{GATE} <-> {UP}"),
        (None, None),
    ],
)
def test_wrong_values_of_tensors_are_found_without_the_source(
    family: Path, tmp_path: Path, fault: str | None, named: str | None
) -> None:
    file, draft = faults.read(family / "dflash.gguf"), family / "dflash.gguf"
    if fault:
        planted = {f"{f.where}: {f.name}": f for f in faults.faults(file)}[fault]
        draft = planted.plant(file).write(tmp_path / "x.gguf")
    with Engine.load(family / "target.gguf", draft) as engine:
        texts = [p.encode(engine.tokenizer) for p in prompts(engine.tokenizer, ["maths"], 2)]
        *_, found = tensor_changes.better_tensors(engine, texts, 32)
        assert (str(found[0].change) if found else None) == named
        assert all(engine.draft.w[f"blk.{i}.ffn_norm.weight"].mean() > 0 for i in range(3))
        assert "propose" not in vars(engine.draft)


@pytest.mark.parametrize(
    "kind",
    [
        tiny_drafts.speculators_dspark,
        tiny_drafts.eagle3,
        partial(tiny_drafts.eagle3, depths=4),
        tiny_drafts.zlab_dflash2,
    ],
)
def test_testing_tensors_does_not_disturb_the_draft(tmp_path: Path, kind: Any) -> None:
    source = kind(tmp_path / "draft", tiny.target(tmp_path / "target"))
    convert(tmp_path / "target", tmp_path / "target.gguf")
    convert(source, tmp_path / "draft.gguf", target=tmp_path / "target")
    with Engine.load(tmp_path / "target.gguf", tmp_path / "draft.gguf") as engine:
        options = Options(12, draft_max=engine.draft.max_tokens, ignore_eos=True)

        def cycles() -> list[Any]:
            return [(c.tokens, c.drafted) for c in engine.generate([2, 5, 9], options)]

        before = cycles()
        base, losses = list[float](), defaultdict[Any, list[float]](list)
        text = [2, 5, 9, *(token for tokens, _ in before for token in tokens)]
        with tensor_changes._changed(engine.draft, text, base, losses):
            assert cycles() == before
        assert losses and all(len(values) == len(base) for values in losses.values())
        assert cycles() == before


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        (
            "blk.2.attn_output.weight: halved",
            tensor_changes.TensorChange("blk.2.attn_output.weight", 2.0),
        ),
        (
            "blk.0.ffn_gate.weight: exchanged with ffn_up",
            tensor_changes.TensorChange(GATE, other=UP),
        ),
    ],
)
def test_the_changed_tensor_is_measured_and_named(
    family: Path,
    tmp_path: Path,
    monkeypatch: Any,
    fault: str,
    change: tensor_changes.TensorChange,
) -> None:
    file = faults.read(family / "dflash.gguf")
    planted = {f"{f.where}: {f.name}": f for f in faults.faults(file)}
    draft = planted[fault].plant(file).write(tmp_path / "x.gguf")
    best = tensor_changes.BetterTensor(change, 0.2, 6.0)
    monkeypatch.setattr(draft_probe, "better_tensors", lambda *args: iter([[best]]))
    found = probed(family, draft, monkeypatch, ("no setting",))
    assert [*found.others] == [str(change)]
    (finding,) = found.findings
    assert finding.where == change.name and change.action in str(finding.found)
    json.dumps(found.json())


def test_a_changed_tensor_is_written(family: Path, tmp_path: Path) -> None:
    with GGUF(family / "dflash.gguf") as file:
        change = tensor_changes.TensorChange(GATE, other=UP)
        path = draft_variants.write_changed(file, {}, tmp_path / "x.gguf", change)
        with GGUF(path) as other:
            assert (other.array(GATE) == file.array(UP)).all()
            assert (other.array(UP) == file.array(GATE)).all()
            assert {*other.tensors} == {*file.tensors}


COUNTS = draft_probe.AcceptanceCounts((10, 10), (9, 6))
LOW = draft_probe.AcceptanceCounts((10, 10), (8, 2))


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (draft_probe.ProbeResult("dflash", 2.08, COUNTS, COUNTS), 0),
        (draft_probe.ProbeResult("dflash", 1.9, LOW, COUNTS), 1),
        (draft_probe.ProbeResult("dflash", 2.08, LOW), 1),
        (
            draft_probe.ProbeResult(
                "dflash", 1.9, LOW, others={"key = 2": COUNTS}, present={"key": "7"}
            ),
            1,
        ),
    ],
)
def test_summary_and_exit_code_agree(
    family: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
    result: draft_probe.ProbeResult,
    code: int,
) -> None:
    monkeypatch.setattr(draft_probe, "probe", lambda *args, **kw: result)
    line = ["validate", str(family / "dflash.gguf"), "--target", str(family / "target.gguf")]
    assert run([*line, "--probe"]) == code
    out, err = capsys.readouterr()
    assert f"tokens per step; acceptance by position: {result.run.shares()[0]:.0%}" in out
    last = (err if code else out).splitlines()[-1]
    assert last.endswith(f"probe: {code} error{'s' * (code != 1)}")
    assert (out + err).count(f"; probe: {code} error") == 1, "the summary, once"
    assert out.count("error PROBE") == code
    assert run([*line, "--probe", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] == (code == 0) == (not printed["probe"]["findings"])


def test_no_setting_improves_a_correct_draft(family: Path, monkeypatch: Any) -> None:
    found = probed(family, family / "dflash.gguf", monkeypatch, ("dflash.rope", "dflash.emb"))
    assert found.ok, found.json()
    assert len(found.others) == 2
    json.dumps(found.json())


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_ctrl_c_shows_partial_results(
    family: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    """Each file is probed with 3 texts; Ctrl-C comes after `after` of them."""
    variants, calls = draft_probe.variants, list[tuple[int, int]]()
    monkeypatch.setattr(draft_probe, "variants", lambda file: list(variants(file))[:2])

    def press(done: int, total: int) -> None:
        calls.append((done, total))
        if done == after:
            raise KeyboardInterrupt

    def probe() -> draft_probe.ProbeResult:
        pair = family / "target.gguf", family / "dflash.gguf"
        return draft_probe.probe(*pair, n_predict=4, count=1, progress=press)

    if not after:
        with pytest.raises(KeyboardInterrupt):
            probe()
        return
    found = probe()
    assert calls == [(n, 12) for n in range(after + 1)]  # the last 3 test the values of tensors
    assert found.interrupted == (
        f"{min(after, 3)} of 3 texts of the unchanged draft and 0 of 2 changes were measured"
    )
    monkeypatch.setattr(draft_probe, "probe", lambda *args, **kw: found)
    line = ["validate", str(family / "dflash.gguf"), "--target", str(family / "target.gguf")]
    assert run([*line, "--probe"]) == 130
    out, err = capsys.readouterr()
    assert "tokens per step" in out and f"interrupted: {found.interrupted}" in err


def test_a_useless_draft_names_the_layer_that_fits_worst() -> None:
    change = tensor_changes.TensorChange("blk.1.attn_q_norm.weight", 0.5)
    better = tensor_changes.BetterTensor(change, 0.2, 4.0)
    useless = draft_probe.AcceptanceCounts((10, 10), (1, 0))
    found = draft_probe.ProbeResult("dflash", 2.08, useless, tensors=[better])
    (finding,) = found.findings
    assert finding.where == "acceptance" and change.name in finding.fix
    json.dumps(found.json())


def test_a_source_of_another_model_is_no_reference(
    family: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report says that the source is wrong; the probe runs without it."""
    sources = list[Any]()

    def probe(target: Path, draft: Path, source: Path | None, **kw: Any) -> Any:
        sources.append(source)
        return draft_probe.ProbeResult("dflash", 2.08, COUNTS)

    monkeypatch.setattr(draft_probe, "probe", probe)
    line = ["validate", str(family / "dflash.gguf"), "--target", str(family / "target.gguf")]
    assert run([*line, "--probe", "--against", str(TINY / "target")]) == 1
    assert run([*line, "--probe", "--against", str(TINY / "dflash")]) == 0
    assert sources == [None, TINY / "dflash"]
    assert "G4-CMP-001" in capsys.readouterr().out


def test_the_command_needs_a_target(family: Path) -> None:
    assert run(["validate", str(family / "dflash.gguf"), "--probe"]) == 2


def test_a_target_in_place_of_the_draft_is_an_error_before_the_report(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(family / "target.gguf")
    assert run(["validate", target, "--probe", "--target", target]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "is not a draft" in error and "found Gemma 4 target" in error
    assert f"`g4spec validate DRAFT.gguf --probe --target {target}`" in error
    file = faults.read(family / "dflash.gguf")
    file.set("general.architecture", ValueType.STRING, "llama")
    other = str(file.write(tmp_path / "x.gguf"))
    assert run(["validate", other, "--probe", "--target", target]) == 2
    assert "found architecture 'llama'. Leave out --probe" in capsys.readouterr().err
