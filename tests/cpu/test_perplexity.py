"""Perplexity, KL divergence and importance matrices of the trained family, compared with
llama.cpp."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from g4spec import cli, quant
from g4spec.convert import convert, quantize
from g4spec.core import CacheShape
from g4spec.errors import InputError, UsageError
from g4spec.gguf import imatrix
from g4spec.measure import importance, perplexity, text_chunks
from g4spec.ops.kv import Space
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.engine import Engine
from tests.support import tiny

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "examples" / "tiny" / "needle.txt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "f32.gguf"
    convert(ROOT / "examples" / "tiny" / "target", path, type="f32")
    return path


@pytest.fixture(scope="module")
def engine(trained: Path) -> Iterator[Engine]:
    with Engine.load(trained, n_ctx=512) as one:
        yield one


@pytest.fixture(scope="module")
def parts(engine: Engine) -> list[list[int]]:
    return text_chunks.split_text(engine.tokenizer, TEXT.read_text().removesuffix("\n"), chunks=2)


def test_chunks_are_cut_as_in_llama_cpp(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = tokenizer.encode("one two three four five six seven")
    got = text_chunks.split_text(tokenizer, "one two three four five six seven", 4)
    assert len(got) == len(ids) // 4 >= 2
    for i, part in enumerate(got):
        assert part == [tokenizer.bos, *ids[4 * i + 1 : 4 * i + 4]]
    assert text_chunks.split_text(tokenizer, "one two three four five six seven", 4, 1) == got[:1]
    with pytest.raises(InputError, match="at least 1024 tokens"):
        text_chunks.split_text(tokenizer, "short")
    with pytest.raises(UsageError):
        text_chunks.split_text(tokenizer, "one two", 2)


def test_perplexity_and_divergence_equal_llama_perplexitys(
    trained: Path, engine: Engine, parts: list[list[int]], tmp_path: Path
) -> None:
    """Compared with `llama-perplexity -c 512 -fa off -ctk f32 -ctv f32 --chunks 2` for the F32 file
    and for llama-quantize's Q4_0 with `--output-tensor-type q8_0`, which has the same bytes as
    g4spec's. llama.cpp rounds activations to 8 bits, and its GELU is a half-precision table."""
    path = tmp_path / "q4_0.gguf"
    quantize(trained, path, "q4_0", tensor_types=("token_embd=q8_0",))
    with Engine.load(path, n_ctx=512) as other:
        got = perplexity.measure(other, parts, engine)
    a = got.against
    assert a is not None and (got.tokens, got.chunks, got.size) == (510, 2, 512)
    assert (a.base.value, a.base.error) == pytest.approx((26.5656, 3.63520), rel=1e-4)
    assert got.perplexity.value == pytest.approx(27.626444, rel=5e-3)
    assert got.perplexity.error == pytest.approx(3.816246, rel=5e-3)
    assert a.divergence.value == pytest.approx(0.037948, rel=0.02)
    assert a.divergence.error == pytest.approx(0.002096, rel=0.02)
    assert a.divergences["95"] == pytest.approx(0.100072, rel=0.05)
    assert a.divergences["50"] == pytest.approx(0.027671, rel=0.05)
    assert a.same_top.value == pytest.approx(0.89412, abs=0.006)
    assert a.same_top.error == pytest.approx(0.01364, rel=0.03)
    assert a.moved.value == pytest.approx(0.04591, rel=0.02)
    assert a.ratio.value == pytest.approx(27.626444 / 26.5656, rel=5e-3)


def test_divergence_of_known_distributions() -> None:
    """Compared with values computed by hand from the definitions."""
    own, base = np.log([2.0, 4.0, 8.0]), np.log([2.0, 2.0, 4.0])
    found = perplexity._against(own, base, np.array([0.1, 0.2, 0.6]), np.array([1.0, 0.0, 1.0]))
    assert found.base.value == pytest.approx(16 ** (1 / 3))
    assert found.ratio.value == pytest.approx(4 ** (1 / 3))
    d = np.array([0, np.log(2), np.log(2)])
    assert found.ratio.error == pytest.approx(4 ** (1 / 3) * d.std() / math.sqrt(2))
    assert found.divergence.value == pytest.approx(0.3)
    assert found.divergences["100"] == 0.6 and found.divergences["50"] == 0.2
    assert found.same_top.value == pytest.approx(2 / 3)
    assert found.same_top.error == pytest.approx(math.sqrt(2 / 9 / 2))
    assert found.moved.value == pytest.approx(math.sqrt((0.25**2 + 0.125**2) / 3))


def test_an_importance_matrix_equals_llama_imatrixs(engine: Engine, parts: list[list[int]]) -> None:
    """`imatrix-needle.json` contains the sum and the fourth and largest entry of each matrix, for
    the same chunks."""
    plain = engine.target.model.ops
    found = importance.collect(engine, parts, "needle.txt")
    assert engine.target.model.ops is plain
    known = json.loads((ROOT / "tests" / "data" / "imatrix-needle.json").read_text())
    assert found.entries.keys() == known.keys()
    assert (found.chunks, found.chunk_size, found.datasets) == (2, 512, ["needle.txt"])
    for name, entry in found.entries.items():
        assert entry.counts.tolist() == [1024]
        sums = entry.sums[0]
        # Most differ by 5e-5; after a GELU (a half-precision table in llama.cpp) by 1e-3.
        assert [sums.sum(), sums[3], sums.max()] == pytest.approx(known[name], rel=2e-3), name


def test_experts_are_counted_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    convert(tiny.target(tmp_path / "target", layers=6, experts=4), path, type="f32")
    with Engine.load(path, n_ctx=64) as engine:
        parts = [[2, *range(10 + 31 * i, 41 + 31 * i)] for i in range(2)]
        seen: dict[str, Any] = {}
        ops = engine.target.model.ops
        inner = type(ops).experts

        def watched(self: Any, x: Any, ids: Any, weights: Any, gate: Any, *rest: Any) -> Any:
            name = next(n for n, w in engine.target.model.w.items() if w is gate)
            sums, counts = seen.setdefault(name, (torch.zeros(4, x.shape[1]).double(), [0] * 4))
            for e in range(4):
                rows = x[(ids == e).any(1)].double()
                sums[e] += rows.square().sum(0)
                counts[e] += len(rows)
            return inner(self, x, ids, weights, gate, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(ops), "experts", watched)
            found = importance.collect(engine, parts, "x")
    assert len(seen) == 6
    for name, (sums, counts) in seen.items():
        assert found.entries[name].counts.tolist() == counts
        assert np.allclose(found.entries[name].sums, sums.numpy(), rtol=1e-6)
        down = found.entries[name.replace("gate_up", "down")]
        assert down.counts.tolist() == counts and down.sums.shape == (4, 24)
        assert sum(counts) == 2 * 2 * 32
        router = found.entries[name.replace("gate_up_exps", "gate_inp")]
        assert router.counts.tolist() == [64]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_type_rounds_keys_and_values_on_a_cpu(kind: str) -> None:
    rows = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1))
    kv = TorchBackend(kind).cache(CacheShape(2, 64, None), Space.single(32), 16)
    kv.append(torch.zeros(5, dtype=torch.int64), torch.arange(5), rows, 3 * rows)
    form = quant.get(kind)
    for got, wanted in zip(kv.read(0, 0, 4), (rows, 3 * rows), strict=True):
        assert not torch.equal(got, wanted)
        assert np.array_equal(got, form.dequantize(form.quantize(wanted.numpy())))
    kv.append(torch.zeros(1, dtype=torch.int64), torch.arange(1), rows[:1] * math.nan, rows[:1])
    assert bool(kv.read(0, 0, 0)[0].isnan().all())  # which the logits show


def test_the_engine_uses_the_cache_type(
    trained: Path, engine: Engine, parts: list[list[int]]
) -> None:
    whole, errors = text_chunks.read_chunk(engine, parts[0][:64]), []
    for kind in ("f16", "q8_0"):
        with Engine.load(trained, n_ctx=512, cache_type=kind) as other:
            errors.append(float((text_chunks.read_chunk(other, parts[0][:64]) - whole).abs().max()))
    assert 0 < errors[0] < errors[1]


def test_on_the_command_line(trained: Path, tmp_path: Path, capsys: Any) -> None:
    path, text = tmp_path / "i.gguf", tmp_path / "t.txt"
    text.write_text(TEXT.read_text()[:2000])
    line = ["-m", str(trained), str(text), "-c", "64", "--chunks", "2", "--json"]
    assert cli.run(["perplexity", *line, "--against", str(trained)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 2 * 31
    assert found["against"]["divergence"] == {"value": 0.0, "error": 0.0}
    assert found["against"]["same_top"]["value"] == 1
    assert cli.run(["imatrix", *line, "-o", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["matrices"] == 40
    read = imatrix.read(path)
    assert (read.chunks, read.chunk_size, read.datasets) == (2, 64, ["t.txt"])
    assert cli.run(["perplexity", "-m", str(trained), str(text)]) == 3  # too short for 512


def test_commands_without_drafts_do_not_offer_them(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    draft, text = tmp_path / "d.gguf", tmp_path / "t.txt"
    convert(ROOT / "examples" / "tiny" / "dflash", draft, target=trained)
    text.write_text("some words")
    folder = str(ROOT / "examples" / "tiny" / "dflash")
    for line in (
        ["imatrix", "-m", str(draft)],
        ["perplexity", "-m", folder],
        ["perplexity", "-m", str(trained), "--against", str(draft)],
    ):
        assert cli.run([*line, str(text)]) == 3
        error = capsys.readouterr().err
        assert "This is a draft, and this command runs only targets" in error
        assert "-md" not in error
    for command in ("imatrix", "perplexity"):
        assert cli.run([command, "-m", str(trained), "-md", str(draft), str(text)]) == 2
        assert "-md: this command has no option --model-draft" in capsys.readouterr().err


def test_models_of_two_vocabularies_are_not_compared(
    engine: Engine, tmp_path: Path, parts: list[list[int]]
) -> None:
    path = tmp_path / "t.gguf"
    convert(tiny.target(tmp_path / "target"), path, type="f16")
    with (
        Engine.load(path, n_ctx=512) as other,
        pytest.raises(InputError, match="different vocabularies"),
    ):
        perplexity.measure(engine, parts, other)
