"""The file to validate, as rules access it. Getters return None for missing or malformed values
instead of raising."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from g4spec import models
from g4spec.convert import expected_metadata, provenance
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, ValueType, parts
from g4spec.models.spec import TensorSpec
from g4spec.validate import header, scan
from g4spec.validate.needs import NO_SOURCE, NO_TARGET, OTHER_SOURCE, Needs

if TYPE_CHECKING:
    from g4spec.validate.compare import Comparison

Progress = Callable[[int, int], None]


class Subject:
    """One GGUF file to validate, with the optional target and source to compare it with.

    Attributes:
        header: the header, read by the tolerant parser.
        headers: headers of all parts of a split model, the file's own first.
        split_refusal: why other parts were not found, or "".
        file: the open file, or None if the strict reader refused it (`refusal` says why).
        unsupported: the feature of a valid file that this version does not support, or "".
        arch, kind: its architecture and the module of its kind, or None.
        config: parsed configuration, or None (`config_refusal` says why).
    """

    def __init__(
        self,
        path: Path,
        *,
        target: Subject | None = None,
        source: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path, self.target, self.source, self.progress = path, target, source, progress
        self.header = header.read(path)
        self.headers, self.split_refusal = [self.header], ""
        self.file: GGUF | None = None
        self.refusal = self.config_refusal = self.unsupported = ""
        self.config: Any = None
        self._find_parts()
        self.arch = self.header.text("general.architecture")
        self.kind: ModuleType | None = models.find_kind(self.arch, self.entries)

    def _find_parts(self) -> None:
        values = {k.name: k.value for k in self.header.keys}
        if values.get(parts.COUNT, 1) in (0, 1):
            return
        try:
            self.headers += [header.read(p) for p in parts.part_paths(self.path, values)[1:]]
        except InputError as error:
            self.split_refusal = str(error)

    def open(self) -> None:
        """Open the container with the strict reader."""
        try:
            self.file = GGUF(self.path)
        except InputError as error:
            self.refusal = str(error)

    def configure(self) -> None:
        """Parse the configuration of an open file of a known kind."""
        if self.file is None or self.kind is None:
            return
        try:
            self.config = self.kind.parse_gguf(self.file.kv, self.file.shapes())
        except Unsupported as error:
            self.unsupported = str(error)
        except InputError as error:
            self.config_refusal = str(error)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def missing(self, needs: Needs) -> str | None:
        """Return why a rule with these needs cannot run, or None if it can."""
        if needs >= Needs.FILE and self.file is None:
            return "the container is broken"
        if needs == Needs.CONVERSION:
            return self._cannot_convert()
        if needs >= Needs.CONFIG and self.config is None:
            return "the metadata does not describe a known model"
        if needs == Needs.TARGET and (self.target is None or self.target.config is None):
            return NO_TARGET
        return self._source_missing(needs) if needs >= Needs.SOURCE else None

    def _source_missing(self, needs: Needs) -> str | None:
        """Return why a rule that compares with the source cannot run, or None if it can."""
        if self.source is None:
            return NO_SOURCE
        if needs == Needs.OWN_SOURCE and self.comparison.other:
            return OTHER_SOURCE
        return None

    def _cannot_convert(self) -> str | None:
        """Return why the source cannot be converted again for comparison, or None if it can."""
        if self.source is None:
            return NO_SOURCE
        if self.kind is None:
            return "the architecture is not known"
        if self.arch not in models.TARGETS and self.target is None:
            return NO_TARGET
        if self.config is not None and self.comparison.other:
            return OTHER_SOURCE
        return None

    @property
    def open_file(self) -> GGUF:
        assert self.file is not None
        return self.file

    def name(self, key: str) -> str:
        """Return the full name of a key: the architecture is put before one that begins with a
        dot."""
        return f"{self.arch}{key}" if key.startswith(".") else key

    def has(self, key: str) -> bool:
        return self.name(key) in self.keys

    @cached_property
    def keys(self) -> Mapping[str, header.Key]:
        """Metadata keys by name, as the header declares them."""
        return {k.name: k for k in self.header.keys}

    @property
    def its_target(self) -> Subject:
        """The target, for rules that need one (`Needs.TARGET`)."""
        assert self.target is not None
        return self.target

    def number(self, key: str) -> int | float | None:
        """Return the scalar number `key`, or None."""
        entry = self.keys.get(self.name(key))
        value = entry.value if entry is not None else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def integer(self, key: str) -> int | None:
        value = self.number(key)
        return value if isinstance(value, int) else None

    def flag(self, key: str) -> bool | None:
        entry = self.keys.get(self.name(key))
        return entry.value if entry is not None and isinstance(entry.value, bool) else None

    def text(self, key: str) -> str | None:
        entry = self.keys.get(self.name(key))
        return entry.value if entry is not None and isinstance(entry.value, str) else None

    def numbers(self, key: str) -> NDArray[Any] | None:
        """Return the array of numbers or booleans `key`, or None."""
        entry = self.keys.get(self.name(key))
        if (
            entry is None
            or entry.type is not ValueType.ARRAY
            or entry.item in (ValueType.STRING, None)
        ):
            return None
        return np.asarray(self.open_file.number_array(entry.name))

    def strings(self, key: str) -> list[str] | None:
        """Return the array of strings `key`; None also if it is not UTF-8 (see G4-GGUF-016)."""
        entry = self.keys.get(self.name(key))
        if entry is None or entry.item is not ValueType.STRING:
            return None
        try:
            found: list[str] = self.open_file.kv[entry.name]
        except InputError:
            return None
        return found

    def count(self, key: str) -> int | None:
        """Return the length of the array `key`, or None."""
        entry = self.keys.get(self.name(key))
        return entry.count if entry is not None and entry.type is ValueType.ARRAY else None

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        info = self.open_file.tensors.get(tensor)
        return info.shape if info is not None else None

    def type_name(self, tensor: str) -> str | None:
        info = self.open_file.tensors.get(tensor)
        return info.format.name.upper() if info is not None else None

    @cached_property
    def entries(self) -> Mapping[str, header.Tensor]:
        """Tensor entries by name, as the header declares them."""
        return {t.name: t for part in self.headers for t in part.tensors}

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors that a file of this configuration must have, by name."""
        assert self.kind is not None
        return {spec.name: spec for spec in self.kind.tensors(self.config)}

    @cached_property
    def d2t(self) -> NDArray[np.int64] | None:
        """Row of the draft's head -> target token id; None if missing or of a wrong type."""
        if self.type_name("d2t") not in ("I64", "I32"):
            return None
        return np.asarray(self.open_file.array("d2t")).reshape(-1).astype(np.int64)

    @cached_property
    def n_vocab(self) -> int | None:
        """Vocabulary size of the target, or the length of the file's token list without a
        target."""
        if self.target is not None and self.target.config is not None:
            return int(self.target.config.n_vocab)
        return self.count("tokenizer.ggml.tokens")

    @cached_property
    def n_target_layers(self) -> int | None:
        """Number of target layers, or the number recorded at conversion without a target."""
        if self.target is not None and self.target.config is not None:
            return len(self.target.config.layers)
        return self.integer(provenance.TARGET_LAYERS)

    @cached_property
    def stats(self) -> dict[str, scan.Stats]:
        """Statistics of every tensor, from one pass over the data."""
        return scan.scan(self.open_file, self.progress)

    @cached_property
    def conversion(self) -> expected_metadata.ExpectedMetadata:
        """The metadata that converting the source would write."""
        assert self.source is not None and self.kind is not None
        return expected_metadata.from_source(
            self.source, self.kind, self.target.file if self.target is not None else None
        )

    @cached_property
    def comparison(self) -> Comparison:
        """Comparison of every tensor with the source checkpoint."""
        from g4spec.validate import compare

        assert self.source is not None
        return compare.compare(self)
