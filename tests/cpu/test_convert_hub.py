"""Downloads by hub id from a hub on loopback: requested files, sources, and all failures."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli
from g4spec.advisor.machine import Machine
from g4spec.convert import convert, hub, transfer
from g4spec.convert.hub_id import HubId
from g4spec.errors import EnvironmentProblem, G4Error, InputError, Unsupported, UsageError
from g4spec.gguf import GGUF, TensorData, write_split
from tests.support import tiny
from tests.support.hub_server import (
    SHA,
    Hub,
    altered,
    dripping,
    endless,
    etag,
    hang,
    redirect,
    status,
    truncated,
)

huggingface_hub = pytest.importorskip("huggingface_hub")


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("family")
    target = tiny.target(base / "target")
    tiny.zlab_dflash(base / "draft", target, shards=2)
    convert(base / "draft", base / "draft.gguf", target=target)
    convert(target, base / "target.gguf")
    return base


@pytest.fixture
def served(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the family, an empty cache and an empty working folder."""
    from huggingface_hub import constants

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    extra = {"README.md": b"hello", "training/optimizer.pt": b"pickle", "pytorch_model.bin": b"x"}
    one = {"draft-q8_0.gguf": (family / "draft.gguf").read_bytes()}
    with Hub(
        {
            "org/draft": files(family / "draft") | extra,
            "org/target": files(family / "target"),
            "org/one": one,
            "org/two": one | {"sub/target.gguf": (family / "target.gguf").read_bytes()},
            "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04K\x01."},
        }
    ) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def get(text: str, want: hub.Purpose = "any") -> Path:
    return hub.resolve(text, want)[0]


def refused(text: str, error: type[G4Error], says: str, want: hub.Purpose = "any") -> str:
    with pytest.raises(error, match=says) as e:
        get(text, want)
    assert "\n" not in str(e.value)
    return str(e.value)


# ---- what is an id


@pytest.mark.parametrize(
    "text,repo,revision,file",
    [
        ("org/name", "org/name", None, None),
        ("org/name@main", "org/name", "main", None),
        ("z-lab/gemma-4-31B-it-DFlash@refs/pr/1", "z-lab/gemma-4-31B-it-DFlash", "refs/pr/1", None),
        ("org/name:a b.gguf", "org/name", None, "a b.gguf"),
        ("org/name:M-Q8_0.GGUF", "org/name", None, "M-Q8_0.GGUF"),
        ("org/name@v1:sub/file.gguf", "org/name", "v1", "sub/file.gguf"),
    ],
)
def test_ids(text: str, repo: str, revision: str | None, file: str | None) -> None:
    assert HubId.parse(text) == HubId(repo, revision, file)


def test_types_as_llama_cpp_names_them() -> None:
    asked = HubId.parse("org/name:q4_k_m")
    assert asked == HubId("org/name", None, None, "q4_k_m")
    names = [
        "a-Q4_K_M.gguf",
        "Q4_K_M/a-00001-of-00002.gguf",
        "a-Q4_K_M_L.gguf",
        "a-IQ4_K_M.gguf",
        "a.Q4_K_M.txt",
        "a-Q4_K.gguf",
    ]
    assert asked.of_type(names) == names[:2]


@pytest.mark.parametrize(
    ("type", "found"),
    [
        ("UD-Q4_K_XL", "gemma-4-31B-it-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "gemma-4-31B-it-UD-Q4_K_XL.gguf"),
        ("Q4_K_M", "gemma-4-31B-it-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "gemma-4-31B-it-UD-Q4_K_M.gguf"),
        ("q8_0", "gemma-4-31B-it-Q8_0.gguf"),
        ("BF16", "BF16/gemma-4-31B-it-BF16-00001-of-00002.gguf"),
    ],
)
def test_types_in_a_repository_as_published(type: str, found: str) -> None:
    """UD-Q4_K_XL, which `recipe` prints, was taken for a path; a draft beside the model has its
    type too, and so has a plain file beside a dynamic mix."""
    names = [
        "gemma-4-31B-it-Q4_K_M.gguf",
        "gemma-4-31B-it-Q8_0.gguf",
        "gemma-4-31B-it-UD-Q4_K_M.gguf",
        "gemma-4-31B-it-UD-Q4_K_XL.gguf",
        "MTP/mtp-gemma-4-31B-it-Q8_0.gguf",
        "dflash-gemma-4-31B-it-BF16.gguf",
        "BF16/gemma-4-31B-it-BF16-00001-of-00002.gguf",
        "mmproj-BF16.gguf",
    ]
    asked = HubId.parse(f"unsloth/gemma-4-31B-it-GGUF:{type}")
    assert asked is not None and asked.of_type(names) == [found]


def test_a_type_of_a_draft_alone() -> None:
    names = ["mtp-gemma-4-31B-it-Q8_0.gguf", "mtp-gemma-4-31B-it-Q4_0.gguf"]
    asked = HubId.parse("org/name:Q8_0")
    assert asked is not None and asked.of_type(names) == names[:1]


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/org/name",
        "./org",
        "../name",
        "org/name/more",
        "org/../name",
        "org/file.gguf",
        "org/name:../x.gguf",
        "org/name:/etc/x.gguf",
        "org/name:x.bin",
        "org/name:a/./b.gguf",
        "",
        "org/name:..\\x.gguf",
        "org/",
        "org/name@a/../../b",
        "org/name@..",
        "C:/name",
        "org/name@",
        "org/.hidden",
        "dir/model.safetensors",
    ],
)
def test_other_strings_are_paths(text: str) -> None:
    assert HubId.parse(text) is None
    assert hub.resolve(text) == (Path(text), [])


def test_a_local_path_wins_with_a_note(served: Hub) -> None:
    Path("org/draft").mkdir(parents=True)
    path, notes = hub.resolve("org/draft")
    assert path == Path("org/draft") and "local path" in notes[0]
    assert not served.seen


# ---- what is fetched


def test_a_draft_is_the_draft_file_of_its_repository(family: Path, served: Hub) -> None:
    """Take the draft of a model and a draft with the type; it was the model."""
    target, draft = ((family / f"{n}.gguf").read_bytes() for n in ("target", "draft"))
    served.repos["org/pair"] = {
        "gemma-Q8_0.gguf": target,
        "gemma-Q4_K_M.gguf": target,
        "MTP/mtp-gemma-Q8_0.gguf": draft,
        "gemma-Q8_0.imatrix.gguf": b"",
    }
    assert get("org/pair:Q8_0", "draft").name == "mtp-gemma-Q8_0.gguf"
    assert get("org/pair", "draft").name == "mtp-gemma-Q8_0.gguf"
    assert get("org/pair:Q8_0").name == "gemma-Q8_0.gguf"
    says = refused("org/pair:Q4_K_M", InputError, "no single GGUF file", "draft")
    assert "found MTP/mtp-gemma-Q8_0.gguf" in says
    assert get("org/one", "draft").name == "draft-q8_0.gguf"
    assert get("org/draft", "draft").is_dir()


def test_a_draft_is_the_draft_file_offline(
    family: Path, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    draft = (family / "draft.gguf").read_bytes()
    served.repos["org/pair"] = {"gemma-Q8_0.gguf": b"", "mtp-gemma-Q8_0.gguf": draft}
    for name in ("gemma", "mtp-gemma"):
        get(f"org/pair:{name}-Q8_0.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for text in ("org/pair", "org/pair:Q8_0"):
        assert get(text, "draft").name == "mtp-gemma-Q8_0.gguf"


def test_only_needed_files_are_fetched(served: Hub) -> None:
    folder = get("org/draft")
    assert set(served.downloads()) == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert folder.name == SHA
    served.seen.clear()
    assert get("org/draft") == folder and not served.downloads()


def test_weights_that_cannot_be_read_are_not_fetched(family: Path, served: Hub) -> None:
    config = json.loads((family / "target" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    found = files(family / "target") | {"config.json": json.dumps(config).encode()}
    served.repos["org/awq"] = found
    refused("org/awq", Unsupported, "quantization_config.*found awq")
    assert served.downloads() == ["config.json"]
    get("org/awq", "tokenizer")


def test_the_quantization_in_a_file_of_its_own_is_fetched_before_weights(
    family: Path, served: Hub
) -> None:
    """Older exports of ModelOpt have it in hf_quant_config.json."""
    found = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    small = {"config.json", "hf_quant_config.json"}
    for algorithm in ("NVFP4", "FP8"):
        found["quantization"]["quant_algo"] = algorithm
        settings = {"hf_quant_config.json": json.dumps(found).encode()}
        served.repos[f"org/{algorithm}"] = files(family / "target") | settings
    refused("org/NVFP4", Unsupported, "quantization_config.*found modelopt NVFP4")
    assert set(served.downloads()) == small
    assert (get("org/FP8") / "hf_quant_config.json").exists()


def test_a_target_gives_its_tokenizer_only(served: Hub) -> None:
    get("org/target", "tokenizer")
    assert not any(name.endswith(".safetensors") for name in served.downloads())


def test_a_conversion_from_the_hub(family: Path, served: Hub, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    assert cli.run(["convert", "org/draft@v1", "--target", "org/target", "-o", str(out)]) == 0
    with GGUF(out) as new, GGUF(family / "draft.gguf") as old:
        assert new["g4spec.source"] == "org/draft" and new["g4spec.source_revision"] == SHA
        assert "--target org/target" in new["g4spec.command"]
        assert all(new.raw(n).tobytes() == old.raw(n).tobytes() for n in old.tensors)
        assert new["tokenizer.ggml.tokens"] == old["tokenizer.ggml.tokens"]


def test_a_gguf_is_named_or_the_only_one(served: Hub) -> None:
    assert get("org/one").name == "draft-q8_0.gguf"
    assert get("org/two:sub/target.gguf").name == "target.gguf"
    says = refused("org/two", InputError, "2 GGUF files")
    assert "org/two:draft-q8_0.gguf" in says
    refused("org/two:other.gguf", InputError, r"no file other\.gguf.*draft-q8_0\.gguf")
    refused("org/draft", InputError, "Convert it first", "gguf")
    assert get("org/two:Q8_0").name == "draft-q8_0.gguf"
    assert "org/two:draft-q8_0.gguf" in refused("org/two:q4_k", InputError, "no single GGUF file")


def test_one_of_several_ggufs_is_chosen(
    family: Path, served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GGUF(family / "target.gguf") as g:
        kv, raw = {k: g.value(k) for k in g}, {n: [g.raw(n)] for n in g.tensors}
        data = [TensorData(n, t.shape, t.type, raw[n]) for n, t in g.tensors.items()]
        paths, _ = write_split(tmp_path / "m-Q8_0.gguf", kv, data, 200_000)
    whole = (family / "target.gguf").read_bytes()
    parts = {p.name: p.read_bytes() for p in paths}
    served.repos["org/types"] = parts | {"m-Q4_0.gguf": whole, "README.md": b""}
    asked: list[tuple[str, dict[str, int]]] = []

    def choose(id: HubId, sizes: Mapping[str, int]) -> str | None:
        asked.append((str(id), dict(sizes)))
        return paths[0].name

    path, _ = hub.resolve("org/types", "gguf", choose)
    sizes = {paths[0].name: sum(map(len, parts.values())), "m-Q4_0.gguf": len(whole)}
    assert asked == [("org/types", sizes)]
    assert path.name == paths[0].name and sorted(served.downloads()) == sorted(parts)
    with pytest.raises(InputError, match=r"\d GGUF files"):
        hub.resolve("org/types", "gguf", lambda id, sizes: None)
    hub.resolve("org/types:m-Q4_0.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.resolve("org/types", "gguf", choose)[0] == path
    assert asked[1] == asked[0] and len(asked) == 2


def test_a_run_takes_the_best_type_that_fits_and_says_so(
    family: Path, served: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository with several types was refused."""
    whole = (family / "target.gguf").read_bytes()
    sizes = {"e2b-it-BF16.gguf": 9_300_000_000, "e2b-it-Q6_K.gguf": 3_900_000_000}
    served.repos["org/gemma-4-E2B-it-GGUF"] = dict.fromkeys(sizes, whole)

    def listed(answer: dict[str, Any]) -> dict[str, Any]:
        for file in answer["siblings"]:
            file["size"] = sizes[file["rfilename"]]
        return answer

    served.listing = listed
    machine = Machine((), ram=64 << 30, ram_free=64 << 30)
    monkeypatch.setattr("g4spec.advisor.machine_probe.probe", lambda facts: machine)
    run = ["generate", "-m", "org/gemma-4-E2B-it-GGUF", "-p", "a", "-n", "2", "-c", "64"]
    run += ["--device", "cpu"]
    assert cli.run(run) == 0
    assert "e2b-it-Q6_K.gguf is the best of 2 files for a machine" in capsys.readouterr().err
    assert served.downloads() == ["e2b-it-Q6_K.gguf"]
    machine = Machine((), ram=1 << 30, ram_free=1 << 30)
    assert cli.run(run) != 0
    assert "none of its 2 types can run here" in " ".join(capsys.readouterr().err.split())
    assert cli.run(["inspect", "org/gemma-4-E2B-it-GGUF"]) != 0
    assert "2 GGUF files" in capsys.readouterr().err


def test_every_command_takes_ids(
    served: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    target, draft = "org/two:sub/target.gguf", "org/two:draft-q8_0.gguf"
    assert cli.run(["inspect", draft, "--no-tensors"]) == 0
    assert cli.run(["inspect", "org/draft", "--no-tensors"]) == 0
    assert cli.run(["validate", draft, "--target", target, "--against", "org/draft"]) == 0
    assert cli.run(["tokenize", "-m", target, "a"]) == 0
    assert cli.run(["generate", "-m", target, "-md", draft, "-p", "a", "-n", "2", "-c", "64"]) == 0
    args = ["generate", "-m", target, "-md", "org/draft", "-p", "a", "-n", "2", "-c", "64"]
    assert cli.run(args) == 0
    assert "converted into" in capsys.readouterr().err
    with GGUF(next((tmp_path / "xdg").rglob("*.gguf"))) as g:
        assert g["g4spec.source_revision"] == SHA


def test_the_token_opens_gated_repositories(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.gated.add("org/draft")
    says = refused("org/draft", InputError, "gated")
    assert "licence" in says and "HF_TOKEN" in says
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    refused("org/draft", InputError, "gated")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert (get("org/draft") / "config.json").is_file()


# ---- refusals


def test_missing_repositories_and_files(served: Hub) -> None:
    refused("org/absent", InputError, "no such file or folder here.*no such repository.*HF_TOKEN")
    refused("org/draft@v9", InputError, "no revision 'v9'")
    served.repos["org/draft"].pop("model-00002-of-00002.safetensors")
    refused("org/draft", InputError, "shards.*missing.*00002")
    served.repos["org/void"] = {"README.md": b""}
    refused("org/void", InputError, "neither safetensors nor GGUF")
    served.repos["org/bare"] = {"model.safetensors": b""}
    refused("org/bare", InputError, "no config.json")


def test_pickles_are_never_fetched(served: Hub) -> None:
    refused("org/pickles", Unsupported, "pickles")
    assert not served.downloads()


def test_forbidden_is_not_gated(served: Hub) -> None:
    served.faults["/api/models/org/draft"] = [status(403)]
    refused("org/draft", InputError, "403.*HF_TOKEN")


def test_offline(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder, file = get("org/draft"), get("org/two:sub/target.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    served.seen.clear()
    assert get("org/draft") == folder and get("org/two:sub/target.gguf") == file
    assert get("org/two").name == SHA  # it has one file, in a folder
    refused("org/one", EnvironmentProblem, "not in the cache.*HF_HUB_OFFLINE")
    refused("org/one:x.gguf", EnvironmentProblem, "not in the cache.*HF_HUB_OFFLINE")
    assert not served.seen


def test_a_folder_named_snapshots_offline(
    family: Path, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the branch was recorded in the folder above it, so it was not found."""
    served.repos["org/s"] = {"snapshots/t.gguf": (family / "target.gguf").read_bytes()}
    path = get("org/s:snapshots/t.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get("org/s:snapshots/t.gguf") == path


def test_a_split_gguf_is_fetched_whole(
    family: Path, served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository with one split GGUF was refused with the advice to name its first part, of which
    nothing else was fetched."""
    with GGUF(family / "target.gguf") as g:
        kv, raw = {k: g.value(k) for k in g}, {n: [g.raw(n)] for n in g.tensors}
        data = [TensorData(n, t.shape, t.type, raw[n]) for n, t in g.tensors.items()]
        paths, _ = write_split(tmp_path / "m.gguf", kv, data, 200_000)
    parts = {p.name: p.read_bytes() for p in paths}
    served.repos["org/split"] = parts
    served.repos["org/more"] = {f"sub/{n}": b for n, b in parts.items()} | {"m.gguf": b"x"}
    ids = ("org/split", f"org/split:{paths[0].name}", f"org/more:sub/{paths[0].name}")
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        for text in ids:
            path = get(text, "gguf")
            assert path.name == paths[0].name, text
            with GGUF(path) as g:
                assert g.tensors.keys() == raw.keys() and len(g.parts) == len(paths) > 2
    assert "m.gguf" not in served.downloads()


def test_suffixes_in_capitals(
    family: Path, served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a repository had "neither safetensors nor GGUF files", and `:FILE.GGUF` was a path. Of
    a split model one part was fetched."""
    with GGUF(family / "target.gguf") as g:
        kv, raw = {k: g.value(k) for k in g}, {n: [g.raw(n)] for n in g.tensors}
        data = [TensorData(n, t.shape, t.type, raw[n]) for n, t in g.tensors.items()]
        paths, _ = write_split(tmp_path / "M-Q8_0.gguf", kv, data, 200_000)
    served.repos["org/caps"] = {p.name.upper(): p.read_bytes() for p in paths}
    served.repos["org/one"] = {"D.GGUF": (family / "draft.gguf").read_bytes()}
    first = paths[0].name.upper()
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert get("org/one").name == get("org/one:D.GGUF").name == "D.GGUF"
        for text in ("org/caps", "org/caps:q8_0", f"org/caps:{first}"):
            path = get(text, "gguf")
            assert path.name == first, text
            with GGUF(path) as g:
                assert g.tensors.keys() == raw.keys() and len(g.parts) == len(paths) > 2


def test_a_type_offline(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    file = get("org/two:q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get("org/two:q8_0") == file
    refused("org/two:bf16", InputError, "no single GGUF file.*draft-q8_0")


def test_no_network(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("org/draft", EnvironmentProblem, "no such file or folder here.*cannot be reached")


@pytest.mark.parametrize(
    "name,value",
    [
        ("HF_ENDPOINT", "notaurl"),
        ("HF_ENDPOINT", ""),
        ("HF_ENDPOINT", "ftp://127.0.0.1"),
        ("HF_ENDPOINT", "http://[::1"),
        ("HF_ENDPOINT", "http://127.0.0.1:port"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "0"),
        ("HF_HUB_ETAG_TIMEOUT", "1.5"),
        ("HF_HOME", "/dev/null"),
        ("HF_HUB_CACHE", "/dev/null/cache"),
        ("HF_TOKEN", "hf_\u00e4"),
        ("HF_TOKEN", "hf_a\x1bb"),
        ("HF_TOKEN", "hf_a\nhf_b"),
        ("HF_TOKEN", "hf_a b"),
        ("HUGGING_FACE_HUB_TOKEN", "hf_\udcff"),
        ("HTTPS_PROXY", "http://127.0.0.1:port"),
        ("ALL_PROXY", "ftp://127.0.0.1"),
        ("SSL_CERT_FILE", "missing.pem"),
    ],
)
def test_malformed_settings(
    name: str, value: str, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    says = refused("org/one", UsageError, rf"the environment variable {name}: expected .*unset it")
    assert "TOKEN" not in name or value not in says
    assert not served.seen


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"hf_secret\nhf_other\n", "a line break in it"),
        (b"hf_secret other", "a space in it"),
        (b"hf_secret\xe4\xff", "other characters"),
        ("hf_secret\u00e4".encode(), "other characters"),
        ("\ufeffhf_secret".encode(), "other characters"),
        ("hf_secret".encode("utf-16"), "other characters"),
    ],
)
def test_malformed_token_files(
    content: bytes,
    found: str,
    served: Hub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They ended in "malformed answer of the hub", or the hub said that there is no repository."""
    file = token_file(tmp_path / "token", monkeypatch)
    file.write_bytes(content)
    says = refused("org/one", UsageError, rf"/token, the token file of the hub: .*found {found}\.")
    assert "secret" not in says and "other." not in says and not served.seen
    assert cli.run(["inspect", "org/one"]) == 2
    assert str(file) in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_good")  # has precedence
    assert get("org/one").is_file()


def test_token_files_that_work(
    served: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served.gated.add("org/one")
    file = token_file(tmp_path / "token", monkeypatch)
    file.mkdir()
    refused("org/one", EnvironmentProblem, "/token, the token file of the hub, cannot be read: Is")
    file.rmdir()
    refused("org/one", InputError, "gated")
    file.write_bytes(b" hf_good\r\n")
    assert get("org/one").is_file()


def test_a_token_that_is_not_sent_is_not_checked(
    served: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    token_file(tmp_path / "token", monkeypatch).write_bytes(b"\xff")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert get("org/one").is_file()


def token_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `file` the token file of huggingface_hub; return it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(file))
    return file


def test_settings_that_work(served: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served.gated.add("org/one")
    monkeypatch.setenv("HF_ENDPOINT", f"{served.url}/")
    monkeypatch.setenv("HF_TOKEN", "hf_good\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "new" / "folder"))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "7")
    assert get("org/one").is_file()
    assert not any("//" in request for request in served.seen)


# ---- what passes


def test_transient_errors_are_retried(served: Hub) -> None:
    served.faults["/api/models/org/draft"] = [status(500), status(503)]
    served.faults["HEAD /org/draft/resolve"] = [status(502)]
    served.faults["GET /org/draft/resolve"] = [status(500)]
    assert (get("org/draft") / "config.json").is_file()


def test_permanent_errors_are_reported(served: Hub) -> None:
    served.faults["/api/models/org/draft"] = [status(500)] * 9
    refused("org/draft", EnvironmentProblem, "answered 500")
    served.faults.clear()
    served.faults["resolve"] = [status(500)] * 99
    refused("org/draft", EnvironmentProblem, "answered 500")


def test_a_broken_download_resumes(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = served.repos["org/one"]["draft-q8_0.gguf"]
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    served.faults["GET /org/one/resolve"] = [truncated(data, 5000)]
    assert get("org/one").read_bytes() == data
    assert any("bytes=5000-" in line for line in served.seen)


def test_a_hanging_hub_is_left(served: Hub) -> None:
    served.faults["/api/models/org/draft"] = [hang(2.5)] * 3
    refused("org/draft", EnvironmentProblem, "cannot be reached")


def test_redirects_are_followed(served: Hub) -> None:
    path = f"/org/one/resolve/{SHA}/draft-q8_0.gguf"
    served.faults["GET /org/one/resolve"] = [redirect(served.url + path + "?signed=1")]
    assert get("org/one").read_bytes() == served.repos["org/one"]["draft-q8_0.gguf"]


# ---- a hub that is not to be trusted


@pytest.mark.parametrize("name", ["draft-q8_0.gguf", "small.gguf"])
def test_wrong_content_is_found_and_removed(name: str, served: Hub, tmp_path: Path) -> None:
    served.repos["org/one"] = {name: b"x" * (5000 if name[0] == "d" else 50)}
    served.wrong_etag.add(name)
    refused("org/one", InputError, "damaged download, removed.*sha256")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.name == name]
    served.wrong_etag.clear()
    assert get("org/one").read_bytes() == served.repos["org/one"][name]


@pytest.mark.parametrize(
    "name",
    [
        "../../evil.safetensors",
        "/tmp/evil.safetensors",
        "a/../../evil.gguf",
        "..\\evil.gguf",
        "\x00.gguf",
        ".git/config.gguf",
        "con\n.gguf",
    ],
)
def test_names_that_lead_outside_are_ignored(name: str, served: Hub, tmp_path: Path) -> None:
    served.repos["org/evil"] = {name: b"x"}
    refused("org/evil", InputError, "neither safetensors nor GGUF")
    assert not served.downloads() and not list(tmp_path.rglob("*evil*"))


def test_an_index_that_leads_outside_is_refused(served: Hub, tmp_path: Path) -> None:
    index = json.loads(served.repos["org/draft"]["model.safetensors.index.json"])
    index["weight_map"]["fc.weight"] = "../../../evil.safetensors"
    served.repos["org/draft"]["model.safetensors.index.json"] = json.dumps(index).encode()
    refused("org/draft", InputError, "outside the folder")


def test_a_link_in_the_cache_that_leads_outside_is_refused(served: Hub, tmp_path: Path) -> None:
    path = get("org/one")
    path.unlink()
    (tmp_path / "secret").write_bytes(b"secret")
    path.symlink_to(tmp_path / "secret")
    refused("org/one", InputError, "is outside the cache")


ANSWERS: dict[str, Any] = {
    "no JSON": lambda a: b"<html>",
    "a list": lambda a: [1],
    "empty": lambda a: b"",
    "no commit": lambda a: a | {"sha": None},
    "a path": lambda a: a | {"sha": "../../x"},
    "siblings": lambda a: a | {"siblings": [{"x": 1}]},
    "text": lambda a: a | {"siblings": "abc"},
    "numbers": lambda a: a | {"siblings": [{"rfilename": 5}]},
    "deep": lambda a: b"[" * 100000,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_invalid_responses(name: str, served: Hub) -> None:
    served.listing = ANSWERS[name]
    refused("org/draft", InputError, "malformed answer|no commit in|neither safetensors")


ONE = "/org/one/resolve"
OTHER = "76543210" * 5


def written(folder: Path) -> set[Path]:
    return {p for p in folder.rglob("*") if "work" not in p.parts and p.is_file()}


CREATED: list[str] = []


def note_created(event: str, args: Any) -> None:
    if event in ("os.mkdir", "os.symlink", "os.rename", "os.link"):
        CREATED.append(os.path.abspath(os.fsdecode(args[event != "os.mkdir"])))
    elif (
        event == "open"
        and isinstance(args[0], str | bytes)
        and args[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
    ):
        CREATED.append(os.path.abspath(os.fsdecode(args[0])))


@pytest.fixture(scope="module")
def watched() -> None:
    """Record every created path in CREATED from now on, including paths that are removed again."""
    sys.addaudithook(note_created)


@pytest.mark.parametrize("where", ["HEAD", "second HEAD", "X-Linked-ETag", "404"])
@pytest.mark.parametrize("kind", ["absolute", "up", "empty", "short", "upper case", "two"])
def test_an_etag_is_not_used_as_a_path(
    where: str, kind: str, served: Hub, tmp_path: Path, watched: None
) -> None:
    """huggingface_hub uses the ETag as a path; one that is not a digest would disable its check."""
    tag = {
        "absolute": str(tmp_path / "pwn"),
        "up": "../../../../pwn",
        "empty": "",
        "short": "abc",
        "upper case": "A" * 64,
        "two": f"{'a' * 64}, {'b' * 64}",
    }[kind]
    bad = altered(**{"X-Linked-ETag" if where[0] == "X" else "ETag": f'"{tag}"'})
    faults = {
        "HEAD": [bad],
        "second HEAD": [status(502), bad],
        "X-Linked-ETag": [bad],
        "404": [status(404, X_Error_Code="EntryNotFound", X_Repo_Commit=f"../../{tag}/pwn")],
    }
    served.faults[f"HEAD {ONE}"] = faults[where]
    CREATED.clear()
    refused("org/one", InputError, "invalid answer of the hub: (ETag|X-Repo-Commit)")
    assert not written(tmp_path)
    assert not [p for p in CREATED if not p.startswith((str(tmp_path / "cache"), os.devnull))]


@pytest.mark.parametrize("commit", ["../../../x", "/abs", "", OTHER, "main"])
@pytest.mark.parametrize("code", [200, 404])
def test_a_commit_header_is_not_used_as_a_path(
    commit: str, code: int, served: Hub, tmp_path: Path
) -> None:
    change = altered(X_Repo_Commit=commit)
    if code == 404:
        change = status(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
    served.faults[f"HEAD {ONE}"] = [change]
    refused("org/one", InputError, "invalid answer of the hub: X-Repo-Commit")
    assert not written(tmp_path)


@pytest.mark.parametrize("length", [10**15, 10**18])
@pytest.mark.parametrize("name", ["Content-Length", "X-Linked-Size"])
def test_sizes_larger_than_the_disk(name: str, length: int, served: Hub, tmp_path: Path) -> None:
    served.faults["HEAD"] = [altered(**{name: str(length)})]
    refused("org/one", EnvironmentProblem, "no space left")
    served.faults["HEAD"] = [altered(**{name: str(length)})]
    refused(
        "org/draft",
        InputError,
        r"index\.json.*invalid answer of the hub: size.*at most 67,108,864 bytes",
    )
    served.faults["/api/"] = [altered(Content_Length=str(length))]
    refused("org/one", InputError, "invalid answer of the hub: size")
    assert not written(tmp_path)


@pytest.mark.parametrize("size", ["-1", "1e9", "", "0x10", "9" * 30])
def test_invalid_sizes(size: str, served: Hub) -> None:
    served.faults[f"HEAD {ONE}"] = [altered(X_Linked_Size=size)]
    refused("org/one", InputError, "invalid answer of the hub: size")


def test_compression_is_refused(served: Hub, tmp_path: Path) -> None:
    """A compressed response of 4.6 MB expanded to 1 GB."""
    bomb = gzip.compress(bytes(1 << 20))
    for part in ("/api/", "GET /org/draft/resolve"):
        served.faults = {part: [altered(bomb, Content_Encoding="gzip")] * 9}
        refused("org/draft", InputError, "invalid answer of the hub: compressed")
    assert all("identity" in line for line in served.encodings)


def test_a_file_that_is_read_whole_is_small(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("g4spec.gguf.regular_files.MAX_READ_BYTES", 100)
    refused("org/draft", InputError, r"model\.safetensors\.index\.json.*at most 100 bytes")
    monkeypatch.setattr(hub, "MAX_LISTING_BYTES", 50)
    refused("org/draft", InputError, "at most 50 bytes")


def test_a_body_without_an_end(
    served: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a file would fill the disk, such a listing the memory."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    served.faults["/api/"] = [endless]
    refused("org/draft", InputError, "more bytes than announced")
    served.faults = {f"GET {ONE}": [endless]}
    refused("org/one", InputError, "more bytes than announced")
    assert not list((tmp_path / "cache").rglob("blobs/*"))


@pytest.mark.parametrize(
    "what,part",
    [
        ("headers", "/api/"),
        ("headers", f"HEAD {ONE}"),
        ("headers", f"GET {ONE}"),
        ("body", "/api/"),
        ("body", f"GET {ONE}"),
    ],
)
def test_a_slow_response_is_ended(
    what: str, part: str, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(transfer, "MIN_BYTES_PER_SECOND", 1 << 40)
    served.faults[part] = [dripping(what, len(served.repos["org/one"]["draft-q8_0.gguf"]))] * 20
    start = time.monotonic()
    refused("org/one", EnvironmentProblem, "too slow")
    assert time.monotonic() - start < 5


def test_a_hub_cannot_put_a_run_to_sleep(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    served.faults[f"GET {ONE}"] = [status(429, Retry_After="86400")] * 2
    get("org/one")
    assert slept and max(slept) < 10


def test_a_hub_prints_nothing(served: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    served.faults["resolve"] = [altered(**{"X-HF-Warning": "x; PWNED \x9b31m"})] * 9
    get("org/one")
    out, err = capfd.readouterr()
    assert "PWNED" not in out + err


def test_the_digest_is_checked_without_links(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """On systems without symbolic links, the cache stores a file under its own name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    assert not get("org/one").is_symlink()
    served.repos["org/two"]["draft-q8_0.gguf"] = b"x" * 5000
    served.wrong_etag.add("draft-q8_0.gguf")
    refused("org/two:draft-q8_0.gguf", InputError, "damaged download, removed")


def test_redirects_to_files_and_invalid_urls_are_refused(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "secret.gguf").write_bytes(b"secret")
    for url in (f"file://{tmp_path}/secret.gguf", "ftp://127.0.0.1/x", "http://[::1"):
        served.faults = {f"GET {ONE}": [redirect(url)] * 99}
        with pytest.raises(G4Error):
            get("org/one")
    data = b"not what the hub named"
    served.repos["org/evil"] = {"x.gguf": data}
    served.faults = {f"GET {ONE}": [redirect(f"{served.url}/org/evil/resolve/{SHA}/x.gguf")] * 9}
    with pytest.raises(G4Error):
        get("org/one")
    assert etag(data) not in {p.name for p in written(tmp_path)}


def test_other_uses_of_the_hub_are_left_alone(served: Hub) -> None:
    from huggingface_hub import get_session

    before = get_session().event_hooks
    get("org/one")
    assert get_session().event_hooks == before


def test_a_full_disk(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    refused("org/one", EnvironmentProblem, "no space left")


def test_a_cache_that_cannot_be_written(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file, not a folder")
    refused("org/one", EnvironmentProblem, "cannot write")
