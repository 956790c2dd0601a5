"""Split models of any writer open as one; parts that do not belong together are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from g4spec import cli
from g4spec.cli import _types
from g4spec.cli.render import Output
from g4spec.convert import convert, detect, provenance, quantize
from g4spec.errors import InputError, UsageError
from g4spec.gguf import GGUF, TensorData, Value, parts, write, write_split
from g4spec.gguf.values import KV, ValueType, array, string, u32
from g4spec.measure import run_record as origin
from g4spec.runtime.engine import Engine, Options
from g4spec.validate import validate
from tests.support import tiny

LIMIT = 60_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    convert(tiny.target(folder / "target"), folder / "whole.gguf")
    return folder / "whole.gguf"


@pytest.fixture
def split(whole: Path, tmp_path: Path) -> list[Path]:
    """Write the parts of one target."""
    result = quantize(whole, tmp_path / "t.gguf", "q8_0", split_max_size=LIMIT)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert result.out == paths[0] and result.nbytes == sum(p.stat().st_size for p in paths)
    return paths


def rekeyed(path: Path, **changed: Value | None) -> None:
    """Rewrite a part with other values of `split.*`; None drops one."""
    with GGUF(path, join_parts=False) as g:
        kv = {k: g.value(k) for k in g}
        data = [TensorData(n, t.shape, t.type, [g.raw(n).tobytes()]) for n, t in g.tensors.items()]
    for key, value in changed.items():
        kv[f"split.{key}"] = value or kv[f"split.{key}"]
        if value is None:
            del kv[f"split.{key}"]
    write(path, kv, data)


def test_parts_have_the_content_of_the_file(whole: Path, split: list[Path]) -> None:
    assert len(split) > 3 and all(p.stat().st_size <= LIMIT for p in split)
    assert [p.name for p in split] == [
        parts.part_name("t", i, len(split)) for i in range(len(split))
    ]
    with GGUF(whole) as one, GGUF(split[0]) as many:
        assert list(one) == list(many) and all(one[k] == many[k] for k in one)
        assert list(one.tensors) == list(many.tensors)
        assert all(np.array_equal(one.raw(n), many.raw(n)) for n in one.tensors)
        assert len(many.parts) == len(split)
    assert validate(split[0]).ok
    for path in split:  # other readers open each part on its own
        assert oracle.GGUFReader(path).fields["split.count"].parts[-1][0] == len(split)


def test_parts_run_and_convert_as_one(whole: Path, split: list[Path], tmp_path: Path) -> None:
    texts = []
    for path in (whole, split[0]):
        run = Engine.load(path, None, n_ctx=64).generate([5, 6], Options(n_predict=5))
        texts.append([i for cycle in run for i in cycle.tokens])
    assert texts[0] == texts[1]
    quantize(split[0], tmp_path / "joined", "q8_0")
    assert (tmp_path / "joined").read_bytes() == whole.read_bytes()
    with detect(tmp_path) as found:  # a folder with one model in parts holds one model
        assert found.path == split[0]
        before = provenance.digest(found.source)
    assert origin.describe_file(split[0])["bytes"] == sum(p.stat().st_size for p in split)
    raw = bytearray(split[-1].read_bytes())
    raw[-40] ^= 1
    split[-1].write_bytes(raw)
    with GGUF(split[0]) as changed:
        assert provenance.digest(changed) != before


def test_parts_of_gguf_py_open(tmp_path: Path) -> None:
    writer = oracle.GGUFWriter(tmp_path / "x.gguf", "gemma4", split_max_tensors=2)
    values = {f"t{i}": np.full((3, 32), i, np.float32) for i in range(5)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUF(tmp_path / "x-00001-of-00003.gguf") as g:
        assert list(g.tensors) == list(values) and g["general.architecture"] == "gemma4"
        assert all(np.array_equal(g.array(n), v) for n, v in values.items())


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("missing", r"part t-00002-of-0000\d.gguf of this split model is missing.*Download all"),
        ("several missing", r"t-00002-of-0000\d.gguf and 1 more"),
        ("renamed", r"name of part 1 of \d.*expected NAME-00001-of-0000\d.gguf, found other.gguf"),
        ("later part", r"part 2 of \d.*Pass the first part, .*t-00001"),
        ("same part twice", r"00002-of.*split.no: expected 1, found 0"),
        ("another count", r"00002-of.*split.count: expected \d+, found 300"),
        ("no number", r"00002-of.*split.no of a split model: expected a number"),
        ("another total", r"tensors of all parts: expected 3, found"),
        ("no total", r"split.tensors.count of a split model: expected a number"),
        ("count is a text", r"split.count of a split model: expected a number"),
        ("repeated tensor", r"00002-of.*tensor '.*' is in an earlier part too"),
        ("truncated", r"00002-of.*beyond the end"),
    ],
)
def test_mismatched_parts_are_named(broken: str, says: str, split: list[Path]) -> None:
    path = split[0]
    if "missing" in broken:
        split[1].unlink()
        if broken == "several missing":
            split[2].unlink()
    elif broken == "renamed":
        path = path.rename(path.with_name("other.gguf"))
    elif broken == "later part":
        path = split[1]
    elif broken == "same part twice":
        rekeyed(split[1], no=Value(ValueType.U16, 0))
    elif broken == "another count":
        rekeyed(split[1], count=Value(ValueType.U16, 300))
    elif broken == "no number":
        rekeyed(split[1], no=None)
    elif broken == "another total":
        rekeyed(path, **{"tensors.count": Value(ValueType.I32, 3)})
    elif broken == "no total":
        rekeyed(path, **{"tensors.count": None})
    elif broken == "count is a text":
        rekeyed(path, count=string("2"))
    elif broken == "repeated tensor":
        with GGUF(path, join_parts=False) as g:
            name, info = next(iter(g.tensors.items()))
            data = [TensorData(name, info.shape, info.type, [g.raw(name).tobytes()])]
        with GGUF(split[1], join_parts=False) as g:
            kv = {k: g.value(k) for k in g}
        write(split[1], kv, data)
    else:
        split[1].write_bytes(split[1].read_bytes()[:-5000])
    with pytest.raises(InputError) as e:
        GGUF(path)
    assert re.search(says, str(e.value), re.DOTALL), str(e.value)
    report = validate(path)
    assert not report.ok


def test_parts_that_cannot_be_written(tmp_path: Path) -> None:
    kv: KV = {"a": array(ValueType.U32, list(range(300))), "general.alignment": u32(64)}

    def tensors() -> list[TensorData]:
        return [TensorData(f"t{i}", (256,), 0, [bytes(1024)]) for i in range(4)]

    with pytest.raises(InputError, match=r"metadata do not fit.*1,000.*Allow larger"):
        write_split(tmp_path / "a.gguf", kv, tensors(), 1000)
    with pytest.raises(InputError, match=r"tensor t0 does not fit into a part of 1,100 bytes"):
        write_split(tmp_path / "a.gguf", {}, tensors(), 1100)
    assert not list(tmp_path.iterdir())
    # If the metadata fill a part, that part has no tensors.
    paths, size = write_split(tmp_path / "a.gguf", kv, tensors(), 1500)
    assert len(paths) == 5 and size == sum(p.stat().st_size for p in paths)
    with GGUF(paths[0]) as g:
        assert list(g.tensors) == ["t0", "t1", "t2", "t3"] and g["a"] == list(range(300))
    assert write_split(tmp_path / "b.gguf", kv, tensors(), 10**6)[0] == [tmp_path / "b.gguf"]


@pytest.mark.parametrize("limit", [None, LIMIT, 10**9])
def test_a_dry_run_shows_the_files(
    whole: Path, limit: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, written = (
        quantize(whole, tmp_path / "t.gguf", "q8_0", split_max_size=limit, dry_run=dry)
        for dry in (True, False)
    )
    assert planned.files == written.files == {p: p.stat().st_size for p in tmp_path.iterdir()}
    assert (len(planned.files) > 1) == (limit == LIMIT)
    for result in (planned, written):
        _types.show(result, Output())
        shown = capsys.readouterr().out
        assert shown.splitlines()[-1].startswith(f"{'wrote' if result.written else 'would write'} ")
        assert (f"in {len(planned.files)} files of at most" in shown) == (limit == LIMIT)
    with pytest.raises(InputError, match="not fit into a part"):
        quantize(whole, tmp_path / "u.gguf", "q8_0", split_max_size=1000, dry_run=True)


def test_command_line(
    whole: Path, split: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(split[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{len(split)} parts" in found["container"]
    assert found["bytes"] == sum(p.stat().st_size for p in split)
    out = tmp_path / "new" / "n.gguf"
    out.parent.mkdir()
    args = ["convert", str(whole), "-o", str(out), "--split-max-size"]
    assert cli.run([*args, "1M"]) == 0 and out.exists()
    assert cli.run([*args, "60K"]) == UsageError.exit_code
    assert "a number and M or G" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t.gguf", "t", "sub/../t.gguf"])
def test_parts_are_not_written_onto_the_parts_they_are_made_of(
    split: list[Path], name: str
) -> None:
    (split[0].parent / "sub").mkdir(exist_ok=True)
    before = [p.read_bytes() for p in split]
    with pytest.raises(UsageError, match=r"parts of the output may overwrite the input t-00001"):
        quantize(split[0], split[0].parent / name, "q8_0", split_max_size=LIMIT)
    assert [p.read_bytes() for p in split] == before
