"""Every command that runs a model runs it on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import family
from tests.gpu.device import GPU, needs_gpu
from tests.support.commands import Cli, in_folder

pytestmark = [pytest.mark.gpu, needs_gpu]

ON_GPU = ("--device", GPU)
PROMPT = ("-p", "def area(r):")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained family in Q4_K_M, and a text."""
    at = tmp_path_factory.mktemp("home")
    family.trained(at, "q4_k_m")
    (at / "text.txt").write_text("The cat sat on the mat. " * 200)
    return at


@pytest.fixture
def g4spec(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    return in_folder(home, tmp_path / "cache", monkeypatch, capsys)


@pytest.mark.parametrize("draft", [None, "dflash.gguf", "assistant.gguf", "ngram"])
def test_generate(g4spec: Cli, draft: str | None) -> None:
    run = ["generate", "-m", "target.gguf", *PROMPT, "-n", 24, "--ignore-eos", *ON_GPU]
    plain = g4spec.json(*run)
    assert plain["stats"]["tokens"] == 24
    if draft is not None:
        found = g4spec.json(*run, "-md", draft, "--draft-max", 4)
        assert found["text"] == plain["text"]


def test_verify_and_bench(g4spec: Cli) -> None:
    pair = ("-m", "target.gguf", "-md", "dflash.gguf", *ON_GPU)
    for more in ((), ("--parallel", 4)):
        assert g4spec.json("verify", *pair, "--cases", 6, "-n", 16, *more)["ok"]
    few = ("--categories", "code", "--prompts", 1, "-n", 16)
    for more in (("--draft-max", "0,2,auto"), ("--draft-max", 2, "--parallel", 3)):
        found = g4spec.json("bench", *pair, *few, *more)
        assert found["identical"] and found["rows"] and found["provenance"]["device"]


def test_bench_synthetic(g4spec: Cli) -> None:
    rows = g4spec.json("bench", "--synthetic", "e2b", "-md", "assistant")["rows"]
    assert all(row["step_1_ms"] > 0 for row in rows)


def test_perplexity(g4spec: Cli) -> None:
    run = ("perplexity", "-m", "target.gguf", "text.txt", "--chunks", 1)
    gpu, cpu = g4spec.json(*run, *ON_GPU), g4spec.json(*run, "--device", "cpu")
    assert gpu["perplexity"]["value"] == pytest.approx(cpu["perplexity"]["value"], rel=0.02)


def test_doctor(g4spec: Cli) -> None:
    found = g4spec.json("doctor", "-m", "target.gguf", "-md", "dflash.gguf")
    assert found["machine"]["gpus"]
    assert any(check["ok"] for check in g4spec.json("doctor", "--self-test")["checks"])
