"""doctor's -m and -md: files, folders, hub ids and names."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec import cli, convert, models
from g4spec.advisor import (
    cache_sizes,
    checkpoint_folders,
    gguf_models,
    lookup,
    named_models,
    questions,
    recipe,
    runtime_support,
)
from g4spec.advisor import memory_needs as memory
from g4spec.advisor.cards import assume
from g4spec.advisor.doctor import diagnose
from g4spec.advisor.engines import judge
from g4spec.advisor.facts import facts
from g4spec.advisor.schema import SizeFact
from g4spec.core import CacheShape
from g4spec.errors import InputError, UsageError
from g4spec.gguf import GGUF, string
from g4spec.runtime.cuda import gpu_memory
from tests.cpu.gguf_fixtures import Entry
from tests.support import faults, tiny, tiny_drafts, tokens

FACTS = facts()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target and its drafts, as folders and as files."""
    root = tmp_path_factory.mktemp("family")
    folders = {"target": tiny.target(root / "target")}
    folders["zlab"] = tiny.zlab_dflash(root / "zlab", folders["target"])
    folders["redhat"] = tiny.speculators_dflash(root / "redhat", folders["target"])
    folders["mtp"] = tiny.assistant(root / "mtp", folders["target"])
    for name in list(folders):
        out = root / f"{name}.gguf"
        target = None if name == "target" else folders["target"]
        convert.convert(folders[name], out, target=target, type="q8_0")
        folders[f"{name}.gguf"] = out
    return folders


def test_folder_and_file_agree(family: dict[str, Path]) -> None:
    folder = lookup.find_target(FACTS, str(family["target"]))
    file = lookup.find_target(FACTS, str(family["target.gguf"]))
    assert folder.caches == file.caches and len(file.caches) > 1
    assert file.is_gguf and not folder.is_gguf
    assert file.formats[0].engines == ("llama.cpp", "g4spec")
    assert folder.formats[0].engines == ("vllm", "sglang")
    assert 0 < file.formats[0].nbytes <= family["target.gguf"].stat().st_size


@pytest.mark.parametrize("engine", ["llama.cpp", "g4spec"])
def test_a_folder_is_converted_for_an_engine_of_files(
    engine: str, family: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(family["target"])
    line = ["doctor", "-m", folder, "--assume", "RTX 3090", "--engine", engine]
    assert cli.run(line) == 1
    assert f"g4spec convert {folder} -o target.gguf, then -m target.gguf" in capsys.readouterr().out


def test_the_quantization_of_a_folder_is_named(family: dict[str, Path], tmp_path: Path) -> None:
    """Older exports of ModelOpt have it in hf_quant_config.json."""
    (tmp_path / "config.json").write_text((family["target"] / "config.json").read_text())
    settings = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    (found,) = lookup.find_target(FACTS, str(tmp_path)).formats
    assert found.format == "modelopt FP8"


def test_drafts_in_files(family: dict[str, Path]) -> None:
    target = lookup.find_target(FACTS, str(family["target"]))
    for name, kind in (("zlab", "dflash"), ("redhat", "dflash"), ("mtp", "mtp")):
        folder = lookup.find_draft(FACTS, str(family[name]), target)
        file = lookup.find_draft(FACTS, str(family[f"{name}.gguf"]), target)
        assert folder.kind == file.kind == kind, name
        assert folder.block == file.block
        assert folder.kv_token == file.kv_token, name
        assert folder.head == file.head
        assert file.is_gguf and file.nbytes > 0 and folder.nbytes > 0


KINDS: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "zlab": ("dflash2", tiny_drafts.zlab_dflash2),
    "speculators": ("dflash2", tiny_drafts.speculators_dflash2),
    "speculators-dspark": ("dspark", tiny_drafts.speculators_dspark),
    "deepspec": ("dspark", tiny_drafts.deepspec_dspark),
    "eagle3": ("eagle3", tiny_drafts.eagle3),
    "specforge": ("eagle3", functools.partial(tiny_drafts.eagle3, layout="specforge")),
    "p-eagle": ("eagle3", functools.partial(tiny_drafts.eagle3, depths=4)),
}


def test_every_kind_is_listed() -> None:
    listed = {kind for kind, _ in KINDS.values()} | {"dflash", "gemma4-assistant"}  # of `family`
    assert listed == {*models.drafts()}, "KINDS here, after gguf_draft and folder_draft read it"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_recognised(name: str, family: dict[str, Path], tmp_path: Path) -> None:
    kind, make = KINDS[name]
    made = make(tmp_path / name, family["target"])
    target = lookup.find_target(FACTS, str(family["target"]))
    folder = lookup.find_draft(FACTS, str(made), target)
    out = tmp_path / "draft.gguf"
    convert.convert(made, out, target=family["target"])
    file = lookup.find_draft(FACTS, str(out), target)
    assert folder.kind == file.kind == kind
    assert folder.causal == file.causal == (kind == "eagle3")
    assert folder.head == file.head > 0
    refused = [bool(d.engines) and "llama.cpp" not in d.engines for d in (folder, file)]
    assert refused == [name == "p-eagle"] * 2
    assert folder.llamacpp_n == file.llamacpp_n
    assert (folder.kv_token, folder.kv_fixed, folder.block) == (
        file.kv_token,
        file.kv_fixed,
        file.block,
    )


def test_a_draft_of_another_target_is_refused(family: dict[str, Path]) -> None:
    target = lookup.find_target(FACTS, "31b")
    with pytest.raises(InputError, match="converted with a target of another number of layers"):
        lookup.find_draft(FACTS, str(family["zlab.gguf"]), target)


@pytest.mark.parametrize("name", ["dflash", "speculators-dflash", "assistant", *KINDS])
def test_a_folder_of_another_target_is_refused(
    name: str, family: dict[str, Path], tmp_path: Path
) -> None:
    """doctor described them as drafts of the target that was asked about."""
    folders = {"dflash": "zlab", "speculators-dflash": "redhat", "assistant": "mtp"}
    made = family[folders[name]] if name in folders else KINDS[name][1](tmp_path, family["target"])
    for target in ("31b", "26b"):
        with pytest.raises(InputError, match=r"trained for a target of another .* made for$"):
            lookup.find_draft(FACTS, str(made), lookup.find_target(FACTS, target))


def test_a_26b_draft_in_a_folder_is_not_taken_for_the_31b(
    family: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((family["redhat"] / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = FACTS.get(SizeFact, "26b").hidden
    (tmp_path / "config.json").write_text(json.dumps(config))
    ask = ["doctor", "-md", str(tmp_path), "--assume", "H100", "-m"]
    assert cli.run([*ask, "31b"]) == 3
    error = capsys.readouterr().err
    assert "trained for a target of another hidden size: expected 2816, found 5376" in error
    assert cli.run([*ask, "26b"]) == 0
    config["target_hidden_size"] = FACTS.get(SizeFact, "31b").hidden
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.run([*ask, "26b"]) == 3 and cli.run([*ask, "31b"]) == 0


def test_a_draft_that_only_g4spec_runs(family: dict[str, Path], tmp_path: Path) -> None:
    """A DSpark draft with a recurrent Markov head, which llama.cpp would ignore."""
    folder = tiny_drafts.deepspec_dspark(tmp_path / "draft", family["target"], head="rnn")
    out = tmp_path / "draft.gguf"
    convert.convert(folder, out, target=family["target"])
    q = questions.build_question(FACTS, str(family["target.gguf"]), str(out), 512, None, None, None)
    assert q is not None
    verdicts = [judge(FACTS, assume(FACTS, "RTX 3090"), q, name) for name in memory.GGUF]
    assert [bool(v.refusal) for v in verdicts] == [True, False]


def test_unsupported_types_and_tensor_names_are_reported(
    family: dict[str, Path], tmp_path: Path
) -> None:
    """llama.cpp only computes with Q8_1, and a tensor attn_qkv beside one of its parts cannot be
    divided: the file opens but cannot be run."""
    machine = assume(FACTS, "RTX 3090")

    def refusal(target: Path, draft: Path | None = None) -> str:
        q = questions.build_question(
            FACTS, str(target), str(draft) if draft else None, 512, None, None, None
        )
        assert q is not None
        return judge(FACTS, machine, q, "g4spec").refusal

    assert refusal(family["target.gguf"], family["zlab.gguf"]) == ""
    path = tmp_path / "x.gguf"
    for name, pair in (("target.gguf", None), ("zlab.gguf", family["target.gguf"])):
        file = faults.read(family[name])
        old = file.tensors["blk.0.ffn_down.weight"]
        size = old.shape[0] * old.shape[1] // 32 * 36
        file.tensors["blk.0.ffn_down.weight"] = Entry(old.shape, 9, bytes(size))
        file.write(path)
        output = refusal(path) if pair is None else refusal(pair, path)
        assert "no code for tensors in Q8_1" in output
    file = faults.read(family["target.gguf"])
    file.tensors["blk.0.attn_qkv.weight"] = file.tensors.pop("blk.0.attn_q.weight")
    assert "attn_qkv" in refusal(file.write(path))


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("31b:UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("unsloth/gemma-4-31B-it-GGUF:UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("unsloth/gemma-4-31B-it-GGUF:Q4_0", "Q4_0"),
        ("unsloth/gemma-4-31B-it-GGUF:gemma-4-31B-it-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("31b:qat-ud-q4_k_xl", "QAT UD-Q4_K_XL"),
        ("unsloth/gemma-4-31B-it-qat-GGUF:UD-Q4_K_XL", "QAT UD-Q4_K_XL"),
        ("unsloth/gemma-4-31B-it-qat-GGUF:Q4_K_XL", "QAT UD-Q4_K_XL"),
        ("google/gemma-4-31B-it-qat-q4_0-gguf", "QAT q4_0"),
        ("google/gemma-4-31B-it-qat-q4_0-gguf:Q4_0", "QAT q4_0"),
        ("31b:q4_0", "QAT q4_0"),
    ],
)
def test_only_files_whose_name_says_so_are_of_quantization_aware_training(
    name: str, format: str
) -> None:
    """But Google's Q4_0 is."""
    assert [f.format for f in lookup.find_target(FACTS, name).formats] == [format]


def test_lengths_are_read_from_the_draft(family: dict[str, Path]) -> None:
    """speculators state the length; a z-lab block of n gives n - 1; SGLang counts the anchor."""
    target = lookup.find_target(FACTS, str(family["target"]))
    redhat = lookup.find_draft(FACTS, str(family["redhat"]), target)
    raw = json.loads((family["redhat"] / "config.json").read_text())
    named = raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert redhat.vllm_n == named
    zlab = lookup.find_draft(FACTS, str(family["zlab"]), target)
    assert (zlab.vllm_n, zlab.sglang_n, zlab.llamacpp_n) == (
        zlab.block - 1,
        zlab.block,
        zlab.block - 1,
    )


@pytest.mark.parametrize("draft, refused", [("redhat", True), ("zlab", False)])
def test_sglang_does_not_read_a_folder_in_the_format_of_speculators(
    draft: str, refused: bool, family: dict[str, Path]
) -> None:
    """Nor do the rows of published drafts know such a folder."""
    pair = str(family["target"]), str(family[draft])
    q = questions.build_question(FACTS, *pair, None, None, None, None)
    assert q is not None and q.draft is not None and not q.draft.ids
    verdict = judge(FACTS, assume(FACTS, "H100"), q, "sglang")
    assert ["speculators' format" in p.title for p in verdict.blockers] == [True] * refused


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("deepspec", "0.5.23", "SGLang has no DSpark with Gemma 4 layers"),
        ("zlab", "0.5.23", ""),
        ("zlab", "0.5.22", "SGLang older than 0.5.23 with DFlash2: unknown"),
        ("speculators", "0.5.23", "SGLang does not read drafts in speculators' format"),
        ("specforge", "0.5.23", ""),
        ("specforge", "0.5.22", "SGLang older than 0.5.23 with EAGLE-3 on Gemma 4: unknown"),
    ],
)
def test_sglang_runs_the_kinds_that_its_source_has(
    name: str, version: str, says: str, family: dict[str, Path], tmp_path: Path
) -> None:
    made = KINDS[name][1](tmp_path / name, family["target"])
    pair = str(family["target"]), str(made)
    q = questions.build_question(FACTS, *pair, None, None, None, None)
    assert q is not None
    machine = replace(assume(FACTS, "H100"), tools={"sglang": version})
    found = recipe.make(FACTS, machine, q, "sglang")
    assert [title for title, _, _ in found.blocked] == [says] * bool(says)
    if found.works:
        algorithm = "EAGLE3" if name == "specforge" else "DFLASH"
        assert f"--speculative-algorithm {algorithm}" in found.commands[0]
        assert "--speculative-draft-model-path" in found.commands[0]
        assert "--speculative-num-draft-tokens" in found.commands[0]


@pytest.mark.parametrize("from_anchor", [True, False, None])
def test_a_dspark_draft_drafts_its_whole_block_in_llama_cpp(
    from_anchor: bool | None, family: dict[str, Path], tmp_path: Path
) -> None:
    """Unless its first token is not read from the anchor's row."""
    target = lookup.find_target(FACTS, str(family["target"]))
    made = tiny_drafts.speculators_dspark(
        tmp_path / "draft", family["target"], from_anchor=from_anchor
    )
    convert.convert(made, tmp_path / "draft.gguf", target=family["target"])
    for path in (made, tmp_path / "draft.gguf"):
        found = lookup.find_draft(FACTS, str(path), target)
        assert found.llamacpp_n == found.block - (from_anchor is False), path.name


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_of_checkpoints_do_not_take_a_draft_as_gguf(
    engine: str, family: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["-m", str(family["target"]), "-md", str(family["zlab.gguf"])]
    assert cli.run(["recipe", engine, *pair, "--assume", "H100"]) != 0
    assert "it loads drafts from checkpoint folders and hub ids" in capsys.readouterr().err


def test_doctor_on_files(family: dict[str, Path]) -> None:
    q = questions.build_question(
        FACTS, str(family["target.gguf"]), str(family["zlab.gguf"]), 512, None, None, None
    )
    assert q is not None
    d = diagnose(FACTS, assume(FACTS, "RTX 3090"), q)
    assert d.works and d.plans[0].engine == "llama.cpp"


def test_a_draft_folder_with_both_formats(family: dict[str, Path], tmp_path: Path) -> None:
    """One reporter lost days to a loader that took the BF16 file instead of the GGUF in the same
    folder."""
    folder = tmp_path / "both"
    folder.mkdir()
    for path in [*family["zlab"].iterdir(), family["zlab.gguf"]]:
        (folder / path.name).write_bytes(path.read_bytes())
    target = lookup.find_target(FACTS, str(family["target"]))
    draft = lookup.find_draft(FACTS, str(folder), target)
    assert "holds zlab.gguf and safetensors" in draft.notes[0]


def test_wrong_way_round(family: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="not a Gemma 4 target"):
        lookup.find_target(FACTS, str(family["zlab.gguf"]))
    with pytest.raises(InputError, match="not a Gemma 4 target"):
        lookup.find_target(FACTS, str(family["zlab"]))
    target = lookup.find_target(FACTS, str(family["target"]))
    with pytest.raises(InputError, match="not a draft"):
        lookup.find_draft(FACTS, str(family["target.gguf"]), target)
    with pytest.raises(InputError, match="not a draft"):
        lookup.find_draft(FACTS, str(family["target"]), target)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 100, b"not a file of any kind" * 9])
def test_broken_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError):
        lookup.find_target(FACTS, str(path))


@pytest.mark.parametrize(
    "config",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"architectures": ["Gemma4ForCausalLM"]}',
        '{"architectures": ["LlamaForCausalLM"]}',
    ],
)
def test_broken_folders(config: str | None, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError):
        lookup.find_target(FACTS, str(tmp_path))


@pytest.mark.parametrize("name", ["target", "zlab", "redhat", "mtp"])
@pytest.mark.parametrize("junk", [None, "x", -1, [], {}, [None], 1e400, True, 10**12], ids=str)
def test_hostile_values(name: str, junk: object, family: dict[str, Path], tmp_path: Path) -> None:
    """Replacing any value by any other gives a result or an error of g4spec, never a traceback."""
    raw = json.loads((family[name] / "config.json").read_text())
    target = lookup.find_target(FACTS, str(family["target"]))
    spots = [(raw, k) for k in raw]
    spots += [(v, k) for v in raw.values() if isinstance(v, dict) for k in v]
    for where, key in spots:
        kept = where[key]
        where[key] = junk
        (tmp_path / "config.json").write_text(json.dumps(raw))
        where[key] = kept
        with suppress(InputError):
            if name == "target":
                lookup.find_target(FACTS, str(tmp_path))
            else:
                lookup.find_draft(FACTS, str(tmp_path), target)


def gemma_config(size: SizeFact, per_layer: bool) -> dict[str, Any]:
    n, every = size.sliding + size.full, (size.sliding + size.full) // size.full
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    raw: dict[str, Any] = {
        "hidden_size": size.hidden,
        "layer_types": types,
        "head_dim": 256,
        "num_key_value_heads": size.kv_sliding,
        "sliding_window": size.window,
        "num_kv_shared_layers": n - size.own_sliding - size.own_full,
    }
    if per_layer:
        full = {"head_dim": 512, "num_key_value_heads": size.kv_full}
        raw["per_layer_config"] = {
            str(i): full for i, t in enumerate(types) if t == "full_attention"
        }
    else:
        raw |= {"global_head_dim": 512, "num_global_key_value_heads": size.kv_full}
        raw["attention_k_eq_v"] = size.kv_full != size.kv_sliding
    return raw


@pytest.mark.parametrize("size", FACTS.all(SizeFact), ids=lambda s: s.id)
@pytest.mark.parametrize("per_layer", [False, True])
def test_real_configurations_give_the_sizes_of_the_facts(size: SizeFact, per_layer: bool) -> None:
    got = checkpoint_folders.folder_caches(gemma_config(size, per_layer))
    assert sorted(got, key=str) == sorted(named_models.caches_of(size), key=str)


def test_heads_of_global_layers_need_shared_keys_and_values() -> None:
    """transformers reads `num_global_key_value_heads` only with `attention_k_eq_v`."""
    raw = {"layer_types": ["full_attention"], "num_key_value_heads": 8}
    raw["num_global_key_value_heads"] = 2
    assert checkpoint_folders.folder_caches(raw) == (CacheShape(8, 512, None),)
    raw["attention_k_eq_v"] = True
    assert checkpoint_folders.folder_caches(raw) == (CacheShape(2, 512, None),)


def test_gguf_metadata_of_shared_layers() -> None:
    kv = {
        "gemma4.block_count": 4,
        "gemma4.attention.head_count_kv": [2, 1, 2, 1],
        "gemma4.attention.sliding_window_pattern": [True, False, True, False],
        "gemma4.attention.sliding_window": 512,
        "gemma4.attention.key_length": 512,
        "gemma4.attention.key_length_swa": 256,
        "gemma4.attention.shared_kv_layers": 2,
    }
    expected = (CacheShape(2, 256, 512), CacheShape(1, 512, None))
    assert gguf_models.gguf_caches(kv) == expected
    with pytest.raises(InputError):
        gguf_models.gguf_caches({**kv, "gemma4.block_count": "many"})
    with pytest.raises(InputError):
        gguf_models.gguf_caches({**kv, "gemma4.attention.head_count_kv": [2]})


# ---- names


@pytest.mark.parametrize(
    ("text", "size", "formats"),
    [
        ("31b", "31b", 13),
        ("31B", "31b", 13),
        ("31b:q4_k_m", "31b", 1),
        ("31b-q8_0", "31b", 1),
        ("gemma-4-31B-it-Q4_K_M", "31b", 1),
        ("google/gemma-4-31B-it", "31b", 1),
        ("Intel/gemma-4-31B-it-int4-AutoRound", "31b", 1),
        ("google/gemma-4-26B-A4B-it", "26b", 1),
        ("cyankiwi/gemma-4-26B-A4B-it-AWQ-4bit", "26b", 1),
        ("google/gemma-4-E2B-it", "e2b", 1),
        ("12b", "12b", None),
    ],
)
def test_names_of_targets(text: str, size: str, formats: int | None) -> None:
    found = lookup.find_target(FACTS, text)
    assert found.size == size and not found.is_local
    if formats is not None:
        assert len(found.formats) == formats, [o.format for o in found.formats]


@pytest.mark.parametrize(
    ("text", "format", "known"),
    [
        ("unsloth/gemma-4-31B-it-GGUF:Q4_K_M", "Q4_K_M", True),
        ("unsloth/gemma-4-31B-it-GGUF@main:gemma-4-31B-it-Q6_K.gguf", "Q6_K", True),
        ("unsloth/gemma-4-31B-it-GGUF:IQ4_XS", "IQ4_XS", False),
        ("31b:iq3_xxs", "IQ3_XXS", False),
        ("31b:Q2_K", "Q2_K", False),
    ],
)
def test_types_as_the_hub_spells_them(text: str, format: str, known: bool) -> None:
    """Sizes come from the data, otherwise from the bits of a type that the runtime supports."""
    found = lookup.find_target(FACTS, text)
    (option,) = found.formats
    assert option.format == format and set(option.engines) == {"llama.cpp", "g4spec"}
    assert bool(found.notes) != known and found.gguf_hub == (text if "/" in text else "")
    assert 6e9 < option.nbytes < 30e9
    rewritten = {"IQ3_XXS": 134 / 98}.get(format, 1.0)  # bytes of a block on a GPU and in a file
    assert option.own == pytest.approx(option.nbytes * rewritten)


def test_llama_cpp_does_not_load_files_of_ollama(tmp_path: Path) -> None:
    path = tokens.target_file(tmp_path / "t.gguf", model=string("llama"), pre=string("gemma4"))
    found = gguf_models.gguf_target(FACTS, path, str(path))
    assert found.formats[0].engines == ("g4spec",) and gguf_models.OLLAMA_NOTE in found.notes
    usual = gguf_models.gguf_target(FACTS, tokens.target_file(tmp_path / "u.gguf"), "")
    assert "llama.cpp" in usual.formats[0].engines and not usual.notes


def test_a_repository_without_a_type_takes_the_best_gguf() -> None:
    found = lookup.find_target(FACTS, "unsloth/gemma-4-31B-it-GGUF")
    assert len(found.formats) > 3 and all("llama.cpp" in o.engines for o in found.formats)
    with pytest.raises(UsageError, match="unknown quant type q9_z"):
        lookup.find_target(FACTS, "31b:q9_z")


@pytest.mark.parametrize(
    ("model", "text", "id"),
    [
        ("31b", "redhat-dflash", "redhat-dflash"),
        ("31b", "RedHatAI/gemma-4-31B-it-speculator.dflash", "redhat-dflash"),
        ("31b", "RedHatAI/gemma-4-31B-it-speculator.dflash2", "redhat-dflash2"),
        ("31b", "zlab-dflash", "zlab-31b"),
        ("26b", "zlab-dflash", "zlab-26b"),
        ("31b", "z-lab/gemma-4-31B-it-DFlash", "zlab-31b"),
        ("e4b", "mtp", "mtp-e4b"),
        ("12b", "google/gemma-4-12B-it-assistant", "mtp-12b"),
    ],
)
def test_names_of_drafts(model: str, text: str, id: str) -> None:
    assert lookup.find_draft(FACTS, text, lookup.find_target(FACTS, model)).ids == (id,)


def test_a_draft_for_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"redhat-dflash.* not for the 12b"):
        lookup.find_draft(FACTS, "redhat-dflash", lookup.find_target(FACTS, "12b"))
    with pytest.raises(UsageError, match=r"zlab-31b.*zlab-26b.* not for the 12b"):
        lookup.find_draft(FACTS, "zlab-dflash", lookup.find_target(FACTS, "12b"))


def test_too_long_a_context() -> None:
    with pytest.raises(UsageError, match="training context"):
        questions.build_question(FACTS, "e4b", None, 200_000, None, None, None)
    with pytest.raises(UsageError, match="--kv"):
        questions.build_question(FACTS, "e4b", None, None, "q3_x", None, None)


def test_windows_and_slots() -> None:
    caches = named_models.caches_of(FACTS.get(SizeFact, "31b"))
    assert cache_sizes.llamacpp_slots(caches, 1 << 17) == 1536
    assert cache_sizes.llamacpp_slots(caches, 1 << 17, sequences=4) == 4608
    assert cache_sizes.llamacpp_slots(caches, 600) == 768
    assert cache_sizes.vllm_slots(1024, 2048, 1 << 17) == 5136
    assert cache_sizes.vllm_slots(1024, 8192, 1 << 17) == 17424


def test_only_active_experts_and_no_token_tables_are_read() -> None:
    """8 of 128 experts; of a per-layer token embedding, one row per token."""

    def file(**sizes: int) -> Any:
        tensors = {k.replace("__", "."): SimpleNamespace(nbytes=v) for k, v in sizes.items()}
        return SimpleNamespace(tensors=tensors, get=lambda key: "gemma4")

    vision = {"v__blk__0__ffn_up__weight": 5000}
    moe = file(blk__0__ffn_up_exps__weight=1280, token_embd__weight=120, **vision)
    kv = {"gemma4.expert_count": 128, "gemma4.expert_used_count": 8}
    assert gguf_models.read_once(moe, kv) == pytest.approx((80 + 120) / 1400)
    small = file(per_layer_token_embd__weight=300, token_embd__weight=100)
    assert gguf_models.read_once(small, {}) == pytest.approx(0.25)
    assert gguf_models.read_once(file(), {}) == 1.0


def test_weights_are_counted_as_the_runtime_holds_them(family: dict[str, Path]) -> None:
    """Matrices whose columns are not a multiple of 64 have no kernel and are stored as float32."""
    with GGUF(family["target.gguf"]) as file:
        card = gpu_memory.Card(torch.device("cpu"), "f16")
        assert runtime_support.weight_bytes(file) == card.weights(file.tensors.values())
        odd = [t for t in file.tensors.values() if t.format.quantized and t.shape[-1] % 64]
        assert odd
        least = sum(t.nbytes for t in file.tensors.values() if t not in odd)
        assert runtime_support.weight_bytes(file) >= least + sum(4 * prod(t.shape) for t in odd)
    target = lookup.find_target(FACTS, str(family["target.gguf"]))
    assert target.formats[0].own > target.formats[0].nbytes
    assert any("float32" in note for note in target.notes)
