"""`generate` and `tokenize`, from the command line to the printed text."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4spec.cli import _inputs, render
from g4spec.cli._text_stream import Writer, auto_note
from g4spec.core import Cycle
from g4spec.errors import InputError
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request, Stats, stop_prefix_length
from tests.support import tiny, tokens
from tests.support.commands import Cli

PROMPT = ("-p", "hello world", "-n", 24, "-c", 256)


@pytest.mark.parametrize("sampling", [(), ("--temp", 1, "--top-k", 50, "--seed", 7)])
def test_the_same_text_with_and_without_a_draft(
    files: tuple[str, str], g4spec: Cli, sampling: tuple[object, ...]
) -> None:
    target, draft = files
    plain = g4spec.json("generate", "-m", target, *PROMPT, *sampling)
    assert len(plain["ids"]) == plain["stats"]["tokens"] == 24
    for more in [
        ("-md", draft, "--draft-max", 3),
        ("-md", "ngram"),
        ("-md", draft),
        ("--model-draft", draft, "--spec-draft-n-max", 15),
    ]:
        drafted = g4spec.json("generate", "-m", target, *PROMPT, *sampling, *more)
        assert (drafted["ids"], drafted["text"]) == (plain["ids"], plain["text"]), more


def test_ops_without_a_kernel_are_named(
    files: tuple[str, str],
    g4spec: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pretend to be a GPU, where ops without a kernel run in torch. Only bench had them in its
    JSON; chat and `bench --parallel` said nothing."""
    load = Engine.load

    def loaded(*args: Any, **options: Any) -> Engine:
        engine = load(*args, **options)
        engine.target.ops.without_kernel |= {"linear (float32)", "attend"}
        return engine

    monkeypatch.setattr(Engine, "load", loaded)
    note = "slower than a kernel: attend, linear (float32)"
    few = ("-m", files[0], "-c", 128)
    for argv in (
        ("generate", *few, "-md", files[1], "-p", "hello", "-n", 3),
        ("verify", *few, "-md", files[1], "-p", "hello", "-n", 24, "--cases", 1, "--draft-max", 3),
    ):
        out, err = g4spec(*argv, "--json")
        assert json.loads(out)["ops_without_kernel"] == ["attend", "linear (float32)"]
        assert err.count(note) == 1
    once = ("-p", "hello", "-n", 3, "--repeats", 1)
    assert g4spec("bench", *few, *once)[1].count(note) == 1
    assert g4spec("bench", *few, *once, "-np", 2)[1].count(note) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    assert g4spec("chat", *few, "-n", 2)[1].count(note) == 1


@pytest.mark.parametrize("n_ctx", [2, 8, 16, 17, 18, 19])
@pytest.mark.parametrize("draft", ["", "ngram"])
def test_very_short_contexts(files: tuple[str, str], g4spec: Cli, n_ctx: int, draft: str) -> None:
    run = ("generate", "-m", files[0], "-p", "a", "-n", 24, "-c", n_ctx)
    plain = g4spec.json(*run)
    assert g4spec.json(*run, "-md", draft or files[1])["ids"] == plain["ids"]


def test_speed_ignores_tokens_after_the_end(files: tuple[str, str]) -> None:
    engine = Engine.load(files[0], "ngram", n_ctx=256)
    prompt = engine.tokenizer.encode("hello world") * 8
    text = engine.generate(prompt, Options(60, draft_max=0, ignore_eos=True))
    list(text)
    assert text.stats.needed == 59
    stop = engine.tokenizer.decode(text.ids[30:33])
    for length in (0, 15):
        run = engine.generate(prompt, Options(60, Sampler(), length, (stop,), ignore_eos=True))
        list(run)
        assert run.stats.stop_reason != "length"
        assert run.stats.needed == run.stats.tokens - 1
        assert run.stats.tokens_per_second == run.stats.needed / run.stats.seconds


def test_text_on_stdout_and_figures_on_stderr(files: tuple[str, str], g4spec: Cli) -> None:
    target, draft = files
    text = g4spec.json("generate", "-m", target, *PROMPT)["text"]
    out, err = g4spec("generate", "-m", target, "-md", draft, "--draft-max", 2, *PROMPT)
    assert out == text + "\n"
    assert "24 tokens" in err and "steps" in err and "ended by length" in err
    assert g4spec("generate", "-m", target, *PROMPT, "--quiet") == (text + "\n", "")


def test_ctrl_c_prints_the_text_so_far(
    files: tuple[str, str], g4spec: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cycles = g4spec.json("generate", "-m", files[0], *PROMPT), Request.__iter__

    def interrupted(run: Request) -> Iterator[Cycle]:
        for count, cycle in enumerate(cycles(run)):
            yield cycle
            if count == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr(Request, "__iter__", interrupted)
    out, err = g4spec("generate", "-m", files[0], *PROMPT, code=130)
    assert out.endswith("\n") and whole["text"].startswith(out.rstrip("\ufffd\n"))
    assert "\n5 tokens" in err and err.endswith("ended by Ctrl-C\n")


def test_prompts_from_files(files: tuple[str, str], g4spec: Cli, tmp_path: Path) -> None:
    target = files[0]
    want = g4spec.json("generate", "-m", target, *PROMPT)["ids"]
    (tmp_path / "p.txt").write_text("hello world\n")
    (tmp_path / "ids.csv").write_text(g4spec("tokenize", "-m", target, "hello world", "--csv")[0])
    rest = ("-n", 24, "-c", 256)
    for prompt_option in [("--file", tmp_path / "p.txt"), ("--tokens-file", tmp_path / "ids.csv")]:
        assert g4spec.json("generate", "-m", target, *prompt_option, *rest)["ids"] == want


def test_chat_needs_a_chat_template(files: tuple[str, str], g4spec: Cli, tmp_path: Path) -> None:
    got = g4spec.json("generate", "-m", files[0], *PROMPT, "--chat", "--system", "be brief")
    assert got["stats"]["prompt_tokens"] > 20
    bare = tokens.target_file(tmp_path / "bare.gguf", chat_template=None)
    assert "without --chat" in g4spec("generate", "-m", bare, *PROMPT, "--chat", code=3)[1]


def test_stop_text_is_not_in_the_answer(files: tuple[str, str], g4spec: Cli) -> None:
    target, draft = files
    text = g4spec.json("generate", "-m", target, *PROMPT)["text"]
    stop = text[9:12]
    want = text[: text.find(stop)]
    for more in [(), ("-md", draft, "--draft-max", 5)]:
        out, err = g4spec("generate", "-m", target, *PROMPT, "--stop", stop, "--stop", "$$", *more)
        assert out == want + "\n" and "ended by stop string" in err


def test_show_draft_marks_tokens(files: tuple[str, str], g4spec: Cli) -> None:
    out, err = g4spec(
        "generate", "-m", files[0], "-md", files[1], "--draft-max", 2, "--show-draft", *PROMPT
    )
    assert "~" in out and "accepted" in err and "rejected" in err
    more = g4spec(
        "generate", "-m", files[0], "-md", files[1], "--draft-max", 2, "--show-rejected", *PROMPT
    )[0]
    assert more.count("~") > out.count("~"), "all rejected tokens, not only the first"


def test_rejected_line_breaks_do_not_break_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = {1: "one\n", 2: "two\n", 3: "\n\n", 4: "x"}

    class Stream:
        def push(self, ids: list[int]) -> str:
            return "".join(words[i] for i in ids)

    fake: Any = SimpleNamespace(stream=Stream, decode=lambda ids, special: words[ids[0]])
    for colours, wrong in (("first", "~\\n\\n~"), ("all", "~\\n\\n~~x~")):
        writer = Writer(render.Output(), fake, (), colours)
        writer.cycle(Cycle([1, 2], [0.0, 0.0], [1, 3, 4], 1), "one\ntwo\n")
        assert capsys.readouterr().out == f"[one\n]{wrong}two\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("-p", "x", "-c", "9999999"), "-c: expected 1 to"),
        (("-p", "hello " * 99, "-c", "16"), "does not fit"),
        (("--file", "/nonexistent"), "cannot open"),
        (("-p", "x", "-md", "/nonexistent.gguf"), "/nonexistent.gguf"),
    ],
)
def test_errors_of_bad_input_are_one_line(
    files: tuple[str, str], g4spec: Cli, argv: tuple[str, ...], text: str
) -> None:
    code = 2 if argv[-2:] == ("-c", "9999999") else 3
    out, err = g4spec("generate", "--device", "cpu", "-m", files[0], *argv, code=code)
    assert out == "" and text in err and len(err.splitlines()) == 1


def test_target_and_draft_swapped(files: tuple[str, str], g4spec: Cli) -> None:
    assert "pass it with -md" in g4spec("generate", "-m", files[1], "-p", "x", code=3)[1]


# ---- tokenize


def test_tokenize_round_trip(files: tuple[str, str], g4spec: Cli, tmp_path: Path) -> None:
    target, text = files[0], "hello  world\n\nthe 日本🙂<turn|>"
    spaces, _ = g4spec("tokenize", "-m", target, text)
    commas, _ = g4spec("tokenize", "-m", target, text, "--csv")
    assert spaces.replace(" ", ",") == commas
    back, _ = g4spec("tokenize", "-m", target, commas.strip(), "--ids-to-text")
    assert back == "<bos>" + text + "\n"
    (tmp_path / "t").write_text(text)
    assert g4spec("tokenize", "-m", target, "--file", tmp_path / "t", "--csv")[0] == commas
    ids = g4spec.json("tokenize", "-m", target, text, "--no-bos")["ids"]
    assert [2, *ids] == [int(i) for i in commas.split(",")]


@pytest.mark.parametrize("text", ["1,b", "-3", "1.5", "99999999999999"])
def test_invalid_ids(files: tuple[str, str], g4spec: Cli, text: str) -> None:
    argv = ("tokenize", "-m", files[0], "--ids-to-text", "--", text)
    assert "not a token id" in g4spec(*argv, code=3)[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--ids-to-text", "--csv"), "--csv has no effect with --ids-to-text"),
        (("--ids-to-text", "--no-bos"), "--no-bos has no effect with --ids-to-text"),
        (("--csv", "--json"), "--csv has no effect with --json"),
    ],
)
def test_options_without_effect(
    files: tuple[str, str], g4spec: Cli, options: tuple[str, ...], says: str
) -> None:
    assert says in g4spec("tokenize", "-m", files[0], "2 5", *options, code=2)[1]


def test_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"ok\xff\xfe")
    with pytest.raises(InputError, match=r"expected UTF-8.*byte 2"):
        _inputs.read_text(tmp_path / "b")


def test_a_byte_order_mark_begins_no_text(tmp_path: Path) -> None:
    """Editors on Windows write it; in the middle it is a character of the text."""
    file = tmp_path / "b.txt"
    for data, text in (
        (b"\xef\xbb\xbfHello world\n", "Hello world"),
        (b"\xef\xbb\xbf", ""),
        (b"a\xef\xbb\xbfb", "a\ufeffb"),
        (b"\xef\xbb\xbf\xef\xbb\xbfa", "\ufeffa"),
    ):
        file.write_bytes(data)
        assert _inputs.read_text(file) == text
    file.write_bytes(b"\xef\xbb\xbfok\xff")
    with pytest.raises(InputError, match="byte 5"):
        _inputs.read_text(file)


def test_ids_in_brackets() -> None:
    assert _inputs.parse_ids("[1, 2,\n3]", "x") == [1, 2, 3]


# ---- stop strings and the writer


@pytest.mark.parametrize(
    ("text", "stops", "n"),
    [
        ("abc", (), 0),
        ("abc", ("x",), 0),
        ("abc", ("cd",), 1),
        ("abc", ("bcd", "cx"), 2),
        ("aa", ("aab",), 2),
        ("", ("a",), 0),
        ("abc", ("abc",), 0),
    ],
)
def test_stop_prefix_length(text: str, stops: tuple[str, ...], n: int) -> None:
    assert stop_prefix_length(text, stops) == n


def test_writer_never_shows_a_stop_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = {i: w for i, w in enumerate(["one ", "EN", "D two", " E"])}

    class Stream:
        def push(self, ids: list[int]) -> str:
            return "".join(words[i] for i in ids)

        def finish(self) -> str:
            return ""

    fake: Any = SimpleNamespace(stream=Stream)
    writer = Writer(render.Output(), fake, ("END",), "")
    for token, text, shown in [
        (0, "one ", "one "),
        (3, "one  E", " "),
        (1, "one  EEN", "E"),
        (2, "one  E", ""),  # the request found END and removed it
    ]:
        cycle: Any = SimpleNamespace(tokens=[token], drafted=[], accepted=0)
        writer.cycle(cycle, text)
        assert capsys.readouterr().out == shown
    writer.finish("one  E")
    assert capsys.readouterr().out == "\n"


# ---- a checkpoint folder as -md


def test_draft_folder_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target(tmp_path / "target")
    draft = tiny.zlab_dflash(tmp_path / "draft", target)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    converted = _inputs.open_draft(draft, target, render.Output())
    assert isinstance(converted, Path) and converted.is_relative_to(tmp_path / "cache")
    assert "converted into" in capsys.readouterr().err
    assert _inputs.open_draft(draft, target, render.Output()) == converted
    assert "using its conversion" in capsys.readouterr().err

    shutil.copy(converted, draft / "ready.gguf")
    assert _inputs.open_draft(draft, target, render.Output()) == draft / "ready.gguf"
    assert "took ready.gguf" in capsys.readouterr().err


HALTED = """
import sys, os, signal, g4spec.convert.pipeline as run, g4spec.cli as cli
inner, (number, again) = run.gguf.write, map(int, sys.argv.pop().split(","))
def write(path, kv, tensors, progress=None, check=None):
    def halted():
        for i, t in enumerate(tensors):
            try:
                if i == 3: os.kill(os.getpid(), number)
            finally:
                if i == 3 and again: os.kill(os.getpid(), again)
            yield t
    return inner(path, kv, halted(), progress, check)
run.gguf.write = write
cli.main()
"""


def halted(tmp_path: Path, signals: str) -> tuple[int, bytes, list[Path]]:
    """Send signals to a conversion while it writes. Return exit code, stderr and the files left."""
    source, out = tiny.target(tmp_path / "target"), tmp_path / "out"
    out.mkdir()
    argv = [
        sys.executable,
        "-c",
        HALTED,
        "convert",
        str(source),
        "-o",
        str(out / "t.gguf"),
        signals,
    ]
    done = subprocess.run(argv, check=False, capture_output=True, timeout=60)
    return done.returncode, done.stderr, list(out.iterdir())


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_no_files(number: int, code: int, tmp_path: Path) -> None:
    assert halted(tmp_path, f"{int(number)},0") == (code, b"", [])


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("then", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_is_silent(first: int, then: int, tmp_path: Path) -> None:
    code, stderr, _ = halted(tmp_path, f"{int(first)},{int(then)}")
    assert (code, stderr) == (-then, b"")


@pytest.mark.parametrize(
    "option",
    [
        ("--logit-bias", "5-inf"),
        ("--repeat-penalty", 1.5),
        ("--presence-penalty", 2),
        ("--frequency-penalty", -2),
    ],
)
def test_logit_options_work_the_same_with_a_draft(
    files: tuple[str, str], g4spec: Cli, option: tuple[str, object]
) -> None:
    target, draft = files
    plain = g4spec.json("generate", "-m", target, *PROMPT)["ids"]
    if option[0] == "--logit-bias":
        option = (option[0], f"{plain[0]}-inf")
    edited = g4spec.json("generate", "-m", target, *PROMPT, *option)["ids"]
    assert edited != plain
    for more in (("-md", draft), ("-md", "ngram", "--draft-max", 5)):
        assert g4spec.json("generate", "-m", target, *PROMPT, *option, *more)["ids"] == edited


@pytest.mark.parametrize(
    ("steps", "drafted", "expected"),
    [(27, 2, True), (27, 14, False), (5, 0, False), (300, 2, False)],
)
def test_auto_says_when_it_drafted_little(steps: int, drafted: int, expected: bool) -> None:
    """On short texts, `auto` gained nothing from a good draft, and no message told why."""
    stats = Stats(cycles=steps, drafted_by_position=[drafted] + [0] * 15)
    note = auto_note(stats)
    assert (note is not None) == expected
    assert note is None or f"{drafted} of {steps} steps" in note
