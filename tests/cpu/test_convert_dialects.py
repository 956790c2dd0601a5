"""Files of other programs are converted to the same file as a direct conversion of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4spec import validate
from g4spec.convert import convert, convert_cached, detect, dialects
from g4spec.convert.dialects import DIALECTS
from g4spec.errors import InputError, Unsupported, UsageError
from g4spec.gguf import GGUF, ValueType, array, boolean, f32, string, u32
from g4spec.models.assistant import ORDERING
from tests.cpu.test_convert_kinds import content
from tests.support import tiny
from tests.support.selection import sample
from tests.support.tiny_dialects import ASSISTANT, DFLASH, Parts

TITLES = {
    "lucebox": "lucebox",
    "lucebox without ids": "lucebox",
    "dusterbloom": "dusterbloom's fork",
    "ik": "ik_llama.cpp, beellama or buun",
    "beellama": "ik_llama.cpp, beellama or buun",
    "early upstream": "an early llama.cpp branch",
    "AtomicChat": "AtomicChat",
    "ik mtp": "ik_llama.cpp",
    "ik assistant": "ik_llama.cpp's newer form",
}
CASES = [
    *((name, None) for name in DFLASH),
    *((name, n) for name in ASSISTANT for n in (0, 16) if n or name != "early upstream"),
]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, drafts for it and their direct conversions, in BF16 and Q8_0."""
    base = tmp_path_factory.mktemp("family")
    target = tiny.target(base / "target")
    convert(target, base / "target.gguf", type="bf16")
    tiny.zlab_dflash(base / "dflash", target, layers=3, mask=60)
    for n in (0, 16):
        tiny.assistant(base / f"asst{n}", target, centroids=n)
    for name in ("dflash", "asst0", "asst16"):
        for type in ("bf16", "q8_0"):
            convert(base / name, base / f"{name}-{type}.gguf", target=target, type=type)
    return base


def in_dialect(
    family: Path, out: Path, name: str, centroids: int | None, type: str = "bf16"
) -> Path:
    """Write a file in a dialect."""
    source = family / f"{'dflash' if centroids is None else f'asst{centroids}'}-{type}.gguf"
    parts = Parts.of(source)
    if centroids is None:
        DFLASH[name](parts)
    else:
        ASSISTANT[name](parts, source)
    return parts.write(out)


def clusters(kv: dict[str, Any]) -> Any:
    """Sort the token ordering within each cluster, because one dialect does not keep that order."""
    entry = kv.pop(ORDERING, None)
    return None if entry is None else np.sort(np.array(entry[2]).reshape(16, -1)).tolist()


@pytest.mark.parametrize("type", ["bf16", "q8_0"])
@pytest.mark.parametrize("name,centroids", CASES)
def test_a_rewritten_file_is_the_direct_conversion(
    name: str, centroids: int | None, type: str, family: Path, tmp_path: Path
) -> None:
    source = in_dialect(family, tmp_path / "old.gguf", name, centroids, type)
    with detect(source) as found:
        assert found.dialect is not None and found.dialect.title == TITLES[name]
    result = convert(source, tmp_path / "new.gguf", target=family / "target", type="q8_0")
    assert any("rewritten" in n for n in result.notes)
    kind = "dflash" if centroids is None else f"asst{centroids}"
    (kv, tensors), (kv0, tensors0) = (
        content(p) for p in (tmp_path / "new.gguf", family / f"{kind}-q8_0.gguf")
    )
    if name == "ik mtp":
        assert clusters(kv) == clusters(kv0)
    assert kv == kv0 and tensors == tensors0
    report = validate.validate(tmp_path / "new.gguf", family / "target.gguf")
    assert report.ok, report.summary()


def proposals(target: Path, draft: Path) -> list[list[int]]:
    """Return the draft's proposals over 24 tokens of text."""
    from g4spec.runtime.engine import Engine, Options

    engine = Engine.load(target, draft, n_ctx=128)
    run = engine.generate([2, 150, 200, 311], Options(n_predict=24, draft_max=3, ignore_eos=True))
    return [list(cycle.drafted) for cycle in run]


@pytest.mark.parametrize("kind", sample(["dflash", "asst0", "asst16"], 1))
def test_proposals_are_the_same(kind: str, family: Path, tmp_path: Path) -> None:
    target = family / "target.gguf"
    want = proposals(target, family / f"{kind}-bf16.gguf")
    assert any(want)
    centroids = None if kind == "dflash" else int(kind[4:])
    for i, (name, n) in enumerate(c for c in CASES if c[1] == centroids):
        source = in_dialect(family, tmp_path / f"old{i}.gguf", name, n)
        convert(source, tmp_path / f"new{i}.gguf", target=target, type="bf16")
        assert proposals(target, tmp_path / f"new{i}.gguf") == want, name


def test_every_dialect_has_a_builder() -> None:
    assert {d.title for d in DIALECTS} == set(TITLES.values())


def test_the_table_in_the_docs_is_the_codes() -> None:
    page = Path(__file__).parents[2] / "docs" / "sources.md"
    assert dialects.markdown() in page.read_text(encoding="utf-8")


def test_quantized_matrices_are_never_requantized(family: Path, tmp_path: Path) -> None:
    source = in_dialect(family, tmp_path / "old.gguf", "ik", None, "q8_0")
    result = convert(source, tmp_path / "new.gguf", target=family / "target.gguf", type="bf16")
    assert set(result.plan.type_counts()) == {"Q8_0", "F32"}
    with GGUF(tmp_path / "new.gguf") as g:
        assert g["general.file_type"] == 7


def test_a_draft_in_a_dialect_is_converted_into_the_cache(family: Path, tmp_path: Path) -> None:
    source = in_dialect(family, tmp_path / "old.gguf", "lucebox", None)
    made, note = convert_cached(source, family / "target.gguf", tmp_path / "cache")
    assert "converted into" in note and made.parent == tmp_path / "cache"
    assert convert_cached(source, family / "target.gguf", tmp_path / "cache")[0] == made
    plain, _ = convert_cached(
        family / "dflash-q8_0.gguf", family / "target.gguf", tmp_path / "cache"
    )
    assert plain == family / "dflash-q8_0.gguf"


REFUSED: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "attn_gate": (
        lambda p: p.tensors.update({"blk.0.attn_gate.weight": p.tensors["blk.0.attn_q.weight"]}),
        "gated attention",
    ),
    "aux norm": (
        lambda p: p.tensors.update({"dflash_aux_hidden_norm.0": p.tensors["output_norm.weight"]}),
        "single target features",
    ),
    "domino": (
        lambda p: p.tensors.update({"dflash.domino.x": p.tensors["output_norm.weight"]}),
        "Domino",
    ),
    "dspark": (
        lambda p: p.tensors.update({"dflash.dspark.markov.w1": p.tensors["blk.0.attn_q.weight"]}),
        "DSpark",
    ),
    "laguna": (lambda p: p.kv.update({f"{p.arch}.dflash.laguna": boolean(True)}), "Laguna"),
    "bias": (
        lambda p: p.tensors.update({"blk.0.attn_q.bias": p.tensors["output_norm.weight"]}),
        "biases",
    ),
    "sinks": (
        lambda p: p.tensors.update({"blk.0.attn_sinks.weight": p.tensors["output_norm.weight"]}),
        "sinks",
    ),
    "gelu": (lambda p: p.kv.update({f"{p.arch}.hidden_activation": string("gelu")}), "activation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_features_without_code_are_named(name: str, family: Path, tmp_path: Path) -> None:
    change, says = REFUSED[name]
    parts = Parts.of(family / "dflash-bf16.gguf")
    DFLASH["ik"](parts)
    change(parts)
    with pytest.raises(Unsupported, match=says):
        convert(parts.write(tmp_path / "old.gguf"), tmp_path / "n.gguf", target=family / "target")
    assert not (tmp_path / "n.gguf").exists()


WRONG: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "unknown tensor": (
        lambda p: p.tensors.update(surprise=p.tensors["output_norm.weight"]),
        "surprise.*no rule",
    ),
    "missing tensor": (lambda p: p.tensors.pop("output_norm.weight"), "norm.weight.*missing"),
    "ids": (
        lambda p: p.kv.update({f"{p.arch}.dflash.target_layer_ids": string("1,2")}),
        "list of integers",
    ),
    "ids beyond": (
        lambda p: p.kv.update(
            {f"{p.arch}.dflash.target_layer_ids": array(ValueType.I32, [1, 5, 12])}
        ),
        "do not exist",
    ),
    "count of ids": (
        lambda p: p.kv.update({f"{p.arch}.dflash.target_layer_ids": array(ValueType.I32, [1, 5])}),
        "fc.weight",
    ),
    "width": (lambda p: p.kv.update({f"{p.arch}.embedding_length": u32(96)}), "hidden size"),
    "tokens": (lambda p: p.kv["tokenizer.ggml.tokens"].data.__setitem__(9, "other"), "tokens are"),
    "layers": (lambda p: p.kv.update({f"{p.arch}.block_count": u32(1 << 30)}), "at most 512"),
    "positions": (
        lambda p: p.more({"rope.scaling.type": string("yarn"), "rope.scaling.factor": f32(4)}),
        r"rope\.scaling\.factor: expected one of .*found 4",
    ),
    "rotation": (lambda p: p.more({"rope.dimension_count": u32(8)}), "rope.dimension_count"),
    "scale": (lambda p: p.more({"rope.scale_linear": f32(2)}), r"rope\.scale_linear"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit_are_refused(name: str, family: Path, tmp_path: Path) -> None:
    change, says = WRONG[name]
    parts = Parts.of(family / "dflash-bf16.gguf")
    DFLASH["ik"](parts)
    change(parts)
    with pytest.raises(InputError, match=says):
        convert(parts.write(tmp_path / "old.gguf"), tmp_path / "n.gguf", target=family / "target")


def test_scaling_by_nothing_is_taken(family: Path, tmp_path: Path) -> None:
    """Has what llama.cpp writes for a model without scaling."""
    parts = Parts.of(family / "dflash-bf16.gguf")
    DFLASH["ik"](parts)
    parts.more({"rope.scaling.type": string("none"), "rope.scaling.factor": f32(4)})
    made = convert(
        parts.write(tmp_path / "old.gguf"), tmp_path / "n.gguf", target=family / "target"
    )
    assert any("rope.scaling.factor" in note for note in made.notes)


def test_the_target_is_needed(family: Path, tmp_path: Path) -> None:
    source = in_dialect(family, tmp_path / "old.gguf", "lucebox", None)
    with pytest.raises(UsageError, match="needs the target"):
        convert(source, tmp_path / "n.gguf")


def test_an_ordering_that_is_neither_form_is_refused(family: Path, tmp_path: Path) -> None:
    parts = Parts.of(family / "asst16-bf16.gguf")
    ASSISTANT["AtomicChat"](parts, family / "asst16-bf16.gguf")
    shape, kind, raw = parts.tensors["mtp.token_ordering.weight"]
    order = np.frombuffer(raw, "<i4").copy()
    order[0] = order[1]
    parts.tensors["mtp.token_ordering.weight"] = (shape, kind, order.tobytes())
    with pytest.raises(InputError, match="permutation"):
        convert(parts.write(tmp_path / "old.gguf"), tmp_path / "n.gguf", target=family / "target")
