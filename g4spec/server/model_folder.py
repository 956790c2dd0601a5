"""The models of a folder: targets with their drafts, and the state of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from g4spec import models, validate
from g4spec.errors import EnvironmentProblem, G4Error, InputError
from g4spec.gguf import GGUF, parts
from g4spec.runtime import target_file
from g4spec.server import server_info
from g4spec.server.remote_request import EngineLost
from g4spec.server.service import Service

log = logging.getLogger("g4spec.server")

Progress = Callable[[int, int], None]
"""Callback with bytes loaded and total bytes."""

Load = Callable[[list[str], Path, "Path | None", Progress], Service]
"""Loader of (names, target, draft). Raises EnvironmentProblem if memory is insufficient."""


@dataclass(slots=True)
class Model:
    """A target that can be loaded, and its state.

    Attributes:
        name: id of the model.
        target: GGUF of the target.
        drafts: drafts that fit, best first; those that fail validation are removed, those that
            cannot be read are kept.
        header: what the target's file says of it, for `meta` of /v1/models.
        created: modification time of the target when the folder was scanned.
        draft: the draft it was loaded with, or None.
        status: "unloaded", "loading" or "loaded".
        read: (bytes loaded, total bytes) while loading.
        n_requests: number of running requests.
        n_waiting: number of requests that wait until it is loaded.
        n_loads: how often it was loaded.
        n_promised: number of requests that waited for its load and have not begun. They begin
            even if it is to be unloaded.
        used: time of the last POST request (`time.monotonic`).
        n_unloads: how many callers wait to unload it, during which no request begins.
        problem: error of the last attempt to load it.
        loading: the task that loads it, or waits for room, or None.
        opening: True while it is being loaded, which cannot be cancelled.
        exit_stack: exit stack of its application.
    """

    name: str
    target: Path
    drafts: list[Path] = field(default_factory=list)
    created: int = 0
    header: dict[str, int | str] = field(default_factory=dict)
    draft: Path | None = None
    status: str = "unloaded"
    read: tuple[int, int] | None = None
    service: Service | None = None
    app: Starlette | None = None
    n_requests: int = 0
    n_waiting: int = 0
    n_loads: int = 0
    n_promised: int = 0
    used: float = 0.0
    n_unloads: int = 0
    problem: str | None = None
    loading: asyncio.Task[None] | None = None
    opening: bool = False
    exit_stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def unloading(self) -> bool:
        """True while it waits to be unloaded."""
        return self.n_unloads > 0

    @property
    def is_ready(self) -> bool:
        """True if a request may begin."""
        return self.status == "loaded" and not self.unloading

    @property
    def is_used(self) -> bool:
        """True while it must not be unloaded: texts without a client count, too."""
        n_open = self.service.open if self.service is not None else 0
        return self.n_requests > 0 or self.n_promised > 0 or n_open > 0

    def draft_note(self) -> str:
        """Return which draft the model uses, which others fit too, and how to choose one."""
        if not self.drafts:
            return f"{self.name}: no draft in the folder fits"
        first, *others = (path.name for path in self.drafts)
        if not others:
            return f"{self.name}: draft {first}"
        return (
            f"{self.name}: draft {first}; {', '.join(others)} {_verb(others)} too (to choose, keep "
            "only one of them in the folder, or use -m and -md)"
        )

    def json(self) -> dict[str, Any]:
        """Return its entry of /v1/models."""
        draft = self.draft
        if self.service is None and draft is None and self.drafts:
            draft = self.drafts[0]
        failed = self.service.engine.failed if self.service is not None else None
        status = "failed" if failed is not None else self.status
        problem = self.problem if failed is None else str(failed)
        details: dict[str, Any] = {"error": problem} if problem else {}
        if self.status == "loading" and self.read is not None:
            details = dict(zip(("bytes_read", "bytes"), self.read, strict=True))
        out: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "g4spec",
            "draft": draft.name if draft else None,
            "other_drafts": [path.name for path in self.drafts if path != draft],
            "status": {"value": status, **details},
            "architecture": server_info.ARCHITECTURE,
            "meta": {"vocab_type": server_info.VOCAB_TYPE, **self.header},
        }
        if self.service is not None:
            out["meta"] = server_info.meta(self.service.engine)
        return out


def _verb(drafts: list[str]) -> str:
    return "fits" if len(drafts) == 1 else "fit"


def _header(file: GGUF, arch: str) -> dict[str, int]:
    """Return the sizes in a target's header that /v1/models shows; without those that are missing
    or not numbers, which loading it reports."""
    table = file.tensors.get("token_embd.weight")
    found = {
        "n_ctx_train": file.kv.get(f"{arch}.context_length"),
        "n_vocab": table.shape[0] if table is not None and table.shape else None,
        "n_embd": file.kv.get(f"{arch}.embedding_length"),
    }
    return {name: n for name, n in found.items() if type(n) is int}


def find_models(
    folder: Path | None, note: Callable[[str], object] = lambda text: None
) -> list[Model]:
    """Return the targets in a folder and its subfolders, each with its matching drafts.

    A draft matches if the pair rules of `validate` find no error. Drafts with the fewest warnings
    come first, in the order of their names if several have as few; one converted for this very
    target has none.

    Args:
        note: called with a sentence about each file that is left out: a LoRA adapter, or one that
            cannot be read, as while it is being written.

    Raises:
        InputError: the folder does not exist or has no target.
        G4Error: it has none, and a file that is left out.
    """
    if folder is None or not folder.is_dir():
        raise InputError(f"{folder}: not a folder", expected="a folder of GGUF files")
    targets: dict[Path, dict[str, int | str]] = {}
    drafts, left_out = [], list[G4Error]()
    for path in parts.first_parts(
        sorted([*folder.glob(parts.FILES), *folder.glob(f"*/{parts.FILES}")])
    ):
        try:
            with GGUF(path) as file:
                arch = file.kv.get("general.architecture")
                kind = models.find_kind(arch, file.tensors)
                if kind is not None:
                    models.refuse_other_files(path, file.kv)
                if arch in models.TARGETS:
                    sizes = _header(file, str(arch))
                    targets[path] = {**sizes, **target_file.described(file)}
                elif kind is not None:
                    drafts.append(path)
        except G4Error as error:
            left_out.append(error)
    if left_out and not targets:
        raise left_out[0]
    for each in left_out:
        note(f"{each}; the file is left out")
    if not targets:
        raise InputError(
            f"{folder}: no target model in this folder",
            expected="at least one Gemma 4 GGUF",
            found=[path.name for path in drafts] or "none",
        )
    pairs = [name for name in validate.all_rules() if name.startswith("G4-PAIR-")]
    names: set[str] = set()
    out = []
    for path, header in targets.items():
        name = path.stem if path.stem not in names else f"{path.parent.name}/{path.stem}"
        names.add(name)
        reports = [validate.validate(draft, path, only=pairs) for draft in drafts]
        fitting = [report for report in reports if report.ok]
        fitting.sort(key=lambda report: (len(report.failures), report.path.name))
        created = int(path.stat().st_mtime)
        out.append(Model(name, path, [report.path for report in fitting], created, header))
    return out


def _is_valid(model: Model, draft: Path) -> bool:
    """Return whether a draft passes all rules; if not, remove it from those of its model, unless it
    cannot be read: it may come back."""
    facts = {"model": model.name, "draft": draft.name}
    try:
        if validate.validate(draft, model.target).ok:
            return True
    except InputError as error:
        log.warning("a draft cannot be read", extra={"facts": {**facts, "why": str(error)}})
        return False
    model.drafts.remove(draft)
    log.warning("a draft does not validate", extra={"facts": facts})
    return False


def open_model(model: Model, load: Load) -> Service:
    """Load a target with its first draft that passes all rules.

    Raises:
        G4Error: it cannot be loaded, or its process ended in the first step.
    """
    model.draft = next((draft for draft in [*model.drafts] if _is_valid(model, draft)), None)

    def progress(read: int, whole: int) -> None:
        model.read = read, whole

    service = load([model.name], model.target, model.draft, progress)
    try:
        service.warm_up()
    except BaseException as error:
        service.engine.close()  # otherwise it would keep its memory until the server ends
        if isinstance(error, EngineLost):
            raise EnvironmentProblem("the engine failed in its first step", found=error) from None
        raise
    return service
