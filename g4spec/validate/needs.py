"""What must be at hand before a rule can be asked."""

from __future__ import annotations

from enum import IntEnum


class Needs(IntEnum):
    """What must be at hand before a rule can be asked; each level includes those above it,
    except that SOURCE does not need a TARGET, and CONVERSION no CONFIG."""

    HEADER = 0  # bytes that may be anything
    FILE = 1  # a container that our reader opens
    CONFIG = 2  # metadata that describes a known kind of model
    TARGET = 3  # the target the draft is paired with
    SOURCE = 4  # the checkpoint it was converted from
    CONVERSION = 5  # all that a conversion reads: the checkpoint, and of a draft the target too


NO_TARGET, NO_SOURCE = "no target was given", "no source was given"
NOT_GIVEN = (NO_TARGET, NO_SOURCE)
"""Why a rule was not asked that nobody asked for; any other reason is the file's."""
