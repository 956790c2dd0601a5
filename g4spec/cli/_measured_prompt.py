"""The prompt of `verify` and `bench`: the user's, read as `generate` does, or the built-in ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from g4spec.cli._option_checks import refuse
from g4spec.cli._prompt import Prompt, PromptOptions

if TYPE_CHECKING:
    from g4spec.cli.render import Output
    from g4spec.measure.prompts import BenchPrompt
    from g4spec.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class MeasuredPromptOptions(PromptOptions):
    """Options that describe a prompt, or none: then `thinking` applies to the built-in prompts."""

    def __post_init__(self) -> None:
        if self.is_given:
            return PromptOptions.__post_init__(self)
        fix = "give one with -p, --file, --tokens-file or --messages"
        needing = {"chat": self.chat, "system": self.system, "tools": self.tools}
        special = self.special is not None
        refuse("needs a prompt of your own", fix, **needing, parse_special=special)

    @property
    def is_given(self) -> bool:
        """True if the user gave a prompt."""
        sources = (self.text, self.file, self.tokens_file, self.messages)
        return any(source is not None for source in sources)

    def read_own(self, **built_in: object) -> Prompt | None:
        """Read the user's prompt; return None if there is none.

        Args:
            built_in: values of options that select built-in prompts, by name.

        Raises UsageError if one of them is given beside a prompt.
        """
        if not self.is_given:
            return None
        refuse("applies to the built-in prompts only", "leave it out", **built_in)
        return self.read()


def bench_prompt(prompt: Prompt, engine: Engine, out: Output) -> BenchPrompt:
    """Return the user's prompt in the form of the built-in ones."""
    from g4spec.measure.prompts import OWN, BenchPrompt

    ids = prompt.encode(engine.tokenizer, engine.n_ctx)
    out.note(prompt.chat_note(engine.tokenizer, ids))
    return BenchPrompt(OWN, "own", "ids", prompt.text, ids=tuple(ids))
