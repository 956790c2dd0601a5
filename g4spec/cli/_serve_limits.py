"""Options of `serve` that limit drafting and the prefix cache."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from g4spec.cli import _options
from g4spec.errors import UsageError

PrefixCache = Annotated[
    int,
    typer.Option(
        "--prefix-cache",
        min=0,
        metavar="MIB",
        help="Host memory for the prefix cache, in MiB.",
    ),
]
DraftMax = Annotated[
    str,
    _options.draft_max_option(
        f"Maximum draft length of requests that set none, {_options.DRAFT_RANGE}"
    ),
]


def check_prefix_cache(mib: int) -> int:
    """Return `--prefix-cache` in bytes; raise UsageError if it is more than this machine's RAM."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if mib > ram:
        raise UsageError(
            "--prefix-cache", expected=f"at most {ram} MiB, the RAM of this machine", found=mib
        )
    return mib << 20
