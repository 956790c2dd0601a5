"""Inputs that a rule requires."""

from __future__ import annotations

from enum import IntEnum


class Needs(IntEnum):
    """The inputs that a rule requires. Each level includes those above it, except that SOURCE does
    not require a TARGET, and CONVERSION no CONFIG."""

    HEADER = 0  # the header, possibly broken
    FILE = 1  # a container that the strict reader opens
    CONFIG = 2  # a configuration parsed from the metadata
    TARGET = 3  # the target of the draft
    SOURCE = 4  # the checkpoint it was converted from
    CONVERSION = 5  # all inputs of a conversion: the checkpoint, and for a draft its target


NO_TARGET, NO_SOURCE = "no target was given", "no source was given"
NOT_GIVEN = (NO_TARGET, NO_SOURCE)
"""Reasons to skip a rule because an optional input was not given; any other reason is a defect of
the file."""
