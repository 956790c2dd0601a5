"""Small files that claim large sizes, paths that are not regular files, and sources that change
while they are read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli
from g4spec.advisor import scripts
from g4spec.convert import convert, convert_cached, quantize, safetensors
from g4spec.errors import EnvironmentProblem, InputError
from g4spec.gguf import GGUF, ValueType, array, regular_files, u32
from g4spec.gguf.atomic import atomic_write
from g4spec.models import eagle3
from tests.cpu import gguf_fixtures as fixtures
from tests.support import tiny
from tests.support.selection import sample
from tests.support.tiny_dialects import ASSISTANT, Parts


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("family")
    target = tiny.target(base / "target")
    tiny.zlab_dflash(base / "draft", target, shards=2)
    tiny.assistant(base / "asst", target)
    convert(base / "asst", base / "asst.gguf", target=target)
    return base


@pytest.fixture
def draft(family: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family / "draft", tmp_path / "draft"))


# ---- bombs


@pytest.mark.parametrize("alignment", [1 << 17, 1 << 30, 1 << 31, 48, 0])
def test_a_strange_alignment_is_refused(alignment: int, tmp_path: Path) -> None:
    """96 bytes with an alignment of 2^30 were converted to a file of a gigabyte."""
    key = b"general.alignment"
    head = struct.pack("<4sIqqQ", b"GGUF", 3, 0, 1, len(key)) + key
    path = tmp_path / "a.gguf"
    path.write_bytes((head + struct.pack("<iI", ValueType.U32, alignment)).ljust(96, b"\0"))
    with pytest.raises(InputError, match=r"alignment: expected a power of two up to 65536"):
        quantize(path, tmp_path / "o.gguf", "q8_0")
    assert not (tmp_path / "o.gguf").exists()


def test_the_largest_alignment_opens(tmp_path: Path) -> None:
    file = fixtures.zlab()
    path = file.write(tmp_path / "a.gguf")
    with GGUF(path) as g:
        tensors = {n: g.raw(n).tobytes() for n in g.tensors}
    assert tensors
    key = b"general.alignment"
    head = struct.pack("<4sIqqQ", b"GGUF", 3, 0, 1, len(key)) + key
    path.write_bytes(head + struct.pack("<iI", ValueType.U32, 1 << 16))
    with GGUF(path) as g:
        assert g.alignment == 1 << 16


@pytest.mark.parametrize("distance", [0, 32])
def test_overlapping_tensors_are_refused(distance: int, tmp_path: Path) -> None:
    """573 KB with 4,000 tensors at one offset took 1.8 GB of memory and 1.5 GB of disk."""
    file = fixtures.zlab()
    last = list(file.tensors.values())[-1]
    at = sum(len(t.data) + -len(t.data) % 32 for t in list(file.tensors.values())[:-1])
    entry = fixtures.Entry(last.shape, last.type, b"", at + distance)
    file.extra_tensors = [(f"x{i}", entry) for i in range(3)]
    file.tail = bytes(64)
    path = file.write(tmp_path / "a.gguf")
    with pytest.raises(InputError, match="overlaps"):
        GGUF(path)


@pytest.mark.parametrize(
    "key",
    [
        "embedding_length",
        "attention.key_length",
        "target_hidden_size",
        "feed_forward_length",
        "context_length",
    ],
)
def test_impossible_sizes_are_refused(key: str, tmp_path: Path) -> None:
    """53 KB with an embedding_length of 2143012467 took 8.2 GB before any shape was checked."""
    file = fixtures.KINDS["eagle3"]()
    file.kv[f"eagle3.{key}"] = u32(2143012467)
    with (
        GGUF(file.write(tmp_path / "a.gguf")) as g,
        pytest.raises(InputError, match=f"{key}.*at most"),
    ):
        eagle3.parse_gguf(g.kv, g.shapes())


def test_rope_freqs_are_not_allocated_for_a_claimed_size(family: Path, tmp_path: Path) -> None:
    """66 KB with a key_length of 2^31 took 4 GB."""
    parts = Parts.of(family / "asst.gguf")
    ASSISTANT["AtomicChat"](parts, family / "asst.gguf")
    arch = str(parts.kv["general.architecture"].data)
    assert f"{arch}.attention.key_length" in parts.kv
    parts.kv[f"{arch}.attention.key_length"] = u32(1 << 24)
    path = parts.write(tmp_path / "old.gguf")
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            convert(path, tmp_path / "o.gguf", target=family / "target")
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


# ---- paths that are not regular files


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            s.bind(path.name)
        finally:
            os.chdir(here)


def large(path: Path) -> None:
    with path.open("wb") as f:
        f.truncate(regular_files.MAX_READ_BYTES + 1)


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "device": device,
    "socket": sock,
    "pipe": os.mkfifo,
    "large": large,
}


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("kind", NOT_FILES)
def test_small_files_must_be_regular_files(
    name: str, kind: str, family: Path, draft: Path, tmp_path: Path
) -> None:
    target = family / "target"
    folder = draft
    if name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        folder = target = Path(shutil.copytree(target, tmp_path / "target"))
    (folder / name).unlink(missing_ok=True)
    NOT_FILES[kind](folder / name)
    with pytest.raises(InputError, match=r"device or pipe|too large|out of its folder"):
        convert(draft, tmp_path / "o.gguf", target=target)
    if name != "chat_template.jinja":
        with pytest.raises(InputError, match=r"device or pipe|too large|out of its folder"):
            safetensors.load_json(folder / name)


@pytest.mark.parametrize("kind", ["device", "socket", "pipe"])
@pytest.mark.parametrize("name", ["a.gguf", "a.safetensors"])
def test_weights_must_be_a_regular_file(name: str, kind: str, tmp_path: Path) -> None:
    NOT_FILES[kind](tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert cli.run(["inspect", str(tmp_path / name)]) == 3
    assert cli.run(["inspect", str(tmp_path)]) == 3


def test_an_endless_prompt_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_files, "MAX_READ_BYTES", 1000)
    assert cli.run(["tokenize", "-m", "x.gguf", "--file", "/dev/zero"]) == 3
    assert "/dev/zero: too large" in capsys.readouterr().err


def test_a_target_without_merges_is_refused(family: Path, draft: Path, tmp_path: Path) -> None:
    for merges in (None, array(ValueType.I32, [1])):
        file = fixtures.target()
        file.kv.pop("tokenizer.ggml.merges")
        if merges:
            file.kv["tokenizer.ggml.merges"] = merges
        path = file.write(tmp_path / "t.gguf")
        with pytest.raises(InputError, match=r"no tokenizer.*tokenizer\.ggml\.merges"):
            convert(draft, tmp_path / "o.gguf", target=path)


# ---- links


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ],
)
def test_a_link_out_of_a_checkpoint_is_refused(name: str, family: Path, tmp_path: Path) -> None:
    """`chat_template.jinja -> ~/.ssh/id_rsa` would be copied into a file that is published."""
    target = Path(shutil.copytree(family / "target", tmp_path / "target"))
    secret = tmp_path / "secret"
    if (target / name).exists():
        (target / name).rename(secret)
    else:
        secret.write_text("{}")
    (target / name).symlink_to(secret)
    with pytest.raises(InputError, match=f"{name}: a link that leads out of its folder"):
        convert(target, tmp_path / "o.gguf")
    (target / name).unlink()
    (target / "inside").mkdir()
    secret.rename(target / "inside" / name)
    (target / name).symlink_to(Path("inside") / name)
    convert(target, tmp_path / "o.gguf")


def test_links_into_the_blobs_of_a_hub_cache_are_followed(family: Path, tmp_path: Path) -> None:
    blobs, target = tmp_path / "models--a--b" / "blobs", tmp_path / "target"
    blobs.mkdir(parents=True)
    target.mkdir()
    for i, path in enumerate(sorted((family / "target").iterdir())):
        blob = blobs / f"{i:040x}"
        shutil.copy(path, blob)
        (target / path.name).symlink_to(blob)
    convert(target, tmp_path / "o.gguf")


def test_a_linked_gguf_in_a_folder_is_refused(family: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.gguf").symlink_to(family / "asst.gguf")
    with pytest.raises(InputError, match="leads out"):
        convert(tmp_path / "d", tmp_path / "o.gguf")


# ---- sources that change

CHANGING = """
import os, sys
from pathlib import Path
from g4spec.convert import convert, quantize
from g4spec.errors import InputError
source, out, change, how = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
done = []
def progress(*at):
    if not done:
        done.append(1)
        if how == "truncate":
            os.truncate(change, 4096)
        elif how == "write":
            with open(change, "r+b") as f:
                f.seek(-64, 2)
                f.write(bytes(64))
        else:
            os.replace(change.with_name("other"), change)
try:
    if source.suffix == ".gguf":
        quantize(source, out, sys.argv[5], allow_requantize=True, progress=progress)
    else:
        convert(source, out, type=sys.argv[5], progress=progress)
except InputError as e:
    print(e)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    "how,kind,type",
    [
        ("truncate", "folder", "bf16"),
        ("truncate", "folder", "q8_0"),
        ("truncate", "gguf", "bf16"),
        ("write", "folder", "bf16"),
        ("replace", "gguf", "bf16"),
    ],
)
def test_a_source_that_changes_is_noticed(how: str, kind: str, type: str, tmp_path: Path) -> None:
    """A truncated source killed the process (SIGBUS); other changes gave a file mixed from both
    versions."""
    source = tiny.target(tmp_path / "t", layers=6, hidden=256, inter=512)
    change = source / "model.safetensors"
    if kind == "gguf":
        convert(source, tmp_path / "t.gguf", type="bf16")
        source = change = tmp_path / "t.gguf"
    shutil.copy(change, change.with_name("other"))
    out = tmp_path / "o.gguf"
    done = subprocess.run(
        [sys.executable, "-c", CHANGING, str(source), str(out), str(change), how, type],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done
    assert "became shorter" in done.stdout or "changed while it was read" in done.stdout
    assert not out.exists() and not list(tmp_path.glob(".*.tmp"))


CUT = """
import os, sys
import torch
from g4spec import cli
from g4spec.gguf import GGUF
how, path, *words = sys.argv[1:]
raw, asked = GGUF.raw, []
def cut(self, name):
    asked.append(name)
    data = raw(self, name)
    if len(asked) == 4:
        os.truncate(path, 4096)
    if how == "threads" and len(asked) == 4:
        torch.set_num_threads(3)
        torch.from_numpy(data.view("uint16")).to(torch.float32)
    return data
GGUF.raw = cut
sys.argv = ["g4spec", *words]
cli.main()
"""


@pytest.mark.parametrize(
    "command",
    sample(
        [
            ["generate", "-p", "a", "-n", "2", "--device", "cpu"],
            ["validate", "--json"],
            ["threads"],
        ],
        2,
    ),
)
def test_a_file_that_is_cut_while_it_is_mapped(command: list[str], tmp_path: Path) -> None:
    """Truncation killed `generate` and `validate` (SIGBUS) without a message."""
    source = tiny.target(tmp_path / "t", layers=6, hidden=256, inter=512)
    path = tmp_path / "t.gguf"
    convert(source, path, type="bf16")
    how, words = ("threads", ["validate"]) if command == ["threads"] else ("plain", command)
    words += [str(path)] if "validate" in words else ["-m", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", CUT, how, str(path), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3, done
    fix = "Run the command again when no other program writes to its files\n"
    assert done.stderr.endswith(fix), done
    assert done.stderr.count("became shorter while it was read") == 1, done
    if "--json" in words:
        assert json.loads(done.stdout)["exit_code"] == 3


# ---- the cache of conversions


def entry(family: Path, draft: Path, cache: Path) -> Path:
    return convert_cached(draft, family / "target", cache)[0]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda p: p.write_bytes(b""),
    "cut": lambda p: os.truncate(p, p.stat().st_size // 2),
    "a bit": lambda p: p.write_bytes(p.read_bytes()[:-40] + b"\xff" + p.read_bytes()[-39:]),
    "another draft's": lambda p: fixtures.zlab().write(p),
    "no digest": lambda p: p.with_name(p.name + ".sha256").unlink(),
    "digest cut": lambda p: os.truncate(p.with_name(p.name + ".sha256"), 0),
    "digest is a folder": lambda p: (
        p.with_name(p.name + ".sha256").unlink(),
        p.with_name(p.name + ".sha256").mkdir(),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_made_again(
    kind: str, family: Path, draft: Path, tmp_path: Path
) -> None:
    path = entry(family, draft, tmp_path / "cache")
    want = path.read_bytes()
    DAMAGE[kind](path)
    if kind == "digest is a folder":
        with pytest.raises(InputError, match="is a folder"):
            convert_cached(draft, family / "target", tmp_path / "cache")
        return
    again, note = convert_cached(draft, family / "target", tmp_path / "cache")
    assert again == path and path.read_bytes() == want and "converted into" in note
    assert "using its conversion" in convert_cached(draft, family / "target", tmp_path / "cache")[1]


def test_an_edit_between_the_samples_is_seen(family: Path, draft: Path, tmp_path: Path) -> None:
    """The digest reads samples: it would notice a repaired byte with a probability of 0.01 %."""
    first = entry(family, draft, tmp_path / "cache")
    for shard in draft.glob("*.safetensors"):
        before = shard.stat()
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert entry(family, draft, tmp_path / "cache") != first


# ---- writing


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with atomic_write(path, 3) as f:
        f.write(b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o444)
    with pytest.raises(EnvironmentProblem, match="read-only"), atomic_write(path, 3) as f:
        f.write(b"no")
    assert path.read_bytes() == b"new"


def test_a_recipe_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    ask = ["recipe", "llama.cpp", "-m", "31B", "--assume", "h200", "-o", str(out), "-q"]
    assert cli.run(ask) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    older = f"{scripts.MARK}\nolder".encode()
    assert before

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("g4spec.gguf.atomic.os.fsync", full)
    for path in out.iterdir():
        path.write_bytes(older)
    assert cli.run(ask) == 4
    assert {p.name: p.read_bytes() for p in out.iterdir()} == dict.fromkeys(before, older)


def test_deep_json_is_an_error(family: Path, draft: Path, tmp_path: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    for depth in (900, 5000):
        text = json.dumps(config)[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}"
        (draft / "config.json").write_text(text)
        for command in (["inspect", str(draft), "--json"], ["doctor", "-m", str(draft)]):
            assert cli.run(command) in (0, 1, 3)
