"""`--draft-p-min` ends a DSpark proposal where the confidence head predicts a rejection. The text
is unchanged and fewer tokens are drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from g4spec.convert import convert
from g4spec.errors import UsageError
from g4spec.gguf import GGUF, TensorData, f32, write
from g4spec.models import dspark
from g4spec.runtime.engine import Engine, Options
from tests.support import tiny, tiny_drafts
from tests.support.commands import Cli, in_folder
from tests.support.selection import sample

PROMPT = ("-p", "hello world", "-n", 24, "-c", 256, "--ignore-eos")
PROMPT_IDS = [2, *range(40, 60)]
CUTS = (0, 0.1, 0.2, 0.3, 0.5, 0.7, 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's GGUF, and drafts for it as checkpoint folders and as files."""
    home = tmp_path_factory.mktemp("home")
    target = tiny.target(home / "target-folder")
    convert(target, home / "target.gguf")
    tiny_drafts.speculators_dspark(home / "dspark", target, block=6)
    tiny_drafts.speculators_dspark(home / "headless", target, confidence="none")
    tiny_drafts.deepspec_dspark(home / "deepspec", target, alias=True)
    tiny.zlab_dflash(home / "dflash", target)
    for name in ("dspark", "headless", "deepspec", "dflash"):
        convert(home / name, home / f"{name}.gguf", target=target)
    return home


@pytest.fixture
def g4spec(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    return in_folder(home, tmp_path / "cache", monkeypatch, capsys)


@pytest.mark.parametrize("draft", sample(["dspark.gguf", "deepspec.gguf"], 1))
@pytest.mark.parametrize("sampling", sample([(), ("--temp", 1, "--seed", 7)], 1))
def test_the_same_text_and_fewer_drafted_tokens(
    g4spec: Cli, draft: str, sampling: tuple[object, ...]
) -> None:
    plain = g4spec.json("generate", "-m", "target.gguf", *PROMPT, *sampling)
    pair = ("generate", "-m", "target.gguf", "-md", draft, *PROMPT, *sampling)
    whole = g4spec.json(*pair, "--draft-max", 5)["stats"]
    per_cycle = []
    for cut in CUTS:
        got = g4spec.json(*pair, "--draft-max", 5, "--draft-p-min", cut)
        assert (got["ids"], got["text"]) == (plain["ids"], plain["text"]), cut
        per_cycle.append(got["stats"]["drafted"] / got["stats"]["cycles"])
    assert per_cycle[0] == whole["drafted"] / whole["cycles"] > 2
    assert per_cycle == sorted(per_cycle, reverse=True) and len(set(per_cycle)) > 3, per_cycle
    assert per_cycle[-1] == 0, "no confidence reaches 1"
    assert g4spec.json(*pair, "--spec-draft-p-min", 0.5)["ids"] == plain["ids"], "length auto"


def test_verify_and_bench_accept_the_option(g4spec: Cli) -> None:
    pair = ("-m", "target.gguf", "-md", "dspark", "-c", 512, "-n", 8)
    drafted = [
        g4spec.json("verify", *pair, "--cases", 3, "--long-tokens", 64, "--draft-p-min", cut)
        for cut in (0, 0.5)
    ]
    assert all(v["ok"] for v in drafted) and drafted[1]["drafted"] < drafted[0]["drafted"]
    few = ("--categories", "chat", "--prompts", 1, "--repeats", 1, "--draft-max", "4")
    rows = g4spec.json("bench", *pair, *few, "--draft-p-min", 1)["rows"]
    assert {r["committed"] for r in rows if r["length"] == 4} == {1.0}


@pytest.mark.parametrize("command", ["generate", "verify", "bench"])
@pytest.mark.parametrize("draft", ["headless", "headless.gguf", "dflash", "dflash.gguf", "ngram"])
def test_drafts_without_a_confidence_head(g4spec: Cli, command: str, draft: str) -> None:
    argv = (command, "-m", "target.gguf", "-md", draft, *(PROMPT[:2] * (command == "generate")))
    output = g4spec.refused(*argv, "--draft-p-min", 0.5, codes=(2,))
    assert "--draft-p-min" in output and "confidence head" in output
    if draft != "ngram":
        kind = "DSpark draft" if draft.startswith("headless") else "DFlash draft"
        assert f"{draft} has no confidence head" in output and f"found {kind}" in output


def test_zero_disables_the_cut(g4spec: Cli) -> None:
    for draft in ("headless.gguf", "dflash.gguf", "ngram"):
        g4spec.json("generate", "-m", "target.gguf", "-md", draft, *PROMPT, "--draft-p-min", 0)
    g4spec.json("generate", "-m", "target.gguf", *PROMPT, "--draft-p-min", 0)
    argv = ("generate", "-m", "target.gguf", *PROMPT, "--draft-p-min", 0.1)
    output = g4spec.refused(*argv, codes=(2,))
    assert "pass a DSpark draft with -md" in output.replace("Pass", "pass")


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "inf", "much"])
def test_values_outside_0_to_1(g4spec: Cli, value: str) -> None:
    pair = ("-m", "target.gguf", "-md", "dspark")
    argv = ("generate", *pair, *PROMPT, "--draft-p-min", value)
    assert "--draft-p-min" in g4spec.refused(*argv, codes=(2,))


def test_the_default_comes_from_the_file(home: Path, tmp_path: Path) -> None:
    """The converter writes no cut. A cut in the file applies unless the option sets another."""
    with GGUF(home / "dspark.gguf") as g:
        assert dspark.P_MIN not in g
        kv = {key: g.value(key) for key in g} | {dspark.P_MIN: f32(1.0)}
        data = [TensorData(n, t.shape, t.type, [g.raw(n).tobytes()]) for n, t in g.tensors.items()]
        write(tmp_path / "cut.gguf", kv, data)

    def drafted(name: Path, **options: Any) -> int:
        engine = Engine.load(home / "target.gguf", name, n_ctx=128, **options)
        run = engine.generate(PROMPT_IDS, Options(12, draft_max=4, ignore_eos=True))
        for _ in run:
            pass
        return run.stats.drafted

    whole = drafted(home / "dspark.gguf")
    assert drafted(tmp_path / "cut.gguf") == 0 < whole
    assert drafted(tmp_path / "cut.gguf", draft_p_min=0.0) == whole
    with pytest.raises(UsageError, match="no confidence head"):
        drafted(home / "dflash.gguf", draft_p_min=0.5)
