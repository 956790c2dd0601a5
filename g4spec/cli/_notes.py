"""Notes about runs that probably do not do what the user wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.tokenizer import Tokenizer

MIN_PROPOSALS, LOW_ACCEPTANCE = 16, 0.04
"""Proposals needed for a statement, and acceptance of their first tokens that counts as low."""
MIN_SUSPECTED = 6
"""Proposals needed for a suspicion if none of their first tokens was accepted."""


def low_acceptance_note(drafted: int, accepted: int, auto: bool = False) -> str | None:
    """Return a note if almost no first token of the proposals was accepted, else None.

    Args:
        drafted, accepted: number of drafted and of accepted first tokens of proposals.
        auto: whether the draft length was chosen by `auto`, which makes few proposals if none is
            accepted. Then the note says how to find out more.
    """
    if auto and MIN_SUSPECTED <= drafted < MIN_PROPOSALS and accepted == 0:
        return (
            f"no drafted token was accepted: 0 of {drafted} first tokens, too few to be sure. "
            "Perhaps the draft was not trained for this target: --draft-max 3 drafts in every step"
        )
    if drafted < MIN_PROPOSALS or accepted >= LOW_ACCEPTANCE * drafted:
        return None
    return (
        f"almost no drafted token was accepted: {accepted} of {drafted} first tokens "
        f"({accepted / drafted:.1%}). The draft was probably not trained for this target. "
        "Find the reason with `g4spec validate DRAFT --target TARGET --probe`"
    )


def greedy_note(sampler: Sampler) -> str | None:
    """Return a note on sampling options that have no effect at temperature 0, else None."""
    options = () if sampler.temperature else ("top_n_sigma", "top_k", "top_p", "min_p", "seed")
    plain = type(sampler)()
    given = [name for name in options if getattr(sampler, name) != getattr(plain, name)]
    names = [f"--{name.replace('_', '-')}" for name in given]
    text = f"{', '.join(names)}: no effect at --temp 0 (greedy decoding)"
    return text if names else None


def thinking_note(tokenizer: Tokenizer, option: str = "--thinking") -> str | None:
    """Return a note if the chat template writes the same with and without thinking, else None.

    Args:
        option: the option that enables thinking.
    """
    turns = [{"role": "user", "content": "a"}]
    if tokenizer.template and tokenizer.chat(turns) != tokenizer.chat(turns, thinking=True):
        return None
    return f"{option} has no effect: this model's chat template does not know it"
