"""Options that edit logits before a token is chosen, spelled as in llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from g4spec.errors import UsageError

LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID+VALUE|ID-VALUE|ID=VALUE",
        help="Add VALUE, -100 to 100, to the logit of token ID; ID-inf bans the token. May be "
        "repeated.",
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        help="Repetition penalty for tokens in the prompt or the output: divides positive logits "
        "and multiplies negative ones; 1 is off.",
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        help="Subtract this, -2 to 2, from the logit of each token that is in the output.",
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="Subtract this, -2 to 2, from a token's logit for each time it is in the output.",
    ),
]


def logit_bias(texts: Sequence[str] | None) -> tuple[tuple[int, float], ...]:
    """Parse the values of `--logit-bias`; `Sampler` checks their range."""
    return tuple(_bias(text) for text in texts or ())


def _bias(text: str) -> tuple[int, float]:
    # A sign between id and value belongs to the value; `=` is followed by any number.
    match = re.fullmatch(r"([0-9]+)(?:=([+-]?)|([+-]))([0-9.]+(?:e[+-]?[0-9]+)?|inf)", text, re.I)
    try:
        if match:
            return int(match[1]), float((match[2] or match[3] or "") + match[4])
    except ValueError:  # "1.2.3"
        pass
    raise UsageError(
        "--logit-bias", expected="ID+VALUE, ID-VALUE or ID=VALUE, such as 15043-1.5", found=text
    )
