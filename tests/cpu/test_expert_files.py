"""Files of targets as other programs write them: the experts' gate and up projections apart,
fallback types for rows that 256 does not divide, queries, keys and values in one tensor, and files
of Ollama."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.convert import convert, quantize
from g4spec.convert.tokenizer import from_gguf
from g4spec.gguf import GGUF, TensorData, ValueType, array, boolean, string
from g4spec.gguf.header import TensorInfo
from g4spec.measure import text_chunks
from g4spec.models.spec import BYTE, CONTROL, NORMAL, VISIBLE
from g4spec.runtime.engine import Engine
from g4spec.validate import validate
from tests.support import tiny
from tests.support.quant_blocks import random_blocks
from tests.support.rewritten_files import Change, apart, by_ollama, fused, rewritten, same

N_EXPERTS, WIDTH = 4, 96
SHAPE = {
    "layers": 2,
    "period": 2,
    "hidden": 256,
    "inter": 256,
    "experts": N_EXPERTS,
    "expert_inter": WIDTH,
}
"""The experts' down projections have rows of 96, as those of 704 in the 26B-A4B."""
FALLBACKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")
"""Types with blocks of 32."""
IDS = list(range(2, 90))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    convert(tiny.target(folder / "target", **SHAPE), folder / "bf16.gguf", type="bf16")
    return folder / "bf16.gguf"


def with_down(type: str) -> Change:
    """Return the change of the experts' down projections to random blocks of a type."""

    def change(file: GGUF, info: TensorInfo) -> list[TensorData]:
        if not info.name.endswith("ffn_down_exps.weight"):
            return same(file, info)
        n, rows, columns = info.shape
        blocks = random_blocks(type, n * rows, columns)
        return [TensorData(info.name, info.shape, quant.get(type).type, [blocks])]

    return change


def plain(file: GGUF, info: TensorInfo) -> list[TensorData]:
    """Dequantize with the package gguf."""
    rows = file.raw(info.name).reshape(-1, info.format.row_bytes(info.shape[-1]))
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(info.type))
    return [TensorData(info.name, info.shape, 0, [np.ascontiguousarray(values, np.float32)])]


def logits(path: Path) -> torch.Tensor:
    with Engine.load(path, n_ctx=128) as engine:
        return text_chunks.read_chunk(engine, IDS)


@pytest.mark.parametrize("type", ["q2_k", "q3_k_m", "iq4_xs", "q5_k_m"])
def test_split_experts_compute_what_joined_ones_do(source: Path, tmp_path: Path, type: str) -> None:
    joined = tmp_path / "joined.gguf"
    quantize(source, joined, type=type)
    split = rewritten(joined, tmp_path / "split.gguf", apart)
    with GGUF(split) as file:
        down = file.tensors["blk.0.ffn_down_exps.weight"].format
        assert down.block == 32 and "blk.0.ffn_gate_exps.weight" in file.tensors
    expected = logits(joined)
    assert torch.equal(logits(split), expected)
    assert torch.equal(logits(rewritten(split, tmp_path / "f32.gguf", plain)), expected)
    assert validate(split).ok


@pytest.mark.parametrize("type", FALLBACKS)
def test_down_projections_in_fallback_types(source: Path, tmp_path: Path, type: str) -> None:
    made = rewritten(source, tmp_path / "made.gguf", with_down(type))
    expected = logits(rewritten(made, tmp_path / "f32.gguf", plain))
    assert torch.isfinite(expected).all()
    assert torch.equal(logits(made), expected)
    assert not torch.equal(logits(source), expected)


def test_split_experts_are_quantized_again(source: Path, tmp_path: Path) -> None:
    split = rewritten(source, tmp_path / "split.gguf", apart)
    for path, name in ((source, "joined"), (split, "apart")):
        quantize(path, tmp_path / f"{name}.gguf", type="q4_0")
    assert torch.equal(logits(tmp_path / "joined.gguf"), logits(tmp_path / "apart.gguf"))


@pytest.mark.parametrize("type", ["f32", "bf16", "q6_k"])
def test_fused_projections_compute_what_separate_ones_do(
    source: Path, tmp_path: Path, type: str
) -> None:
    """The full layer, whose values are its keys, has no fused tensor. Rows of 210 bytes (Q6_K) put
    keys and values at odd offsets."""
    quantize(source, apart := tmp_path / "apart.gguf", type=type)
    joined = rewritten(apart, tmp_path / "joined.gguf", fused)
    expected = logits(apart)
    assert torch.equal(logits(joined), expected)
    report = validate(joined)
    assert report.ok and not report.unable
    made = []
    for path in (joined, apart):
        quantize(path, out := tmp_path / f"{path.stem}-4.gguf", type="q4_0", allow_requantize=True)
        with GGUF(path) as before, GGUF(out) as after:
            made.append([{n: bytes(f.raw(n)) for n in f.tensors} for f in (before, after)])
    assert made[0] == made[1]


def test_files_by_ollama_open(source: Path, tmp_path: Path) -> None:
    """Their tokenizer, in other words the same, is what a draft of such a target gets, too."""
    with GGUF(source) as file:
        tokenizer = from_gguf(file)
        kinds = np.array(file["tokenizer.ggml.token_type"])
        kinds[kinds == BYTE] = NORMAL
        kinds[np.isin(file["tokenizer.ggml.tokens"], list(VISIBLE))] = CONTROL
    keys = {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("gemma4"),
        "tokenizer.ggml.token_type": array(ValueType.I32, kinds),
        "tokenizer.ggml.add_bos_token": boolean(False),
    }
    theirs = rewritten(source, tmp_path / "ollama.gguf", by_ollama, keys)
    with Engine.load(theirs, n_ctx=128) as engine:
        assert engine.notes == ["13 tensors for vision and audio are not used"]
    assert torch.equal(logits(theirs), logits(source))
    for path, name in ((source, "a"), (theirs, "b")):
        out = tmp_path / f"{name}.gguf"
        result = quantize(path, out, type="q4_k_m", allow_requantize=True)
    assert len(result.plan.with_action("drop")) == 13
    for path, says in ((source, "its types"), (theirs, "its types and its tokenizer's words")):
        note = convert(path, tmp_path / "c.gguf", type="q8_0", dry_run=True).notes[0]
        left_out = "; vision and audio are left out" * (path is theirs)
        assert note == f"{path} is a GGUF already; only {says} are changed{left_out}"
    with GGUF(tmp_path / "a.gguf") as a, GGUF(tmp_path / "b.gguf") as b, GGUF(theirs) as file:
        assert {n: bytes(a.raw(n)) for n in a.tensors} == {n: bytes(b.raw(n)) for n in b.tensors}
        for made in (from_gguf(b), from_gguf(file)):
            assert made.pop("tokenizer.ggml.pre").data == "gemma4"
            assert [(k, v.type, list(np.ravel(v.data))) for k, v in sorted(made.items())] == [
                (k, v.type, list(np.ravel(v.data))) for k, v in sorted(tokenizer.items())
            ]


def test_layers_that_share_keys_have_fused_projections_too(tmp_path: Path) -> None:
    """Checkpoints of E2B and E4B have keys and values that no layer reads."""
    folder = tiny.target(
        tmp_path / "target", layers=6, period=3, shared=3, spare=True, k_eq_v=False
    )
    convert(folder, apart := tmp_path / "apart.gguf", type="bf16")
    joined = rewritten(apart, tmp_path / "joined.gguf", fused)
    assert b"blk.5.attn_qkv.weight" in joined.read_bytes()
    assert torch.equal(logits(joined), logits(apart))
    assert validate(joined, against=folder).ok
