"""Errors name parameters in the library, options on the command line, and fields in HTTP
responses."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import g4spec
from g4spec import cli, ranges
from g4spec.errors import G4Error, spell
from g4spec.measure import bench, draft_lengths, verify
from g4spec.ops.sampling import Sampler
from g4spec.runtime import load_options
from g4spec.runtime.request import Options
from g4spec.server.request_errors import RequestError

PACKAGE = Path(g4spec.__file__).parent
LIBRARY = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("cli", "advisor", "validate")
]
FLAG = re.compile(r"(^|[\s(,])--?(?!inf)[a-z][a-z-]*\b")


@pytest.mark.parametrize("path", LIBRARY, ids=[str(p.relative_to(PACKAGE)) for p in LIBRARY])
def test_library_errors_do_not_name_command_line_options(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("UsageError", "InputError", "Unsupported", "EnvironmentProblem"),
        ):
            strings = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            text = " ".join(s for s in strings if isinstance(s, str))
            text = re.sub(r"`[^`]*`|https?://\S+", "", text)  # a whole command is no option
            assert not FLAG.search(text), f"line {node.lineno}: {text}"


@pytest.mark.parametrize(
    ("make", "command", "option"),
    [
        (lambda: Sampler(temperature=-1), "generate", "--temp"),
        (lambda: Sampler(repetition_penalty=0), "generate", "--repeat-penalty"),
        (lambda: Options(n_predict=-1), "generate", "-n"),
        (lambda: Options(draft_max=99), "chat", "--draft-max"),
        (lambda: load_options.check_draft(2.0, None, True), "serve", "--draft-p-min"),
        (lambda: load_options.parse_device("tpu"), "verify", "--device"),
        (lambda: ranges.check(parallel=0), "serve", "-np"),
        (lambda: ranges.check(parallel=65536), "verify", "-np"),  # took 1.5 GB
        (lambda: draft_lengths.parse_lengths("x", 15), "bench", "--draft-max"),
        (lambda: bench.BenchConfig((0, 1), repeats=0), "bench", "--repeats"),
        (lambda: verify.cases([], 0, 4), "verify", "--cases"),
        (lambda: verify.cases([], 1 << 63, 4), "verify", "--cases"),
    ],
)
def test_names_in_the_library_and_in_the_command_line(make: Any, command: str, option: str) -> None:
    with pytest.raises(G4Error) as caught:
        make()
    assert re.match(r"`[a-z_]+`: expected", str(caught.value))
    context: Any = cli.typer.main.get_command(cli.app()).commands[command]  # type: ignore[attr-defined]
    names = cli._command_classes._field_names.flags(context.params)
    assert spell(str(caught.value), names).startswith(f"{option}: expected")


def test_errors_of_a_command_name_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "-m", "x", "-p", "y", "--temp", "-1"]) == 2
    assert "error: --temp: expected a finite number >= 0, found -1.0" in capsys.readouterr().err


def test_responses_name_fields() -> None:
    with pytest.raises(G4Error) as caught:
        Options(n_predict=-1)
    error = RequestError.of(caught.value)
    assert (error.message, error.param) == (
        "max_tokens: expected >= 0 (0 only reads the prompt), found -1",
        "max_tokens",
    )


def test_other_words_in_backticks_stay() -> None:
    text = "`n_ctx` 64, see `g4spec doctor` and `unknown`"
    assert spell(text, {"n_ctx": "-c"}) == "-c 64, see `g4spec doctor` and `unknown`"


def test_a_fix_after_a_sentence_has_one_full_stop() -> None:
    assert str(G4Error("no answer", found="no protocol.", fix="check it")).endswith(
        "no answer: found no protocol. Check it"
    )
