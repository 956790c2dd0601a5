"""The reader accepts what upstream accepts, refuses the rest with a clear error, and trusts no
count."""

from __future__ import annotations

import json
import struct
import tracemalloc
from itertools import islice
from pathlib import Path
from unittest import mock

import gguf as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g4spec.errors import G4Error, InputError, Unsupported
from g4spec.gguf import (
    GGUF,
    KV,
    TensorData,
    Value,
    ValueType,
    array,
    boolean,
    f32,
    string,
    string_arrays,
    u32,
    write,
)
from g4spec.gguf.string_arrays import BLOCK, WINDOW
from tests.support.processor_time import processor_time_below

HEAD = struct.pack("<4sIqq", b"GGUF", 3, 0, 0)


def text(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def file(
    path: Path,
    *,
    version: int = 3,
    kv: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    n_kv: int | None = None,
    n_tensors: int | None = None,
) -> Path:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(kv) if n_kv is None else n_kv)
    head = struct.pack("<4sIqq", b"GGUF", version, *counts) + b"".join(kv + tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def pair(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<i", kind) + payload


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}qiQ", len(dims), *dims, kind, offset)


def sample(path: Path) -> KV:
    kv: KV = {
        "general.architecture": string("gemma4"),
        "s": string("ün\x00i"),
        "u32": u32(2**32 - 1),
        "f": f32(0.1),
        "yes": boolean(True),
        "i8": Value(ValueType.I8, -128),
        "i64": Value(ValueType.I64, -(2**63)),
        "u64": Value(ValueType.U64, 2**64 - 1),
        "f64": Value(ValueType.F64, 0.1),
        "u16": Value(ValueType.U16, 7),
        "bools": array(ValueType.BOOL, [True, False]),
        "words": array(ValueType.STRING, ["a", "", "▁the"]),
        "ints": array(ValueType.I32, [-1, 2]),
        "none": array(ValueType.I32, []),
        "big": array(ValueType.F32, [0.5] * 100),
    }
    tensors = [
        TensorData("a.weight", (2, 3), 0, [np.arange(6, dtype=np.float32)]),
        TensorData("d2t", (3,), 27, [np.arange(3)]),
        TensorData("e", (1,), 28, [np.ones(1)]),
    ]
    write(path, kv, tensors)
    return kv


@pytest.mark.parametrize(
    "begin,says",
    [
        (b"PK\x03\x04", "llamafile or zip.*extract"),
        (b"MZqFpD='", "llamafile"),
        (b"\x1f\x8b\x08", "decompress"),
        (b"tjgg", "before GGUF"),
        (b"FROM ./x.gguf", "Modelfile.*FROM"),
        (b'\x10\0\0\0\0\0\0\0{"a": {}}', "safetensors"),
        (struct.pack("<ii", 9, 19) + b"blk.0.attn_q.weight", "importance matrix of an older"),
    ],
)
def test_other_files_are_named(begin: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(begin + bytes(40))
    with pytest.raises(InputError, match=f"(?i)not a GGUF file.*{says}"):
        GGUF(tmp_path / "a")


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (struct.pack("<I", 1), "GGUF version: expected 2 or 3, found 1.*convert the model again"),
        (struct.pack("<I", 4), "GGUF version: expected 2 or 3, found 4.*newer g4spec"),
        (b"\xff" * 4, "GGUF version.*found 4294967295.*download or convert it again"),
        (struct.pack(">I", 3), "big-endian.*convert it on a little-endian machine"),
    ],
)
def test_other_versions_are_refused_with_a_way_out(begin: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"GGUF" + begin + bytes(40))
    with pytest.raises(Unsupported, match=f"(?i){says}"):
        GGUF(tmp_path / "a")


@pytest.mark.parametrize("kept", [0, 10, 200, -25])
def test_files_that_are_cut_are_to_be_downloaded_again(kept: int, tmp_path: Path) -> None:
    """Also if only the last tensor is cut; the padding after it may be missing, as in llama.cpp."""
    sample(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:kept])
    with pytest.raises(InputError, match="Download or convert it again"):
        GGUF(tmp_path / "a.gguf")


def test_a_manifest_of_ollama_names_the_blob_of_its_model(tmp_path: Path) -> None:
    (manifest := tmp_path / "manifests" / "library" / "gemma4").mkdir(parents=True)
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digit * 64}"}
        for kind, digit in (("license", "a"), ("model", "b"), ("params", "c"))
    ]
    (manifest / "latest").write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = tmp_path / "blobs" / f"sha256-{'b' * 64}"
    with pytest.raises(InputError, match=f"(?i)a manifest of Ollama.*{blob}"):
        GGUF(manifest / "latest")


def test_round_trip_of_every_type(tmp_path: Path) -> None:
    kv = sample(tmp_path / "a.gguf")
    with GGUF(tmp_path / "a.gguf") as g:
        assert list(g.kv) == list(kv)
        for key, value in kv.items():
            got = g.value(key)
            assert (got.type, got.item) == (value.type, value.item), key
            if value.item is not None:
                assert list(got.data) == list(value.data), key
                assert g[key] == list(value.data) and g.length(key) == len(value.data)
                assert (
                    g.first_entries(key, 2) == list(value.data)[:2]
                    and g.value_type(key) is value.item
                )
            else:
                wanted = np.float32(value.data) if value.type is ValueType.F32 else value.data
                assert got.data == wanted and type(got.data) is type(g[key])
        assert g.tensors["a.weight"].shape == (2, 3)
        assert np.array_equal(g.array("a.weight"), np.arange(6, dtype=np.float32).reshape(2, 3))
        assert g.array("d2t").dtype == np.int64 and g.array("e").dtype == np.float64
        assert g.shapes() == {"a.weight": (2, 3), "d2t": (3,), "e": (1,)}
        with pytest.raises(ValueError, match="read-only"):
            g.raw("a.weight")[0] = 1


def test_gguf_py_reads_what_we_write(tmp_path: Path) -> None:
    kv = sample(tmp_path / "a.gguf")
    kv = {k: v for k, v in kv.items() if k != "none"}
    reader = oracle.GGUFReader(tmp_path / "a.gguf")
    for key, value in kv.items():
        field = reader.fields[key]
        assert int(field.types[0]) == int(value.type)
        got = field.contents()
        if value.type is ValueType.F32:
            assert got == np.float32(value.data)
        else:
            assert got == (list(value.data) if value.item is not None else value.data), key
    assert [t.name for t in reader.tensors] == ["a.weight", "d2t", "e"]
    assert reader.tensors[0].data.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_we_read_what_gguf_py_writes(tmp_path: Path) -> None:
    w = oracle.GGUFWriter(tmp_path / "b.gguf", "gemma4")
    w.add_array("list", [1, 2, 3])
    w.add_uint32("n", 4)
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q = oracle.quants.quantize(x, oracle.GGMLQuantizationType.Q8_0)
    w.add_tensor("x", q, raw_dtype=oracle.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with GGUF(tmp_path / "b.gguf") as g:
        assert g["list"] == [1, 2, 3] and g["n"] == 4
        assert np.array_equal(
            g.array("x"), oracle.quants.dequantize(q, oracle.GGMLQuantizationType.Q8_0)
        )


def test_version_2_and_alignment_64(tmp_path: Path) -> None:
    write(
        tmp_path / "a.gguf",
        {"general.alignment": u32(64)},
        [TensorData(n, (1,), 0, [np.ones(1, np.float32)]) for n in "ab"],
    )
    raw = bytearray((tmp_path / "a.gguf").read_bytes())
    raw[4] = 2
    (tmp_path / "a.gguf").write_bytes(raw)
    with GGUF(tmp_path / "a.gguf") as g:
        assert (g.version, g.alignment, g.tensors["b"].offset) == (2, 64, 64)


ALIGN = b"general.alignment"
BAD: dict[str, tuple[dict[str, object], str]] = {
    "version 1": ({"version": 1}, "version"),
    "version 4": ({"version": 4}, "version"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "negative tensors": ({"n_tensors": -1}, "tensor count"),
    "many tensors": ({"n_tensors": 1 << 60}, "tensor count"),
    "many keys": ({"n_kv": 1 << 60}, "metadata count"),
    "no tensor entries": ({"n_tensors": 85}, "truncated.* bytes or more, for .* and 85 tensors"),
    "no keys": ({"n_kv": 47}, "truncated.* bytes or more, for 47 metadata keys"),
    "key beyond end": ({"kv": (struct.pack("<Q", 1 << 63) + bytes(8),)}, "ends inside"),
    "empty key": ({"kv": (pair(b"", 4, bytes(4)),)}, "empty"),
    "key twice": ({"kv": (pair(b"k", 4, bytes(4)),) * 2}, "repeated"),
    "key not UTF-8": ({"kv": (pair(b"\xff\xfe", 4, bytes(4)),)}, "UTF-8"),
    "type 13": ({"kv": (pair(b"k", 13, bytes(40)),)}, "value type"),
    "nested array": ({"kv": (pair(b"k", 9, struct.pack("<iQ", 9, 1) + bytes(40)),)}, "arrays"),
    "huge array": ({"kv": (pair(b"k", 9, struct.pack("<iQ", 0, (1 << 30) + 1)),)}, "length"),
    "array beyond": ({"kv": (pair(b"k", 9, struct.pack("<iQ", 4, 1 << 29)),)}, "ends inside"),
    "strings beyond": (
        {"kv": (pair(b"k", 9, struct.pack("<iQ", 8, 2) + struct.pack("<Q", 1 << 63) + bytes(64)),)},
        "ends inside",
    ),
    "alignment 0": ({"kv": (pair(ALIGN, 4, struct.pack("<I", 0)),)}, "power of two"),
    "alignment 48": ({"kv": (pair(ALIGN, 4, struct.pack("<I", 48)),)}, "power of two"),
    "alignment text": ({"kv": (pair(ALIGN, 8, text(b"32")),)}, "power of two"),
    "split": ({"kv": (pair(b"split.count", 2, struct.pack("<H", 2)),)}, "split.no"),
    "tensor twice": ({"tensors": (tensor(b"t", (1,)),) * 2, "data": bytes(64)}, "repeated"),
    "five dimensions": ({"tensors": (tensor(b"t", (1,) * 5),), "data": bytes(64)}, "at most 4"),
    "long name": ({"tensors": (tensor(b"t" * 64, (1,)),), "data": bytes(64)}, "63"),
    "negative dimension": ({"tensors": (tensor(b"t", (-1,)),)}, "impossible shape"),
    "overflow of an empty one": ({"tensors": (tensor(b"t", (0, 1 << 61)),)}, "impossible shape"),
    "overflow": ({"tensors": (tensor(b"t", (1 << 40, 1 << 40)),)}, "impossible shape"),
    "partial block": ({"tensors": (tensor(b"t", (33, 2), 8),), "data": bytes(99)}, "multiple"),
    "unknown type": ({"tensors": (tensor(b"t", (32,), 99),), "data": bytes(99)}, "forks"),
    "old type": ({"tensors": (tensor(b"t", (32,), 4),), "data": bytes(99)}, "number 4"),
    "odd offset": ({"tensors": (tensor(b"t", (1,), 0, 4),), "data": bytes(64)}, "multiple of 32"),
    "offset beyond": ({"tensors": (tensor(b"t", (1,), 0, 1 << 62),)}, "beyond the end"),
    "truncated": ({"tensors": (tensor(b"t", (16,)),), "data": bytes(63)}, "truncated"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str, tmp_path: Path) -> None:
    made, says = BAD[name]
    path = file(tmp_path / "bad.gguf", **made)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=says) as e:
        GGUF(path)
    assert str(path) in str(e.value)


def test_refuses_paths_that_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"GGUF")
    (tmp_path / "text").write_bytes(b"hello, this is no GGUF file")
    (tmp_path / "short text").write_bytes(b"hello")
    (tmp_path / "empty").touch()
    for name, says in (
        ("short", "too short"),
        ("text", "magic"),
        ("short text", "magic"),
        ("empty", "no data"),
        ("absent", "no such"),
        (".", "a folder"),
    ):
        with pytest.raises(G4Error, match=says):
            GGUF(tmp_path / name)


def test_types_without_a_dequantizer_are_measured_and_named(tmp_path: Path) -> None:
    path = file(tmp_path / "a.gguf", tensors=(tensor(b"t", (256, 2), 15),), data=bytes(584))
    with GGUF(path) as g:
        assert g.tensors["t"].nbytes == 584
        with pytest.raises(Unsupported, match=r"tensor t.*Q8_K"):
            g.array("t")


def test_strings_that_are_not_text_are_named(tmp_path: Path) -> None:
    words = struct.pack("<iQ", 8, 2) + text(b"ok") + text(b"\xff")
    path = file(tmp_path / "a.gguf", kv=(pair(b"k", 9, words), pair(b"s", 8, text(b"\xff"))))
    with GGUF(path) as g:
        for key, says in (("k", "'k', entry 1"), ("s", "'s'")):
            with pytest.raises(InputError, match=says):
                g[key]


LIKE = b"\x05" + bytes(7) + b"five!"  # a text that looks like a string with its length
ODD = [
    b"",
    b"\0",
    b"a\0b",
    bytes(9),
    LIKE,
    LIKE[:8],
    LIKE * 20,
    b"x" * 255,
    b"y" * 256,
    b"z" * 70000,
    "é▁日🙂".encode(),
]
SHORT = st.binary(min_size=1, max_size=5) | st.text(min_size=1, max_size=5).map(str.encode)
WORDS = st.lists(SHORT, min_size=1) | st.lists(SHORT | st.sampled_from(ODD), min_size=1)


@settings(max_examples=300, deadline=None)
@given(words=WORDS)
def test_strings_split_at_once_are_those_read_in_turn(words: list[bytes]) -> None:
    raw = np.frombuffer(b"".join(map(text, words)), np.uint8)
    found = string_arrays.split(raw, len(words))
    if all(0 < len(w) < 256 and b"\0" not in w and is_utf8(w) for w in words):
        assert found == [w.decode() for w in words]
    else:
        assert found is None


@settings(max_examples=300, deadline=None)
@given(
    words=WORDS,
    before=st.binary(max_size=9),
    after=st.binary(max_size=40),
    window=st.integers(1, 99),
    block=st.integers(1, 5),
    least=st.integers(1, 5),
)
def test_strings_are_found_where_they_are(
    words: list[bytes], before: bytes, after: bytes, window: int, block: int, least: int
) -> None:
    packed = b"".join(map(text, words))
    with mock.patch.multiple(string_arrays, WINDOW=window, BLOCK=block, MIN_FAST=least):
        blocks, end = string_arrays.scan(before + packed + after, len(before), len(words))
        assert end == len(before + packed)
        got = [(before + packed)[a:b] for a, b, _ in blocks]
        left = iter(words)
        assert got == [b"".join(map(text, islice(left, n))) for _, _, n in blocks]
        assert next(left, None) is None
        for size in range(len(before), end, 1 + len(packed) // 50):
            assert string_arrays.scan((before + packed)[:size], len(before), len(words))[1] > size


def is_utf8(word: bytes) -> bool:
    try:
        return bool(word.decode())
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("odd", ["", "a\0b", "x" * 300])
def test_blocks_hold_every_string_once(count: int, odd: str, tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(count)]
    words[-2:-1] = [odd] * len(words[-2:-1])
    write(tmp_path / "a.gguf", {"k": array(ValueType.STRING, words)}, [])
    with GGUF(tmp_path / "a.gguf") as g:
        assert [w for block in g.string_blocks("k") for w in block] == g["k"] == words
        assert all(0 < len(block) <= WINDOW // 9 for block in g.string_blocks("k"))
        assert g.first_entries("k", 3) == words[:3]


def test_a_string_that_is_not_text_is_named_far_into_an_array(tmp_path: Path) -> None:
    bad = 2 * WINDOW  # behind several blocks
    words = [b"ok"] * (bad + 9)
    words[bad] = b"\xff"
    packed = struct.pack("<iQ", 8, len(words)) + b"".join(map(text, words))
    path = file(tmp_path / "a.gguf", kv=(pair(b"k", 9, packed),))
    with GGUF(path) as g, pytest.raises(InputError, match=f"'k', entry {bad}: not UTF-8"):
        g["k"]


def test_entries_are_those_of_arrays(tmp_path: Path) -> None:
    kv = {
        "words": array(ValueType.STRING, ["a"]),
        "n": array(ValueType.I32, []),
        "s": string("a"),
        "u": u32(1),
    }
    write(tmp_path / "a.gguf", kv, [])
    with GGUF(tmp_path / "a.gguf") as g:
        kinds = {key: g.array_type(key) for key in (*kv, "missing")}
    assert kinds == {
        "words": ValueType.STRING,
        "n": ValueType.I32,
        "s": None,
        "u": None,
        "missing": None,
    }


def test_every_truncation_is_an_error_or_a_shorter_tail(tmp_path: Path) -> None:
    sample(tmp_path / "a.gguf")
    raw = (tmp_path / "a.gguf").read_bytes()
    for n in range(0, len(raw) - 32, 7):
        (tmp_path / "cut.gguf").write_bytes(raw[:n])
        with pytest.raises(InputError):
            GGUF(tmp_path / "cut.gguf")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 700), value=st.integers(0, 255), seed=st.integers(0, 9))
def test_damage_never_escapes_as_anything_but_our_error(
    tmp_path: Path, at: int, value: int, seed: int
) -> None:
    path = tmp_path / "a.gguf"
    sample(path)
    raw = bytearray(path.read_bytes())
    for offset in (at, at * (seed + 1)):
        raw[offset % len(raw)] = value
    path.write_bytes(raw)
    try:
        with GGUF(path) as g:
            for key in g:
                g[key]
            for name in g.tensors:
                g.array(name)
    except G4Error:
        pass


def test_a_tokenizer_as_large_as_gemmas_opens_at_once(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(262144)]
    merges = [f"left{i} right" for i in range(514906)]
    write(
        tmp_path / "a.gguf",
        {"t": array(ValueType.STRING, tokens), "m": array(ValueType.STRING, merges)},
        [],
    )
    tracemalloc.start()
    with processor_time_below(3):  # 0.05 s without tracing
        file = GGUF(tmp_path / "a.gguf")
    with file as g:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert g["t"] == tokens and g["m"][-1] == merges[-1]
    assert peak < 1 << 20, "opening must not read the arrays"
