"""A draft records which target it was converted with, and another target causes a warning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from g4spec.convert import convert, provenance, quantize
from g4spec.gguf import GGUF
from g4spec.validate import validate
from tests.support import tiny

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("revision") / "target")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return tiny.zlab_dflash(target.parent / "draft", target)


def recorded(draft: Path, target: Path, out: Path) -> dict[str, Any]:
    """Return the metadata of the draft that describe its target."""
    convert(draft, out, target=target)
    with GGUF(out) as file:
        return {k: file[k] for k in file if k.startswith("g4spec.target.")}


def warned(draft: Path, target: Path) -> bool:
    return "G4-PAIR-015" in {f.rule.id for f in validate(draft, target).failures}


def changed(target: Path, folder: Path, row: int) -> Path:
    """Copy the checkpoint with a slightly changed row of one matrix."""
    shutil.copytree(target, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("layers.0.mlp.gate_proj.weight"))
    tensors[name][row] = -tensors[name][row]
    save_file(tensors, path, {"format": "pt"})
    return folder


def test_every_file_of_one_checkpoint_is_the_same_target(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    """The folder, its GGUF and a quantized GGUF count as the same target: no combination warns."""
    convert(target, tmp_path / "bf16.gguf", type="bf16")
    quantize(tmp_path / "bf16.gguf", tmp_path / "q4.gguf", "q4_k_m")
    sides = (target, tmp_path / "bf16.gguf", tmp_path / "q4.gguf")
    metadata = [recorded(draft, side, tmp_path / f"{i}.gguf") for i, side in enumerate(sides)]
    assert metadata[0] == metadata[1] == metadata[2]
    assert metadata[0][provenance.TARGET_WEIGHTS].startswith("rows-sha256:")
    assert metadata[0][provenance.TARGET_SOURCE] == "target"
    for side in sides[1:]:
        assert not any(warned(tmp_path / f"{i}.gguf", side) for i in range(3))


def test_spelling_shards_and_small_files_do_not_count(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    want = recorded(draft, target, tmp_path / "a.gguf")[provenance.TARGET_WEIGHTS]
    other = tiny.target(tmp_path / "target", nested=False, shards=3)
    (other / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert recorded(draft, other, tmp_path / "b.gguf")[provenance.TARGET_WEIGHTS] == want


def test_another_revision_is_reported(target: Path, draft: Path, tmp_path: Path) -> None:
    with GGUF(_gguf(target, tmp_path / "t.gguf")) as file:
        height = file.shapes()["blk.0.ffn_gate.weight"][0]
    other = changed(target, tmp_path / "other", height // 3)
    recorded(draft, target, tmp_path / "d.gguf")
    assert warned(tmp_path / "d.gguf", _gguf(other, tmp_path / "o.gguf"))
    assert not warned(tmp_path / "d.gguf", tmp_path / "t.gguf")
    report = validate(tmp_path / "d.gguf", tmp_path / "o.gguf")
    finding = next(f.finding for f in report.failures if f.rule.id == "G4-PAIR-015")
    assert "target (rows-sha256" in str(finding.expected)
    assert "other (rows-sha256" in str(finding.found)


def test_an_edit_between_the_samples_is_not_seen(target: Path, draft: Path, tmp_path: Path) -> None:
    """Equal digests are no proof of equal files, because only samples are read."""
    other = changed(target, tmp_path / "other", 0)
    mine = recorded(draft, target, tmp_path / "a.gguf")[provenance.TARGET_WEIGHTS]
    assert recorded(draft, other, tmp_path / "b.gguf")[provenance.TARGET_WEIGHTS] == mine


def test_no_warning_if_a_digest_is_missing(target: Path, draft: Path, tmp_path: Path) -> None:
    """Files of other tools, and drafts converted with a target folder without weights."""
    bare = tmp_path / "target"
    shutil.copytree(target, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    metadata = recorded(draft, bare, tmp_path / "bare.gguf")
    assert (
        provenance.TARGET_WEIGHTS not in metadata and metadata[provenance.TARGET_SOURCE] == "target"
    )
    other = changed(target, tmp_path / "other", 5)
    assert not warned(tmp_path / "bare.gguf", _gguf(other, tmp_path / "o.gguf"))


def test_a_partial_target_is_enough_to_convert_a_draft(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    half = tiny.target(tmp_path / "half", shards=3)
    next(half.glob("*-00002-*.safetensors")).unlink()
    assert provenance.TARGET_WEIGHTS not in recorded(draft, half, tmp_path / "d.gguf")


def test_the_commit_in_a_hub_cache_is_recorded(target: Path, draft: Path, tmp_path: Path) -> None:
    place = tmp_path / "models--org--model" / "snapshots" / SHA
    shutil.copytree(target, place)
    metadata = recorded(draft, place, tmp_path / "d.gguf")
    assert metadata[provenance.TARGET_SOURCE] == "org/model"
    assert metadata[provenance.TARGET_REVISION] == SHA
    convert(place, tmp_path / "t.gguf")
    assert recorded(draft, tmp_path / "t.gguf", tmp_path / "e.gguf") == metadata


def _gguf(folder: Path, out: Path) -> Path:
    convert(folder, out)
    return out
