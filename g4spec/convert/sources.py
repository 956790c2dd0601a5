"""Detect what a user's path is: a checkpoint folder or a GGUF, and of which kind of model.

Detection reads the content; names of files do not matter.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from g4spec import models
from g4spec.convert import dialects, prequantized, quant_methods, safetensors
from g4spec.convert.dialects import Dialect
from g4spec.convert.hub_id import holds_model
from g4spec.convert.tensors import StoredTensor
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, parts, regular_files
from g4spec.models.spec import Checkpoint

MASK_ROW = "mask_embedding.pt"
"""File of some trainers next to config.json; it replaces the embedding of the mask token."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""Files of a LoRA adapter by PEFT."""
_ADAPTED = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")
WRAPPERS = ("module.", "base_model.model.")
"""Beginnings that trainers put before the names of all tensors: DDP and PEFT. `_orig_mod.` of
torch.compile may be at any place."""
UNSUPPORTED = {
    "lilicorrdraftmodel": "a LiLiCorr draft",
    "dominodraftmodel": "a Domino draft",
    "mtp": "a speculators MTP draft",
    "eagle": "an EAGLE draft",
    "dsparkdraftmodel": "a DSpark draft",
    "qwen3dsparkmodel": "a DSpark draft",
}
"""Recognized but unsupported kinds: speculators_model_type or architecture, lower case."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A safetensors checkpoint.

    Attributes:
        path: the folder.
        files: its safetensors files.
        config, generation: parsed config.json and generation_config.json.
        tensors: stored name -> tensor.
    """

    path: Path
    files: list[Path]
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def checkpoint(self) -> Checkpoint:
        """Configuration and shapes, as the modules of `models/` take them."""
        shapes = {name: (t.shape, t.dtype) for name, t in self.tensors.items()}
        return Checkpoint(self.config, shapes, self.generation)


@dataclass(frozen=True, slots=True)
class DetectedSource:
    """A source and the kind of model it holds. As a context manager it closes an open GGUF.

    Attributes:
        kind: the module in `models/`.
        source: a CheckpointFolder or an open GGUF.
        notes: remarks for the user about how the source was chosen.
        dialect: dialect of a GGUF that another program wrote; it must be rewritten before use.
    """

    kind: ModuleType
    source: CheckpointFolder | GGUF
    notes: list[str] = field(default_factory=list)
    dialect: Dialect | None = None

    def __enter__(self) -> DetectedSource:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(self.source, GGUF):
            self.source.close()

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def files(self) -> list[Path]:
        """Return the files with tensors: safetensors files, or all parts of the GGUF."""
        if isinstance(self.source, CheckpointFolder):
            return self.source.files
        return [part.path for part in self.source.parts]

    @property
    def is_target(self) -> bool:
        return self.kind.ARCH in models.TARGETS


def detect(path: str | Path, weights: bool = True, *, prefer_gguf: bool = False) -> DetectedSource:
    """Detect the source at `path`.

    Args:
        weights: require that a folder has weights.
        prefer_gguf: choose the GGUF in a folder that has a checkpoint and a GGUF (to run it). By
            default the checkpoint is chosen (to convert it): converters write their results next
            to it.

    Raises InputError if the source is not recognized, Unsupported if it is recognized but there
    is no code for it; both errors list what was found.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    notes: list[str] = []
    if path.is_dir():
        found = sorted(path.glob(parts.FILES))
        ggufs = parts.first_parts([p for p in found if holds_model(p.name)] or found)
        both = ggufs and (path / "config.json").exists() and any(path.glob("*.safetensors"))
        if both and not prefer_gguf:
            notes.append(f"{path} holds a checkpoint and GGUF files; took the checkpoint")
            return _detect_folder(_open_folder(path, weights=weights), notes)
        if len(ggufs) > 1:
            raise InputError(
                f"{path}: several GGUF files",
                found=[p.name for p in ggufs][:8],
                fix="name the one to use",
            )
        if not ggufs:
            return _detect_folder(_open_folder(path, weights=weights))
        if any(path.glob("*.safetensors")):
            notes.append(f"{path} holds a GGUF and safetensors; took {ggufs[0].name}")
        path = regular_files.check_link(ggufs[0])
    elif path.suffix == ".safetensors":
        return _detect_folder(_open_folder(path.parent, [path]))
    return _detect_gguf(GGUF(path), notes)


def conversion_command(folder: Path) -> str | None:
    """Return the command that converts a checkpoint folder, with a placeholder for the target of a
    draft; None if it is not a checkpoint."""
    try:
        with detect(folder, weights=False) as source:
            of_draft = "" if source.is_target else " --target TARGET"
    except InputError:
        return None
    out = shlex.quote(f"{folder.resolve().name}.gguf")
    return f"g4spec convert {shlex.quote(str(folder))}{of_draft} -o {out}"


def _open_folder(
    folder: Path, files: list[Path] | None = None, weights: bool = True
) -> CheckpointFolder:
    named = files is not None
    if not named and (folder / ADAPTER_CONFIG).exists():
        if not (folder / "config.json").exists():
            raise _adapter(folder, ADAPTER_CONFIG)
        if (folder / ADAPTER_WEIGHTS).exists():
            raise _adapter(folder, ADAPTER_WEIGHTS)
    files = files or (safetensors.files(folder) if weights else [])
    if not files and weights:
        safetensors.refuse_pickles(str(folder), [p.name for p in folder.iterdir()])
    missing = not named and not os.path.lexists(folder / "config.json")
    if missing and (fix := parts.folder_hint(folder)):
        raise InputError(f"{folder}: neither a checkpoint nor a GGUF file", fix=fix)
    config = safetensors.load_json(
        folder / "config.json", "the config.json of a checkpoint, or a GGUF file"
    )
    generation = folder / "generation_config.json"
    if not files and weights:
        raise InputError(f"{folder}: holds neither a GGUF nor safetensors files")
    stored = _unwrapped(safetensors.read_all(files))
    if adapted := [name for name in stored if _ADAPTED.search(name)]:
        raise _adapter(folder, adapted[0])
    tensors = prequantized.unpack(quant_methods.with_own_file(folder, config), stored)
    return CheckpointFolder(
        folder,
        files,
        config,
        safetensors.load_json(generation) if generation.exists() else {},
        tensors,
    )


def _adapter(folder: Path, found: str) -> Unsupported:
    return Unsupported(
        f"{folder}: a LoRA adapter that is not merged into its model",
        found=found,
        fix="merge it, for instance with `merge_and_unload` of PEFT, and convert what "
        "`save_pretrained` writes"
        + ("; if it is merged, remove its two files" if found == ADAPTER_WEIGHTS else ""),
    )


def _unwrapped(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return tensors by their names in the model, without what trainers put before them."""
    names = {name: name.replace("_orig_mod.", "") for name in tensors}
    while names and (
        found := [w for w in WRAPPERS if all(n.startswith(w) for n in names.values())]
    ):
        names = {name: inner.removeprefix(found[0]) for name, inner in names.items()}
    if len(set(names.values())) < len(names):
        return tensors
    return {names[name]: tensor for name, tensor in tensors.items()}


def _detect_folder(folder: CheckpointFolder, notes: Sequence[str] = ()) -> DetectedSource:
    checkpoint = folder.checkpoint
    claimed = [m for m in models.kinds().values() if m.claims(checkpoint)]
    if len(claimed) == 1:
        if (folder.path / MASK_ROW).exists() and claimed[0].ARCH not in models.TARGETS:
            raise Unsupported(
                f"{folder.path}: {MASK_ROW} holds a separate embedding of the mask token",
                found="a pickle, which may run code when it is opened",
                fix="write the row into embed_tokens.weight of the draft, and remove the file",
            )
        return DetectedSource(claimed[0], folder, list(notes))
    seen = _seen(folder)
    if claimed:
        raise InputError(
            f"{folder.path}: matches several kinds",
            expected="one kind",
            found=f"{[m.TITLE for m in claimed]} ({seen})",
        )
    raise _unknown(f"{folder.path}", _labels(folder.config), seen)


def _labels(config: Mapping[str, Any]) -> list[str]:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return [str(x) for x in (config.get("speculators_model_type"), *names) if x]


def _seen(folder: CheckpointFolder) -> str:
    names = sorted(folder.tensors)
    return (
        f"architectures {folder.config.get('architectures')}, "
        f"speculators_model_type {folder.config.get('speculators_model_type')}, "
        f"{len(names)} tensors such as {', '.join(names[:4])}"
    )


def _unknown(where: str, labels: list[str], seen: str) -> InputError:
    for label in labels:
        if label.lower() in UNSUPPORTED:
            return Unsupported(
                f"{where} is {UNSUPPORTED[label.lower()]} ({label}); "
                "this version has no code for it"
            )
    known = ", ".join(m.TITLE for m in models.kinds().values())
    return InputError(f"{where}: unknown kind of model", expected=f"one of {known}", found=seen)


def _detect_gguf(gguf: GGUF, notes: list[str]) -> DetectedSource:
    arch = gguf.get("general.architecture")
    dialect = dialects.recognise(arch, [*gguf, *gguf.tensors])
    kind = models.find_kind(arch, gguf.tensors)
    if models.ADAPTER in gguf or (kind is None and dialect is None):
        with gguf:
            models.refuse_other_files(gguf.path, gguf)
        raise _unknown(str(gguf.path), [str(arch)], f"architecture {arch!r}")
    if dialect is not None:
        return DetectedSource(models.kinds()[dialect.kind], gguf, notes, dialect)
    assert kind is not None
    return DetectedSource(kind, gguf, notes)
