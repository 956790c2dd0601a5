"""Every kind of checkpoint is converted to the file that upstream's converter would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest

from g4spec import models
from g4spec.convert import convert, quantize
from g4spec.gguf import GGUF, ValueType
from g4spec.models import dflash_backbone
from g4spec.quant import policy
from tests.support import kinds, tiny

PROVENANCE = ("g4spec.source", "g4spec.command", "g4spec.versions", "general.name")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("family") / "target")


def content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata without provenance, and tensors, for comparison."""
    with GGUF(path) as g:
        kv = {
            k: (g.value(k).type, g.value(k).item, g[k]) for k in g if not k.startswith(PROVENANCE)
        }
        tensors = {n: (t.shape, t.type, t.offset, g.raw(n).tobytes()) for n, t in g.tensors.items()}
    return kv, tensors


def test_target(target: Path, tmp_path: Path) -> None:
    result = convert(target, tmp_path / "t.gguf", type="bf16")
    assert result.written and result.nbytes == (tmp_path / "t.gguf").stat().st_size
    assert result.plan.type_counts() == {"BF16": 83, "F32": 86} and not result.plan.with_action(
        "drop"
    )
    with GGUF(tmp_path / "t.gguf") as g:
        config = models.kinds()["gemma4"].parse_gguf(g.kv, g.shapes())
        assert [s.head_dim for s in config.layers] == [16] * 5 + [32] + [16] * 5 + [32]
        assert [s.n_kv for s in config.layers] == [2] * 5 + [1] + [2] * 5 + [1]
        assert [s.v_from_k for s in config.layers] == [False] * 5 + [True] + [False] * 5 + [True]
        assert g["general.file_type"] == 32 and g.value("general.file_type").type is ValueType.U32
        assert g.array("rope_freqs.weight").tolist() == [1.0] * 4 + [np.float32(1e30)] * 12
        assert set(g.shapes()) == {s.name for s in models.kinds()["gemma4"].tensors(config)}


def test_command_in_the_file(target: Path, tmp_path: Path) -> None:
    """The command that the file names writes the same parts again."""
    result = convert(
        target,
        tmp_path / "t.gguf",
        type="q8_0",
        tensor_types=["ffn=bf16"],
        split_max_size=1_500_000,
    )
    with GGUF(result.out) as g:
        assert g["g4spec.command"] == (
            f"g4spec convert {target.name} -o t.gguf --type q8_0 --tensor-type ffn=bf16 "
            "--split-max-size 1.5M"
        )


def test_values_arrive_under_their_names(target: Path, tmp_path: Path) -> None:
    """BF16 to F32 is exact, so each tensor must equal the checkpoint's, read by safetensors."""
    from safetensors import safe_open

    convert(target, tmp_path / "t.gguf", type="f32")
    with GGUF(tmp_path / "t.gguf") as g, safe_open(target / "model.safetensors", "pt") as source:
        kind = models.kinds()["gemma4"]
        specs = kind.tensors(kind.parse_gguf(g.kv, g.shapes()))
        assert len(specs) == len(source.keys()) + 1  # rope_freqs is made
        for spec in specs:
            if spec.source:
                x = source.get_tensor("model.language_model." + spec.source).float().numpy()
                assert np.array_equal(g.array(spec.name), x), spec.name


@pytest.mark.parametrize("name", kinds.CONVERSION)
def test_drafts(name: str, target: Path, tmp_path: Path) -> None:
    make, options = kinds.CONVERSION[name]
    draft = make(tmp_path / "draft", target, **options)
    result = convert(draft, tmp_path / "d.gguf", target=target)
    with GGUF(tmp_path / "d.gguf") as g, GGUF_of(target, tmp_path) as t:
        kind = models.find_kind(g["general.architecture"], g.tensors)
        assert kind is not None
        config = kind.parse_gguf(g.kv, g.shapes())
        assert set(g.shapes()) == {s.name for s in kind.tensors(config)}
        assert g["tokenizer.ggml.tokens"] == t["tokenizer.ggml.tokens"]
        assert g["g4spec.stop_ids"] == [1, 50, 106]
        assert g["general.file_type"] == 7
        for tensor in g.tensors.values():
            spec = next(s for s in kind.tensors(config) if s.name == tensor.name)
            blocks = 8 if tensor.shape[-1] % 32 == 0 else 1  # Q8_0, or F16 for odd rows
            expected = {"index": 27, "vector": 0}.get(spec.role, blocks)
            assert tensor.type == expected, tensor.name
    sources = [r.source for r in result.plan.tensors if r.source]
    assert len(sources) == len(set(sources))


def GGUF_of(target: Path, folder: Path) -> GGUF:
    convert(target, folder / "target.gguf")
    return GGUF(folder / "target.gguf")


def test_zlab_facts(target: Path, tmp_path: Path) -> None:
    draft = tiny.zlab_dflash(tmp_path / "d", target, mask=60)
    convert(draft, tmp_path / "d.gguf", target=target)
    with GGUF(tmp_path / "d.gguf") as g:
        assert g["dflash.target_layers"] == [2, 6, 10]  # ids 1, 5, 9 name outputs
        assert g.value("dflash.target_layers").item is ValueType.I32
        assert g["dflash.embedding_scale"] == 8.0  # sqrt(64)
        assert g["tokenizer.ggml.mask_token_id"] == 60  # not the tokenizer's 4
        assert g["dflash.attention.sliding_window_pattern"] == [True, False]
        assert g["g4spec.dflash.layer_causal"] == [True, False]
        assert g["dflash.attention.causal"] is True  # upstream has one flag: that of most layers
        assert "token_embd.weight" not in g.tensors and "output.weight" not in g.tensors


@pytest.mark.parametrize(
    "layers,causal",
    [
        ([True] * 4 + [False], True),
        ([True, False], True),
        ([False] * 2 + [True], False),
        ([False] * 3, False),
        ([True] * 3, True),
    ],
)
def test_the_causality_of_most_layers_is_written_for_upstream(
    layers: list[bool], causal: bool
) -> None:
    assert dflash_backbone.shared_causality(layers) is causal


def test_speculators_facts(target: Path, tmp_path: Path) -> None:
    draft = tiny.speculators_dflash(tmp_path / "d", target)
    result = convert(draft, tmp_path / "d.gguf", target=target, type="bf16")
    with GGUF(tmp_path / "d.gguf") as g:
        assert g["dflash.target_layers"] == [2, 6, 10]  # named as inputs already
        assert "dflash.embedding_scale" not in g
        ids = g.array("d2t")
        assert ids.dtype == np.int64 and {1, 106} <= set(ids.tolist()) and ids.max() > 64
        assert (np.diff(ids) > 0).all() and ids.max() < tiny.VOCAB
        assert g["g4spec.dflash.t2d_sha256"] and g.shapes()["output.weight"] == (64, 64)
    assert [r.source for r in result.plan.with_action("drop")] == ["t2d"]


def test_centroid_head_travels_as_metadata(target: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    draft = tiny.assistant(tmp_path / "d", target, centroids=16, dtype="F32")
    convert(draft, tmp_path / "d.gguf", target=target)
    raw = load_file(draft / "model.safetensors")
    with GGUF(tmp_path / "d.gguf") as g:
        assert len(g.tensors) == 49
        got = g.number_array("g4spec.assistant.centroids").reshape(16, 32)
        assert np.array_equal(got, raw["masked_embedding.centroids.weight"])
        order = g.value("g4spec.assistant.token_ordering")
        assert order.item is ValueType.I32
        assert np.array_equal(order.data, raw["masked_embedding.token_ordering"])


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_spellings_and_shards_make_the_same_file(
    per_layer: bool, nested: bool, shards: int, target: Path, tmp_path: Path
) -> None:
    other = tiny.target(tmp_path / "o", per_layer=per_layer, nested=nested, shards=shards)
    convert(target, tmp_path / "a.gguf")
    convert(other, tmp_path / "b.gguf")
    assert content(tmp_path / "a.gguf") == content(tmp_path / "b.gguf")


def test_a_draft_of_a_gguf_target_equals_that_of_its_folder(target: Path, tmp_path: Path) -> None:
    draft = tiny.zlab_dflash(tmp_path / "d", target)
    convert(target, tmp_path / "t.gguf")
    convert(draft, tmp_path / "a.gguf", target=target)
    convert(draft, tmp_path / "b.gguf", target=tmp_path / "t.gguf")
    assert content(tmp_path / "a.gguf") == content(tmp_path / "b.gguf")


@pytest.mark.parametrize("type", policy.names())
def test_quantize_equals_converting_to_that_type(type: str, target: Path, tmp_path: Path) -> None:
    convert(target, tmp_path / "bf16.gguf", type="bf16")
    convert(target, tmp_path / "a.gguf", type=type)
    result = quantize(tmp_path / "bf16.gguf", tmp_path / "b.gguf", type)
    assert content(tmp_path / "a.gguf") == content(tmp_path / "b.gguf")
    number = policy.parse_type(type).file_type
    with GGUF(tmp_path / "b.gguf") as b, GGUF(tmp_path / "bf16.gguf") as a:
        assert list(b) == [k for k in a if number is not None or k != "general.file_type"]
        assert b.get("general.file_type") == number
    assert result.nbytes == (tmp_path / "b.gguf").stat().st_size


def test_rows_that_do_not_divide_become_f16(tmp_path: Path) -> None:
    target = tiny.target(tmp_path / "t", hidden=48)
    result = convert(target, tmp_path / "t.gguf")
    row = next(r for r in result.plan.tensors if r.name == "blk.0.attn_q.weight")
    assert row.type == "F16" and "48" in row.note
    with GGUF(tmp_path / "t.gguf") as g:
        assert g.tensors["blk.0.attn_q.weight"].type == 1
        assert g.tensors["blk.0.ffn_down.weight"].type == 8  # rows of 96


def test_token_table_is_cut_to_the_tokenizer(tmp_path: Path) -> None:
    target = tiny.target(tmp_path / "t", vocab=544, tokens=512)
    result = convert(target, tmp_path / "t.gguf")
    assert "544" in next(r.note for r in result.plan.tensors if r.name == "token_embd.weight")
    with GGUF(tmp_path / "t.gguf") as g:
        assert g.shapes()["token_embd.weight"] == (512, 64)


def test_gguf_py_agrees_about_every_tensor(target: Path, tmp_path: Path) -> None:
    convert(target, tmp_path / "t.gguf")
    with GGUF(tmp_path / "t.gguf") as g:
        theirs = {t.name: t for t in oracle.GGUFReader(tmp_path / "t.gguf").tensors}
        assert set(theirs) == set(g.tensors)
        for name, info in g.tensors.items():
            t = theirs[name]
            assert tuple(reversed(t.shape.tolist())) == info.shape
            values = oracle.quants.dequantize(t.data, t.tensor_type)
            assert np.array_equal(values.reshape(info.shape), g.array(name))
