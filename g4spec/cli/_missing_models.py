"""The error for a model that is neither a file nor a hub id, with what was probably meant."""

from __future__ import annotations

import os
import re
from pathlib import Path

from g4spec.errors import InputError, similar_files, unexpanded

CHECK = "check the path, or give a hub id such as org/name:Q4_K_M to download a model"

_PAGE = re.compile(  # a path has one slash where an address has two
    r"(?:https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/+)([^/?#@:]+/[^/?#@:]+)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]+\.gguf))?)?"
)


def check(path: Path) -> None:
    """Raise InputError for a path that does not exist and cannot be a hub id."""
    if path.exists():
        return
    from g4spec.convert import hub_id

    if not hub_id.is_remote(path):
        raise error(path)


def error(path: Path) -> InputError:
    """Return the error for a path that does not exist, or is a link to nothing or in a circle.

    Names a similar file of the same folder, or the hub id of a size or draft that `doctor` and
    `recipe` know by this name.
    """
    if path.is_symlink():
        return InputError(
            f"{path}: a symbolic link that leads to no file",
            found=f"a link to {os.readlink(path)}",
            fix="correct the link",
        )
    if re.match("(https?|hf):/", str(path)):
        return _address(str(path))
    similar = similar_files(path)
    if path.name.lower().replace("-", "").replace("_", "") == "ngram":
        similar = "for n-gram lookup write -md ngram"
    return InputError(
        f"{path}: no such file or folder",
        expected="a GGUF file, a checkpoint folder, or a hub id such as org/name",
        fix=unexpanded(path) or similar or _published(str(path)) or CHECK,
    )


def _address(text: str) -> InputError:
    """Return the error for an address; the fix is the hub id, if it is one of a page of the hub."""
    page, fix = _PAGE.match(text), "download the file, and give its path"
    if page is not None:
        revision = f"@{page[2]}" if page[2] not in (None, "main") else ""
        fix = f"give the hub id: {page[1]}{revision}{f':{page[3]}' if page[3] else ''}"
    return InputError("an address is not a model", expected="a path or a hub id", fix=fix)


def _published(name: str) -> str | None:
    """Return a fix for the short name of a published model; None for another text."""
    from g4spec.advisor import named_models
    from g4spec.advisor.facts import facts
    from g4spec.advisor.schema import DraftFact

    if "/" in name or name.lower().endswith(".gguf"):
        return None
    drafts = [d.hub for d in facts().all(DraftFact) if d.hub and name in (d.id, *d.aliases)]
    if drafts:
        return f"to download this draft, give its hub id: {' or '.join(drafts)}"
    size = named_models.find_size(facts(), name)
    if size is None:
        return None
    out = f"{size.hub.rpartition('/')[2]}.gguf"
    return f"to download and convert Gemma 4 {size.name}: g4spec convert {size.hub} -o {out}"
