"""Invalid input stops a conversion before anything is written; the error says what was expected and
found."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from g4spec.convert import convert, convert_cached, detect, quantize
from g4spec.convert.unchanged import file_stamps
from g4spec.errors import EnvironmentProblem, G4Error, InputError, Unsupported, UsageError
from g4spec.gguf import GGUF, folder_hint, string, write
from g4spec.measure import text_chunks
from g4spec.runtime.engine import Engine
from g4spec.validate import validate
from tests.support import tiny


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("family")
    target = tiny.target(base / "target")
    tiny.zlab_dflash(base / "zlab", target)
    tiny.speculators_dflash(base / "spec", target)
    tiny.assistant(base / "asst", target, centroids=16)
    return base


def config(folder: Path, **changes: Any) -> None:
    value = json.loads((folder / "config.json").read_text())
    value.update(changes)
    (folder / "config.json").write_text(json.dumps(value))


def retensor(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite model.safetensors after applying `change` to name -> (values, type)."""
    from g4spec.convert.safetensors import read

    kept = {}
    for name, t in read(folder / "model.safetensors").items():
        x = t.array() if t.format else t.raw.reshape(t.shape)
        kept[name] = (np.array(x), t.dtype)
    change(kept)
    (folder / "model.safetensors").unlink()
    tiny.save(folder / "model.safetensors", kept)


def refused(
    source: Path, out: Path, target: Path | None, error: type[G4Error], says: str, **options: Any
) -> str:
    with pytest.raises(error, match=says) as e:
        convert(source, out, target=target, **options)
    assert not out.exists() and not list(out.parent.glob("*.tmp")), "something was left"
    return str(e.value)


def copy(family: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family / name, tmp_path / name))


def test_all_problems_in_one_error(family: Path, tmp_path: Path) -> None:
    draft = copy(family, "zlab", tmp_path)

    def change(t: dict[str, Any]) -> None:
        t["surprise.weight"] = (np.zeros((2, 2)), "F32")
        t["fc.weight"] = (np.zeros((64, 64)), "BF16")
        del t["norm.weight"]
        x = t["hidden_norm.weight"][0]
        t["hidden_norm.weight"] = (x, "U8")

    retensor(draft, change)
    text = refused(draft, tmp_path / "o.gguf", family / "target", InputError, "do not fit")
    for part in (
        "surprise.weight [2, 2]: no rule",
        "fc.weight: expected [64, 192], found [64, 64]",
        "norm.weight [64] is missing",
        "hidden_norm.weight: type U8",
    ):
        assert part in text


@pytest.mark.parametrize("dtype", ["F64", "I64"])
def test_types_without_a_decoder_are_named_before_anything_is_written(
    dtype: str, family: Path, tmp_path: Path
) -> None:
    draft = copy(family, "zlab", tmp_path)
    name, says = "layers.1.mlp.up_proj.weight", f"type {dtype} cannot be read"
    retensor(draft, lambda t: t.update({name: (t[name][0], dtype)}))
    for dry_run in (True, False):
        out = tmp_path / "o.gguf"
        refused(draft, out, family / "target", InputError, rf"{name}: {says}", dry_run=dry_run)


D2T = {
    "absolute": (lambda d, i: d + i, "absolute ids"),
    "outside": (lambda d, i: np.where(i == 63, 460, d), "outside the vocabulary"),
    "negative": (lambda d, i: np.where(i == 0, -1, d), "outside the vocabulary"),
    "repeated": (lambda d, i: np.where(i == 5, d[4] - 1, d), "strictly increase"),
    "shifted": (lambda d, i: d + (i == 63), "disagrees"),
}


@pytest.mark.parametrize("name", D2T)
def test_d2t(name: str, family: Path, tmp_path: Path) -> None:
    rule, says = D2T[name]
    draft = copy(family, "spec", tmp_path)

    def change(t: dict[str, Any]) -> None:
        if name == "shifted":  # room for the last id to move within the vocabulary
            last = int(t["d2t"][0][63]) + 63
            t["d2t"][0][63] -= last == tiny.VOCAB - 1
        t["d2t"] = (rule(t["d2t"][0], np.arange(64)), "I64")

    retensor(draft, change)
    refused(draft, tmp_path / "o.gguf", family / "target", InputError, says)


def test_d2t_must_be_integers_and_t2d_as_long_as_the_vocabulary(
    family: Path, tmp_path: Path
) -> None:
    draft = copy(family, "spec", tmp_path)
    retensor(draft, lambda t: t.update(t2d=(t["t2d"][0][:500], "BOOL")))
    refused(draft, tmp_path / "o.gguf", family / "target", InputError, "t2d")
    retensor(draft, lambda t: t.update(d2t=(t["d2t"][0], "F32")))
    refused(draft, tmp_path / "o.gguf", family / "target", InputError, "integers")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named(bad: float, family: Path, tmp_path: Path) -> None:
    draft = copy(family, "zlab", tmp_path)

    def change(t: dict[str, Any]) -> None:
        t["layers.1.mlp.up_proj.weight"][0][7, 11] = bad

    retensor(draft, change)
    for type in ("q8_0", "q4_k_m", "bf16", "f16", "f32"):
        refused(
            draft,
            tmp_path / "o.gguf",
            family / "target",
            InputError,
            r"layers\.1\.mlp\.up_proj\.weight.*row 7, column 11",
            type=type,
        )


def test_an_untied_head_is_not_dropped_in_silence(family: Path, tmp_path: Path) -> None:
    target = copy(family, "target", tmp_path)
    embed = "model.language_model.embed_tokens.weight"
    retensor(target, lambda t: t.update({"lm_head.weight": t[embed]}))
    result = convert(target, tmp_path / "o.gguf")
    assert [(r.source, r.note) for r in result.plan.with_action("drop")] == [
        ("lm_head.weight", "tied to the token table")
    ]
    (tmp_path / "o.gguf").unlink()
    retensor(target, lambda t: t.update({"lm_head.weight": (t[embed][0] + 1, "BF16")}))
    refused(target, tmp_path / "o.gguf", None, Unsupported, "lm_head.weight differs")


@pytest.mark.parametrize("level", ["outer", "text_config"])
def test_a_target_with_an_output_table_of_its_own(level: str, family: Path, tmp_path: Path) -> None:
    target = copy(family, "target", tmp_path)
    embed = "model.language_model.embed_tokens.weight"
    retensor(target, lambda t: t.update({"lm_head.weight": (t[embed][0][::-1].copy(), "BF16")}))

    raw = json.loads((target / "config.json").read_text())
    (raw if level == "outer" else raw["text_config"])["tie_word_embeddings"] = False
    config(target, **raw)
    out, plain = tmp_path / "o.gguf", tmp_path / "plain.gguf"
    convert(target, out, type="f32")
    convert(family / "target", plain, type="f32")
    with GGUF(out) as g:
        assert np.array_equal(g.array("output.weight"), g.array("token_embd.weight")[::-1])
    with Engine.load(out, n_ctx=64) as one, Engine.load(plain, n_ctx=64) as other:
        own, tied = (text_chunks.read_chunk(e, [2, 9, 11]) for e in (one, other))
        assert torch.equal(own, tied)
        assert torch.equal(one.target.logits(own), other.target.logits(tied).flip(1))
    assert validate(out).ok
    out.unlink()
    retensor(target, lambda t: t.__delitem__("lm_head.weight"))
    refused(target, out, None, InputError, "lm_head.weight.*is missing")


def test_drafts_need_their_target(family: Path, tmp_path: Path) -> None:
    text = refused(family / "spec", tmp_path / "o.gguf", None, UsageError, "needs the target")
    assert "made for tiny" in text
    refused(family / "spec", tmp_path / "o.gguf", family / "zlab", InputError, "not a target")
    other = tiny.target(tmp_path / "t", hidden=96)
    refused(family / "zlab", tmp_path / "o.gguf", other, InputError, "hidden size")
    refused(family / "target", tmp_path / "o.gguf", family / "zlab", UsageError, "is a target")


def test_output_must_not_be_an_input(family: Path, tmp_path: Path) -> None:
    draft = copy(family, "zlab", tmp_path)
    with pytest.raises(UsageError, match="one of the inputs"):
        convert(draft, draft / "model.safetensors", target=family / "target")
    convert(family / "target", tmp_path / "t.gguf", type="bf16")
    for out in (tmp_path / "t.gguf", tmp_path / "x" / ".." / "t.gguf"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="one of the inputs"):
            quantize(tmp_path / "t.gguf", out, "q8_0")
    with pytest.raises(UsageError, match="one of the inputs"):
        convert(draft, tmp_path / "t.gguf", target=tmp_path / "t.gguf")


def test_output_must_not_be_a_file_of_the_target(family: Path, tmp_path: Path) -> None:
    """The target is a folder with a GGUF, or a split GGUF that is named by its first part."""
    folder, split = tmp_path / "folder", tmp_path / "split"
    convert(family / "target", folder / "t.gguf", type="bf16")
    made = convert(family / "target", split / "t.gguf", type="bf16", split_max_size=100_000)
    first, *_, last = made.files
    assert first != last
    for target, out in ((folder, folder / "t.gguf"), (first, last), (split, last)):
        before = out.read_bytes()
        with pytest.raises(UsageError, match="one of the inputs"):
            convert(family / "zlab", out, target=target)
        assert out.read_bytes() == before
    with pytest.raises(UsageError, match="parts of the output may overwrite the input"):
        convert(family / "zlab", split / "t.gguf", target=split, split_max_size=100_000)
    convert(family / "zlab", folder / "d.gguf", target=folder)
    checkpoint = copy(family, "target", tmp_path)
    for _ in range(2):  # a draft beside the target's checkpoint may be converted again
        convert(family / "zlab", checkpoint / "d.gguf", target=checkpoint)


def test_requantizing_must_be_asked_for(family: Path, tmp_path: Path) -> None:
    convert(family / "target", tmp_path / "q.gguf")
    with pytest.raises(InputError, match="quantized already"):
        quantize(tmp_path / "q.gguf", tmp_path / "b.gguf", "bf16")
    assert not (tmp_path / "b.gguf").exists()
    quantize(tmp_path / "q.gguf", tmp_path / "b.gguf", "bf16", allow_requantize=True)
    quantize(tmp_path / "q.gguf", tmp_path / "q2.gguf", "q8_0")
    assert (tmp_path / "q2.gguf").read_bytes() == (tmp_path / "q.gguf").read_bytes()


# ---- what a path is


def test_paths_may_be_text(family: Path, tmp_path: Path) -> None:
    """`target` as text ended in a traceback."""
    target = str(family / "target")
    made = convert(str(family / "zlab"), str(tmp_path / "d.gguf"), target=target, type="bf16")
    other = convert(family / "zlab", tmp_path / "o.gguf", target=family / "target", type="bf16")
    assert made.out == tmp_path / "d.gguf"
    assert [t.name for t in made.plan.tensors] == [t.name for t in other.plan.tensors]
    assert quantize(str(made.out), str(tmp_path / "q.gguf"), "q8_0").out == tmp_path / "q.gguf"


UNKNOWN: dict[str, tuple[dict[str, Any], type[G4Error], str]] = {
    "mtp": ({"speculators_model_type": "mtp"}, Unsupported, "MTP"),
    "other": ({"architectures": ["LlamaForCausalLM"]}, InputError, "LlamaForCausalLM.*fc.weight"),
    "nothing": ({"architectures": None}, InputError, "architectures None"),
    "two": ({"architectures": ["DFlashDraftModel", "Gemma4ForCausalLM"]}, InputError, "several"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_kinds_without_code_are_recognised(name: str, family: Path, tmp_path: Path) -> None:
    changes, error, says = UNKNOWN[name]
    draft = copy(family, "zlab", tmp_path)
    if name not in ("two",):
        value = json.loads((draft / "config.json").read_text())
        del value["dflash_config"]
        (draft / "config.json").write_text(json.dumps(value))
    config(draft, **changes)
    refused(draft, tmp_path / "o.gguf", family / "target", error, says)


def test_kinds_are_recognised_by_content_not_by_name(family: Path, tmp_path: Path) -> None:
    for name in ("target", "zlab", "spec", "asst"):
        moved = Path(shutil.copytree(family / name, tmp_path / f"eagle3-{name}-mtp"))
        expected = {"target": "gemma4", "asst": "gemma4-assistant"}.get(name, "dflash")
        assert expected == detect(moved).kind.ARCH


def test_a_checkpoint_is_converted_even_with_ggufs_in_its_folder(
    family: Path, tmp_path: Path
) -> None:
    """Converters write GGUF files into the checkpoint's folder. `run` still takes the GGUF."""
    draft = copy(family, "zlab", tmp_path)
    convert(draft, tmp_path / "d.gguf", target=family / "target", type="bf16")
    shutil.copy(tmp_path / "d.gguf", draft / "made.gguf")
    result = convert(draft, tmp_path / "o.gguf", target=family / "target")
    assert any("took the checkpoint" in n for n in result.notes)
    with GGUF(tmp_path / "o.gguf") as g:
        assert g.get("g4spec.source") == draft.name
    with detect(draft, prefer_gguf=True) as found:
        assert found.path == draft / "made.gguf"
        assert any("took made.gguf" in n for n in found.notes)
    shutil.copy(tmp_path / "d.gguf", draft / "second.gguf")
    convert(draft, tmp_path / "o.gguf", target=family / "target", dry_run=True)
    with pytest.raises(InputError, match="several GGUF"):
        detect(draft, prefer_gguf=True)


def test_the_suffix_of_a_gguf_in_a_folder_may_be_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "D.GGUF"
    write(path, {"general.architecture": string("gemma4")}, [])
    with detect(tmp_path) as found:
        assert found.path == path
    assert folder_hint(tmp_path) == f"name the file in it: {path}"
    assert [*file_stamps(tmp_path)] == [path]


def test_a_target_folder_that_also_contains_a_gguf(family: Path, tmp_path: Path) -> None:
    target = copy(family, "target", tmp_path)
    convert(family / "target", target / "q8.gguf")
    result = convert(family / "zlab", tmp_path / "o.gguf", target=target)
    with GGUF(tmp_path / "o.gguf") as g:
        assert g.get("g4spec.target.source") == target.name
    assert result.written


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("name", ["model.safetensors", "x.gguf", "config.json"])
def test_an_lfs_pointer_is_named(family: Path, tmp_path: Path, name: str) -> None:
    draft = copy(family, "zlab", tmp_path)
    path = draft / name
    path.write_text(LFS_POINTER)
    with pytest.raises(InputError, match="git lfs pull"):
        detect(path if name.endswith(".gguf") else draft)


def test_an_lfs_pointer_of_a_tokenizer_is_named(family: Path, tmp_path: Path) -> None:
    """Published tokenizer.json files are in Git LFS, as weights are."""
    target = copy(family, "target", tmp_path)
    (target / "tokenizer.json").write_text(LFS_POINTER)
    with pytest.raises(InputError, match=r"tokenizer\.json: a Git LFS pointer.*git lfs pull"):
        convert(family / "zlab", tmp_path / "o.gguf", target=target)


def test_a_single_safetensors_file_may_be_named(family: Path, tmp_path: Path) -> None:
    convert(family / "zlab", tmp_path / "a.gguf", target=family / "target")
    convert(family / "zlab" / "model.safetensors", tmp_path / "b.gguf", target=family / "target")
    with GGUF(tmp_path / "a.gguf") as a, GGUF(tmp_path / "b.gguf") as b:
        assert all((a.raw(n) == b.raw(n)).all() for n in a.tensors)


def test_names_that_are_not_utf8(family: Path, tmp_path: Path) -> None:
    """Names from before UTF-8: a GGUF records them with U+FFFD."""
    folder, out = tmp_path / "dr\udce9", tmp_path / "\udce9.gguf"
    shutil.copytree(family / "zlab", folder)
    convert(folder, out, target=family / "target")
    with GGUF(out) as file:
        assert file.value("g4spec.source").data == "dr\ufffd"
        assert file.value("g4spec.command").data.startswith("g4spec convert dr\ufffd --target ")


def test_dry_run_checks_everything_and_writes_nothing(family: Path, tmp_path: Path) -> None:
    target = family / "target"
    dry = convert(family / "spec", tmp_path / "o.gguf", target=target, dry_run=True)
    assert not dry.written and not list(tmp_path.iterdir())
    real = convert(family / "spec", tmp_path / "o.gguf", target=target)
    assert dry.plan == real.plan
    draft = copy(family, "spec", tmp_path)
    retensor(draft, lambda t: t.update(d2t=(t["d2t"][0] * 0 + 500, "I64")))
    with pytest.raises(InputError, match="outside"):
        convert(draft, tmp_path / "p.gguf", target=target, dry_run=True)


def test_cache_follows_content(family: Path, tmp_path: Path) -> None:
    draft, cache = copy(family, "zlab", tmp_path), tmp_path / "cache"
    first, note = convert_cached(draft, family / "target", cache)
    assert "converted into" in note
    stamp = first.stat().st_mtime_ns
    again, note = convert_cached(draft, family / "target", cache)
    assert again == first and first.stat().st_mtime_ns == stamp and "using" in note
    retensor(draft, lambda t: t["fc.weight"][0].__imul__(2))
    second, _ = convert_cached(draft, family / "target", cache)
    assert second != first and len(list(cache.glob("*.gguf"))) == 2


def test_a_cache_that_cannot_be_written_to_names_its_variable(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file" / "drafts", tmp_path / "read-only"):
        monkeypatch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(EnvironmentProblem, match="Set XDG_CACHE_HOME to another folder"):
            convert_cached(family / "zlab", family / "target", cache)


@pytest.mark.parametrize("hidden", ["folder", "entry"])
def test_a_cache_of_another_user_names_its_variable(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Simulated, since root may read everything."""
    cache = tmp_path / "cache"
    entry, _ = convert_cached(family / "zlab", family / "target", cache)
    denied = PermissionError(errno.EACCES, "Permission denied", str(entry))
    refuse = {"folder": ("exists", "stat"), "entry": ("open", "read_bytes")}[hidden]
    for name in refuse:
        real = getattr(Path, name)

        def checked(path: Path, *args: Any, real: Any = real, **options: Any) -> Any:
            if path.parent == cache:
                raise denied
            return real(path, *args, **options)

        monkeypatch.setattr(Path, name, checked)
    monkeypatch.setattr("os.path.exists", lambda path: hidden == "entry" or cache != path.parent)
    shut = cache if hidden == "folder" else entry
    monkeypatch.setattr("os.access", lambda path, mode: path != shut)
    with pytest.raises(EnvironmentProblem, match="Set XDG_CACHE_HOME to another folder"):
        convert_cached(family / "zlab", family / "target", cache)


# ---- safetensors folders


def shard(family: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = tiny.zlab_dflash(tmp_path / "s", family / "target", shards=3)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


SHARDS: dict[str, tuple[Callable[[Path, dict[str, Any]], None], str]] = {
    "missing": (lambda f, i: (f / "model-00002-of-00003.safetensors").unlink(), "missing"),
    "escaping": (
        lambda f, i: i["weight_map"].update(x="../x.safetensors"),
        r"outside the folder.*Download the index again",
    ),
    "no map": (lambda f, i: i.pop("weight_map"), "weight_map.*Download the index again"),
    "disagrees": (
        lambda f, i: i["weight_map"].update({"fc.weight": "model-00002-of-00003.safetensors"}),
        "disagrees.*fc.weight.*Download them again",
    ),
    "absent": (
        lambda f, i: i["weight_map"].update({"more": "model-00002-of-00003.safetensors"}),
        "disagrees.*more",
    ),
    "twice": (
        lambda f, i: shutil.copy(
            f / "model-00001-of-00003.safetensors", f / "model-00002-of-00003.safetensors"
        ),
        "is in model-",
    ),
    "extra": (
        lambda f, i: shutil.copy(f / "model-00001-of-00003.safetensors", f / "other.safetensors"),
        "does not name",
    ),
    "no index": (lambda f, i: (f / "model.safetensors.index.json").unlink(), "no index"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards(name: str, family: Path, tmp_path: Path) -> None:
    change, says = SHARDS[name]
    folder, index = shard(family, tmp_path)
    change(folder, index)
    if name != "no index":
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, tmp_path / "o.gguf", family / "target", InputError, says)


def header(entry: Any, data: bytes = bytes(8), name: str = "t") -> bytes:
    head = entry if isinstance(entry, bytes) else json.dumps({name: entry}).encode()
    return len(head).to_bytes(8, "little") + head + data


OK = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWICE = b'{"t": %s, "t": %s}' % ((json.dumps(OK).encode(),) * 2)
BROKEN = {
    "empty": (b"", "empty|not a safetensors"),
    "short": (b"abc", "not a safetensors"),
    "header beyond": ((1 << 40).to_bytes(8, "little") + b"{}", "header within"),
    "not JSON": (header(b"{nonsense"), "not valid JSON"),
    "deep": (header(b"[" * 100000), "not valid JSON"),
    "list": (header(b"[1]"), "JSON object"),
    "twice": (header(TWICE), "duplicate key"),
    "no dtype": (header({"shape": [2], "data_offsets": [0, 8]}), "entry needs"),
    "text": (header("x"), "entry needs"),
    "negative": (header(OK | {"shape": [-2]}), "malformed"),
    "size": (header(OK | {"shape": [3]}), "size of F32"),
    "beyond": (header(OK | {"shape": [4], "data_offsets": [0, 16]}), "truncated"),
    "reversed": (header(OK | {"data_offsets": [8, 0]}), "truncated"),
    "hole": (header(OK | {"data_offsets": [4, 12]}, bytes(12)), "safetensors library"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_safetensors(name: str, family: Path, tmp_path: Path) -> None:
    raw, says = BROKEN[name]
    draft = copy(family, "zlab", tmp_path)
    (draft / "model.safetensors").write_bytes(raw)
    refused(draft, tmp_path / "o.gguf", family / "target", InputError, says)


def test_a_draft_of_a_target_with_any_quantization(family: Path, tmp_path: Path) -> None:
    """The draft needs its tokenizer and sizes only."""
    target = copy(family, "target", tmp_path)
    config(target, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(Unsupported, match="awq"):
        convert(target, tmp_path / "t.gguf")
    made = [
        convert(family / "zlab", tmp_path / f"{t.parent.name}.gguf", target=t)
        for t in (target, family / "target")
    ]
    assert made[0].plan == made[1].plan


@pytest.mark.parametrize("name", ["Gemma4Model", "Gemma4TextModel"])
def test_what_the_base_class_saves_is_a_target(name: str, family: Path, tmp_path: Path) -> None:
    """Its output projection is the token table; the text model's names have no prefix."""
    folder = copy(family, "target", tmp_path)
    prefix = "model." if name == "Gemma4Model" else "model.language_model."
    retensor(folder, lambda t: t.update({n.removeprefix(prefix): t.pop(n) for n in list(t)}))
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config(folder, architectures=[name], **(text if name == "Gemma4TextModel" else {}))
    result = convert(folder, tmp_path / "t.gguf", dry_run=True)
    assert not result.plan.with_action("drop") and len(result.plan.with_action("copy")) > 50


def test_a_value_head_of_training_is_left_out(family: Path, tmp_path: Path) -> None:
    """Leave it out as PPO of TRL saves it, beside the model."""
    folder = copy(family, "target", tmp_path)
    head = {"v_head.summary.weight": np.ones((1, 64)), "v_head.summary.bias": np.ones(1)}
    retensor(folder, lambda t: t.update({n: (x, "F32") for n, x in head.items()}))
    result = convert(folder, tmp_path / "t.gguf", dry_run=True)
    assert [r.source for r in result.plan.with_action("drop")] == list(head)


def test_a_tokenizer_without_its_json(family: Path, tmp_path: Path) -> None:
    folder = copy(family, "target", tmp_path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    says = r"no such file.*only tokenizer.model.*save_pretrained"
    refused(folder, tmp_path / "o.gguf", None, InputError, says)


def test_an_adapter_beside_its_model(family: Path, tmp_path: Path) -> None:
    folder = copy(family, "target", tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    says = r"several safetensors files but no index.*name one file"
    refused(folder, tmp_path / "o.gguf", None, InputError, says)
    (folder / "adapter_config.json").write_text("{}")
    says = r"LoRA adapter that is not merged.*found adapter_model\.safetensors"
    refused(folder, tmp_path / "o.gguf", None, Unsupported, says)


def test_a_safetensors_file_without_its_configuration(family: Path, tmp_path: Path) -> None:
    """Other models in its folder are not what was asked for."""
    (file := tmp_path / "model.safetensors").touch()
    (tmp_path / "other.gguf").touch()
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        detect(file)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod."]
)
def test_names_that_trainers_change(family: Path, tmp_path: Path, prefix: str) -> None:
    folder = copy(family, "target", tmp_path)
    retensor(folder, lambda t: t.update({prefix + name: t.pop(name) for name in list(t)}))
    convert(folder, tmp_path / "a.gguf")
    convert(family / "target", tmp_path / "b.gguf")
    with GGUF(tmp_path / "a.gguf") as a, GGUF(tmp_path / "b.gguf") as b:
        assert {n: bytes(a.raw(n)) for n in a.tensors} == {n: bytes(b.raw(n)) for n in b.tensors}


def test_adapters_that_are_not_merged(family: Path, tmp_path: Path) -> None:
    folder = copy(family, "target", tmp_path)
    layer = "model.language_model.layers.0.self_attn.q_proj."

    def change(t: dict[str, Any]) -> None:
        t[f"{layer}base_layer.weight"] = t.pop(f"{layer}weight")
        t[f"{layer}lora_A.default.weight"] = (np.ones((4, 256)), "F32")

    retensor(folder, change)
    says = r"LoRA adapter that is not merged.*lora_A\.default"
    refused(folder, tmp_path / "o.gguf", None, Unsupported, says)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    says = r"LoRA adapter that is not merged.*adapter_config\.json.*merge_and_unload"
    refused(folder, tmp_path / "o.gguf", None, Unsupported, says)


@pytest.mark.parametrize("inner", ["publisher/model", "models--org--name/snapshots/abc"])
def test_folders_above_a_model(inner: str, family: Path, tmp_path: Path) -> None:
    """Folders of LM Studio and of the hub's cache."""
    (folder := tmp_path / inner).mkdir(parents=True)
    given = tmp_path / inner.split("/", maxsplit=1)[0]
    (folder / "config.json").write_text("{}")
    refused(given, tmp_path / "o.gguf", None, InputError, f"(?i)name a folder in it: {folder}")
    (folder / "m.gguf").write_bytes(b"GGUF")
    refused(given, tmp_path / "o.gguf", None, InputError, f"(?i)name the file in it: {folder}/m")


def test_an_index_that_a_later_checkpoint_left_behind(family: Path, tmp_path: Path) -> None:
    folder = copy(family, "target", tmp_path)
    index = {"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    says = r"shards .* missing.*or remove model\.safetensors\.index\.json.*model\.safetensors"
    refused(folder, tmp_path / "o.gguf", None, InputError, says)


def test_broken_config(family: Path, tmp_path: Path) -> None:
    draft = copy(family, "zlab", tmp_path)
    for raw, says in (
        (b"{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'{"a": 1, "a": 2}', "duplicate key"),
    ):
        (draft / "config.json").write_bytes(raw)
        refused(draft, tmp_path / "o.gguf", family / "target", InputError, says)
    (draft / "config.json").unlink()
    refused(draft, tmp_path / "o.gguf", family / "target", InputError, "no such file")
    (tmp_path / "void").mkdir()
    refused(tmp_path / "void", tmp_path / "o.gguf", None, InputError, "config.json")
