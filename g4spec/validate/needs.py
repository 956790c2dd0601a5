"""Inputs that a rule requires."""

from __future__ import annotations

from enum import IntEnum


class Needs(IntEnum):
    """The inputs that a rule requires. Each level includes those above it, except that SOURCE and
    OWN_SOURCE do not require a TARGET, and CONVERSION no CONFIG."""

    HEADER = 0  # the header, possibly broken
    FILE = 1  # a container that the strict reader opens
    CONFIG = 2  # a configuration parsed from the metadata
    TARGET = 3  # the target of the draft
    SOURCE = 4  # the checkpoint it was converted from
    OWN_SOURCE = 5  # a source that is the file's, and not of another model
    CONVERSION = 6  # all inputs of a conversion: the checkpoint, and for a draft its target


NO_TARGET, NO_SOURCE = "no target was given", "no source was given"
OTHER_SOURCE = "the source is of another model (see G4-CMP-001)"
NOT_GIVEN = (NO_TARGET, NO_SOURCE)
"""Reasons to skip a rule because an optional input was not given; any other reason but
OTHER_SOURCE is a defect of the file."""
