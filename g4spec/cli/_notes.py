"""What is text about a run that may not be what was meant."""

from __future__ import annotations

MIN_PROPOSALS, LOW_ACCEPTANCE = 16, 0.04
"""First tokens of proposals that tell enough, and the share of them that is almost none."""


def low_acceptance_note(drafted: int, accepted: int) -> str | None:
    """What to say of a draft of whose `drafted` first tokens almost none was accepted."""
    if drafted < MIN_PROPOSALS or accepted >= LOW_ACCEPTANCE * drafted:
        return None
    return (
        f"almost nothing of the draft was accepted: {accepted} of {drafted} first tokens "
        f"({accepted / drafted:.1%}); it was probably not trained for this target. "
        "g4spec validate DRAFT --target TARGET looks for the reason"
    )


def greedy_note(**options: float) -> str | None:
    """What to say of options that only sampling reads, where the likeliest token is taken."""
    names = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    text = f"{', '.join(names)}: no effect at --temp 0, which takes the likeliest token"
    return text if names else None
