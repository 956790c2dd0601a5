"""The first output of `demo`: a generated text with its draft tokens marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli import _engine
from g4spec.cli._demo_family import DRAFTS
from g4spec.cli._text_stream import Writer, stats_line
from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine

N_CTX = 2048
PROMPT, TOKENS, DRAFTED = "def area(r):", 80, 7


def load(files: dict[str, Path], draft: str) -> Engine:
    """Load the family's target with one of its drafts."""
    return _engine.load_with_threads(target=files["target"], draft=files[draft], n_ctx=N_CTX)


def write(files: dict[str, Path], out: Output) -> None:
    """Generate a text and print it with accepted and rejected draft tokens marked."""
    from g4spec.runtime.request import Options

    if out.json or out.quiet:
        return
    out.line("A small Gemma 4 target generates text, and a smaller draft proposes tokens.", "bold")
    engine = load(files, DRAFTS[0])
    options = Options(TOKENS, draft_max=DRAFTED)
    run = engine.generate(engine.tokenizer.encode(PROMPT), options)
    writer = Writer(out, engine.tokenizer, (), "first")
    out.stream(PROMPT)
    for cycle in run:
        writer.cycle(cycle, run.text)
    writer.finish(run.text)
    out.note(stats_line(run.stats, True))
