"""Ids of models on the Hugging Face hub: `org/name[@revision][:file.gguf]`, or with the type of a
GGUF `org/name:Q4_K_M` or `org/name:UD-Q4_K_XL`, as in llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from g4spec.gguf.parts import has_suffix

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION, _PART = (
    r"[A-Za-z0-9][A-Za-z0-9._/-]*",
    r"[^:\\]+\.[gG][gG][uU][fF]|[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)*",
)
_ID = re.compile(rf"({_WORD}/{_WORD})(?:@({_REVISION}))?(?::({_PART}))?")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]*")
_DRAFT = re.compile(r"(?:.*/)?(?:mtp|eagle3|dflash|dspark)-[^/]*", re.I)
_NO_MODEL = re.compile(r"(?:.*/)?[^/]*(?:mmproj|imatrix)[^/]*", re.I)
"""Names of files beside a model, by the rule of llama.cpp (`common/download.cpp`)."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the hub, with an optional revision and an optional file name or type."""

    repo: str
    revision: str | None = None
    file: str | None = None
    type: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """Parse an id; None if `text` can only be a path, such as `folder/model.gguf`."""
        found = _ID.fullmatch(text)
        if found is None or has_suffix(found[1]) or found[1].endswith(".safetensors"):
            return None
        if (found[2] and ".." in found[2]) or (found[3] and not is_safe(found[3])):
            return None
        named = found[3] is None or has_suffix(found[3])
        return cls(found[1], found[2], *((found[3], None) if named else (None, found[3])))

    def of_type(self, names: Iterable[str]) -> list[str]:
        """Return the GGUF files with this type in their name, as in `-Q4_K_M.` or `/Q4_K_M-`.

        If a model has the type, drafts and other files beside it do not count; if a plain file has
        it, dynamic mixes (`-UD-Q4_K_M.`) do not.
        """
        type = re.escape(self.type or "")
        word = re.compile(rf"(?<![A-Za-z0-9_]){type}(?![A-Za-z0-9_])", re.I)
        plain = re.compile(rf"(?<![A-Za-z0-9_])(?<!UD-){type}(?![A-Za-z0-9_])", re.I)
        found = [name for name in names if has_suffix(name) and word.search(name)]
        models = [name for name in found if holds_model(name) and not _DRAFT.fullmatch(name)]
        found = models or found
        return [name for name in found if plain.search(name)] or found

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


def holds_model(name: str) -> bool:
    """Return whether a GGUF file is a model or draft, not the vision part of one or an importance
    matrix, judged by its name."""
    return _NO_MODEL.fullmatch(name) is None


def is_remote(text: str | Path) -> bool:
    """True if `text` is a hub id and not an existing path, so that the hub is needed."""
    return HubId.parse(str(text)) is not None and not Path(text).exists()


def drafts(names: Iterable[str]) -> list[str]:
    """Return the files named as drafts beside a model; all files if none is, as in a repository of
    drafts alone."""
    listed = list(names)
    return [name for name in listed if _DRAFT.fullmatch(name)] or listed


def is_safe(name: str) -> bool:
    """True if a file name from the hub stays inside its folder on every operating system."""
    return all(_FILE.fullmatch(part) for part in name.split("/"))
