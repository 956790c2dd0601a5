"""Metadata compared with the source, rules that could not be checked, and planted faults."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4spec.cli import run
from g4spec.convert import convert
from g4spec.gguf import GGUF, ValueType, array, boolean, string
from g4spec.models.spec import CONTROL, NORMAL, USER_DEFINED
from g4spec.validate import Report, validate
from g4spec.validate.rule import ERROR
from tests.support import faults, tiny, tiny_drafts
from tests.support.rewritten_files import rewritten, same

TINY = Path(__file__).parents[2] / "examples" / "tiny"
DRAFTS = ("dflash", "dflash-speculators", "assistant")
SAMPLE = 10  # faults of each kind; all of them are planted by benchmarks/cpu_faults.py
CHANGES: dict[str, tuple[str, ValueType, Any, ValueType | None]] = {
    "target layers": ("dflash.target_layers", ValueType.ARRAY, [1, 3, 4], ValueType.I32),
    "rotation base": ("dflash.rope.freq_base", ValueType.F32, 1e4, None),
    "window": ("dflash.attention.sliding_window", ValueType.U32, 128, None),
    "epsilon": ("dflash.attention.layer_norm_rms_epsilon", ValueType.F32, 1e-5, None),
    "block size": ("dflash.block_size", ValueType.U32, 8, None),
    "context": ("dflash.context_length", ValueType.U32, 4096, None),
    "pattern": (
        "dflash.attention.sliding_window_pattern",
        ValueType.ARRAY,
        [True, False, True],
        ValueType.BOOL,
    ),
    "target pattern": (
        "gemma4.attention.sliding_window_pattern",
        ValueType.ARRAY,
        [True, False, True, True, False, True],
        ValueType.BOOL,
    ),
}
"""Each of these changes once passed with 0 errors and 0 warnings."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    convert(TINY / "target", folder / "target.gguf")
    for name in DRAFTS:
        convert(TINY / name, folder / f"{name}.gguf", target=TINY / "target")
    return folder


def changed(family: Path, out: Path, change: str) -> tuple[str, Path]:
    """Return the kind of file that a change of CHANGES applies to, and a changed file."""
    key, type, data, item = CHANGES[change]
    kind = "target" if key.startswith("gemma4.") else "dflash"
    file = faults.read(family / f"{kind}.gguf")
    file.set(key, type, data, item)
    return kind, file.write(out)


def _validate(family: Path, kind: str, path: Path, source: bool = True) -> Report:
    target = None if kind == "target" else family / "target.gguf"
    return validate(path, target, TINY / kind if source else None)


@pytest.mark.parametrize("change", CHANGES)
def test_each_single_change_is_an_error(family: Path, tmp_path: Path, change: str) -> None:
    kind, path = changed(family, tmp_path / "x.gguf", change)
    report = _validate(family, kind, path)
    key = CHANGES[change][0]
    found = {f.rule.id for f in report.failures if f.finding.where.startswith(key)}
    assert "G4-CMP-009" in found
    assert not report.ok


@pytest.mark.parametrize("text", ["<0x94>\0", "a" * (20 << 20)])
def test_a_changed_token_is_found_in_little_memory(family: Path, tmp_path: Path, text: str) -> None:
    """A NUL at the end of a token was lost in the comparison; a token of 20 MB took 40 GiB."""
    file = faults.read(family / "target.gguf")
    with GGUF(family / "target.gguf") as g:
        tokens = list(g["tokenizer.ggml.tokens"])
    at = tokens.index("<0x94>")
    tokens[at] = text
    file.set("tokenizer.ggml.tokens", ValueType.ARRAY, tokens, ValueType.STRING)
    report = _validate(family, "target", file.write(tmp_path / "x.gguf"))
    found = [f.finding.where for f in report.failures if f.rule.id == "G4-CMP-009"]
    assert found == [f"tokenizer.ggml.tokens[{at}]"]


def test_a_tensor_that_is_computed_must_be_there(tmp_path: Path) -> None:
    """Without `rope_freqs` a DeepSpec draft is valid, and rotates all of each head."""
    base = tiny.target(tmp_path / "base")
    source = tiny_drafts.deepspec_dspark(tmp_path / "draft", base)
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    convert(base, target)
    convert(source, draft, target=base)
    file = faults.read(draft)
    assert validate(draft, target, source).ok
    del file.tensors["rope_freqs.weight"]
    report = validate(file.write(tmp_path / "x.gguf"), target, source)
    assert [f.finding.where for f in report.failures if f.rule.id == "G4-CMP-010"] == [
        "rope_freqs.weight"
    ]


@pytest.mark.parametrize("kind", ["target", "dflash"])
def test_a_dropped_file_type_is_named(family: Path, tmp_path: Path, kind: str) -> None:
    file = faults.read(family / f"{kind}.gguf")
    number = file.kv.pop("general.file_type").data
    report = _validate(family, kind, file.write(tmp_path / "x.gguf"))
    found = [f.finding for f in report.failures if f.finding.where == "general.file_type"]
    assert [(f.expected, f.found) for f in found] == [(number, "nothing")] and not report.ok


@pytest.mark.parametrize("kind", ["target", *DRAFTS])
def test_a_faithful_file_has_the_metadata_of_its_source(family: Path, kind: str) -> None:
    report = _validate(family, kind, family / f"{kind}.gguf")
    assert report.ok
    assert "G4-CMP-009" in report.checked
    assert not report.skipped


def _by_llama_cpp(path: Path, out: Path) -> Path:
    """Write a file without the keys that only this program writes."""
    file = faults.read(path)
    ours = "dflash.rope.dimension_count", "dflash.attention.causal", "dflash.embedding_scale"
    for key in [key for key in file.kv if key.startswith(("g4spec.", *ours))]:
        del file.kv[key]
    return file.write(out)


def test_a_conversion_by_llama_cpp_is_faithful_too(family: Path, tmp_path: Path) -> None:
    """Each target that llama.cpp converted had an error: no g4spec.stop_ids. Further chat templates
    are in keys that only llama.cpp writes."""
    file = faults.read(_by_llama_cpp(family / "target.gguf", tmp_path / "x.gguf"))
    file.set("tokenizer.chat_template.tool_use", ValueType.STRING, "{{ x }}")
    file.set("tokenizer.chat_templates", ValueType.ARRAY, ["tool_use"], ValueType.STRING)
    report = _validate(family, "target", file.write(tmp_path / "x.gguf"))
    assert not report.failures and not report.skipped


def test_differences_of_a_tokenizer_by_llama_cpp_are_those_of_a_run(
    family: Path, tmp_path: Path
) -> None:
    """Accept other token types of stop tokens, which are corrected when they are read, and
    `cls_token_id`, which nothing reads."""
    file = faults.read(_by_llama_cpp(family / "target.gguf", tmp_path / "x.gguf"))
    tokens, kinds = (file.kv[f"tokenizer.ggml.{name}"].data for name in ("tokens", "token_type"))
    kinds = [*kinds]
    kinds[tokens.index("<eos>")] = NORMAL
    file.set("tokenizer.ggml.token_type", ValueType.ARRAY, kinds, ValueType.I32)
    file.set("tokenizer.ggml.cls_token_id", ValueType.U32, 1)
    report = _validate(family, "target", file.write(tmp_path / "x.gguf"))
    assert report.ok
    kinds[kinds.index(USER_DEFINED)] = NORMAL
    file.set("tokenizer.ggml.token_type", ValueType.ARRAY, kinds, ValueType.I32)
    file.set("tokenizer.ggml.suppress_tokens", ValueType.ARRAY, [7], ValueType.I32)
    report = _validate(family, "target", file.write(tmp_path / "x.gguf"))
    fixes = [str(f.finding.fix) for f in report.failures if f.rule.id == "G4-CMP-009"]
    assert len(fixes) == 2 and "tokenized differently" in fixes[0] and "never chosen" in fixes[1]


LACKING = {
    "dflash": {
        "dflash.attention.causal",
        "dflash.embedding_scale",
        "g4spec.dflash.layer_causal",
    },
    "dflash-speculators": {
        "dflash.attention.causal",
        "g4spec.dflash.layer_causal",
        "g4spec.dflash.window_from_anchor",
    },
}


@pytest.mark.parametrize("kind", LACKING)
def test_a_draft_by_llama_cpp_lacks_what_it_computes_with(
    family: Path, tmp_path: Path, kind: str
) -> None:
    """The origin of a draft, which no other program records, hid the keys that matter, and so did
    keys whose value is the one that a file without them has."""
    path = _by_llama_cpp(family / f"{kind}.gguf", tmp_path / "x.gguf")
    report = _validate(family, kind, path)
    assert {f.finding.where for f in report.failures if f.rule.severity is ERROR} == LACKING[kind]


def test_a_draft_of_a_target_by_ollama_has_the_usual_tokenizer(
    family: Path, tmp_path: Path
) -> None:
    keys = {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("gemma4"),
        "tokenizer.ggml.add_bos_token": boolean(False),
    }
    target = rewritten(family / "target.gguf", tmp_path / "ollama.gguf", same, keys)
    rules = ["G4-PAIR-011", "G4-PAIR-017"]
    report = validate(family / "dflash.gguf", target, only=rules)
    assert [f.where for f in report.findings] == ["tokenizer.ggml.pre"]
    with GGUF(family / "dflash.gguf") as file:
        types = np.array(file["tokenizer.ggml.token_type"])
    types[300:310] = CONTROL
    other = {"tokenizer.ggml.token_type": array(ValueType.I32, types)}
    draft = rewritten(family / "dflash.gguf", tmp_path / "draft.gguf", same, other)
    report = validate(draft, target, only=rules)
    assert {f.where for f in report.findings} == {"tokenizer.ggml.pre", *other}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    convert(tiny.target(folder / "base"), folder / "target.gguf")
    return folder


@pytest.mark.parametrize("make", [tiny_drafts.speculators_dspark, tiny_drafts.eagle3])
def test_drafts_by_llama_cpp_that_lack_nothing_have_no_errors(
    pair: Path, tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    """A draft without windows, whose layers are not causal. For EAGLE-3, upstream's converter
    describes Gemma's tokenizer as that of Llama; nothing is computed from it."""
    source = make(tmp_path / "draft", pair / "base")
    convert(source, tmp_path / "ours.gguf", target=pair / "base")
    file = faults.read(_by_llama_cpp(tmp_path / "ours.gguf", tmp_path / "x.gguf"))
    if make is tiny_drafts.eagle3:
        file.set("tokenizer.ggml.model", ValueType.STRING, "llama")
        file.set("tokenizer.ggml.pre", ValueType.STRING, "default")
        for name in ("merges", "add_space_prefix", "add_bos_token"):
            del file.kv[f"tokenizer.ggml.{name}"]
    report = validate(file.write(tmp_path / "x.gguf"), pair / "target.gguf", source)
    assert [f for f in report.failures if f.rule.severity is ERROR] == []


def test_a_stop_token_that_only_the_source_names(family: Path, tmp_path: Path) -> None:
    path = _by_llama_cpp(family / "target.gguf", tmp_path / "x.gguf")
    source = tmp_path / "source"
    shutil.copytree(TINY / "target", source)
    generation = json.loads((source / "generation_config.json").read_text())
    generation["eos_token_id"] = [*generation["eos_token_id"], 7]
    (source / "generation_config.json").write_text(json.dumps(generation))
    report = validate(path, None, source)
    assert [f.finding.where for f in report.failures] == ["g4spec.stop_ids"]


def test_a_requantized_file_has_the_metadata_of_its_source(family: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    convert(family / "dflash.gguf", path, type="q8_0")
    report = validate(path, family / "target.gguf", family / "dflash.gguf")
    assert report.ok
    changed(family, path, "rotation base")
    report = validate(path, family / "target.gguf", family / "dflash.gguf")
    assert "G4-CMP-009" in {f.rule.id for f in report.failures}


def test_an_unknown_layer_pattern_fails_without_a_source(family: Path, tmp_path: Path) -> None:
    kind, path = changed(family, tmp_path / "x.gguf", "target pattern")
    report = _validate(family, kind, path, source=False)
    assert not report.ok
    assert "G4-KEY-013" in {f.rule.id for f in report.failures}
    assert report.unable


def test_unchecked_rules_are_reported(family: Path, capsys: Any) -> None:
    draft, target = str(family / "dflash.gguf"), str(family / "target.gguf")
    assert run(["validate", draft]) == 0
    assert "NOT CHECKED" in capsys.readouterr().out
    assert run(["validate", draft, "--strict"]) == 1
    assert "--target" in capsys.readouterr().err
    assert run(["validate", draft, "--strict", "--target", target]) == 0


def test_rules_that_cannot_be_checked_fail(family: Path, tmp_path: Path, capsys: Any) -> None:
    """A file with features that g4spec does not support must not pass with only a warning."""
    file = faults.read(family / "target.gguf")
    file.tensors["blk.0.attn_qkv.weight"] = file.tensors["blk.0.attn_norm.weight"]
    path = file.write(tmp_path / "x.gguf")
    report = validate(path)
    assert report.ok
    assert set(report.unable.values()) == {"the metadata does not describe a known model"}
    assert run(["validate", str(path)]) == 1


def test_planted_faults_are_reported(family: Path, tmp_path: Path) -> None:
    """For a seeded sample: all faults with the source, more than half of them without."""
    named = {True: 0, False: 0}
    for kind in ("target", *DRAFTS):
        good, pair = family / f"{kind}.gguf", None if kind == "target" else family / "target.gguf"
        file = faults.read(good)
        for source in (TINY / kind, None):
            known = faults.findings(validate(good, pair, source))
            for fault in random.Random(7).sample(faults.faults(file), SAMPLE):
                reported = faults.named(file, fault, tmp_path / "x.gguf", known, pair, source)
                assert reported or source is None, (kind, fault.where, fault.name)
                named[source is not None] += reported
    assert named[True] == 4 * SAMPLE
    assert 0.5 < named[False] / (4 * SAMPLE) < 1
