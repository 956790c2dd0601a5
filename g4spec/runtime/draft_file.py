"""Open a draft file, check it against the options, and load it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec import models
from g4spec.backend import Backend
from g4spec.core import CacheShape, Draft
from g4spec.errors import InputError, UsageError
from g4spec.gguf import GGUF
from g4spec.models.spec import TensorSpec, check_heads
from g4spec.runtime import load_options, loading
from g4spec.runtime.target import Target


class DraftFile:
    """A draft file with its parsed configuration.

    Attributes:
        drafts: False without a draft.
        file: None without a draft and for n-gram lookup, which needs no file.
        notes: remarks to show with every run.
    """

    def __init__(
        self, draft: Path | str | None, p_min: float | None = None, window: int | None = None
    ) -> None:
        load_options.check_draft(p_min, window, draft not in (None, "ngram"))
        self.window, self.drafts = window, draft is not None
        self.notes: list[str] = []
        self.file = GGUF(Path(draft)) if draft not in (None, "ngram") else None
        if self.file is None:
            return
        try:
            self._read(self.file, p_min)
        except BaseException:
            self.file.close()
            raise

    def _read(self, file: GGUF, p_min: float | None) -> None:
        models.refuse_other_files(file.path, file)
        arch = file.kv.get("general.architecture")
        self.kind = models.find_kind(arch, file.tensors)
        if self.kind is not None and arch in models.TARGETS:
            raise models.wrong_role(file.path, self.kind)
        if self.kind is None:
            raise InputError(
                f"{file.path}: not a draft this version knows",
                expected=" or ".join(models.drafts()),
                found=f"architecture {arch!r}",
                fix="convert it with `g4spec convert`",
            )
        self.config: Any = self.kind.parse_gguf(file.kv, file.shapes())
        check_heads(self.config.layers)
        loading.check_rotation(file, self.config.layers)
        if (remarks := getattr(self.kind, "file_notes", None)) is not None:
            self.notes += remarks(file)
        caches, window = self.kind.caches, self.window
        if window is not None and caches(self.config, window) == caches(self.config, None):
            raise UsageError(
                "`draft_window` has no effect: this draft has no full-context KV cache to limit",
                fix="omit `draft_window`",
            )
        if p_min:
            models.require_confidence(file.path, self.kind, file.tensors)
        if p_min is not None and hasattr(self.config, "p_min"):
            self.config = replace(self.config, p_min=p_min)

    def __enter__(self) -> DraftFile:
        return self

    def __exit__(self, *args: object) -> None:
        if self.file is not None:
            self.file.close()

    @property
    def n_taps(self) -> int:
        """Number of target layers that the draft reads."""
        return len(getattr(self.config, "target_layers", ())) if self.file is not None else 0

    def shapes(self) -> list[CacheShape]:
        """Shapes of the draft's own caches."""
        return list(self.kind.caches(self.config, self.window)) if self.file and self.kind else []

    def check(self, n_vocab: int) -> list[TensorSpec]:
        """Return the tensors of the file. Raise InputError unless they are those of its kind and
        all token ids in the file are below `n_vocab`."""
        assert self.file is not None and self.kind is not None
        for name, ids in self.kind.token_ids(self.config, self.file).items():
            loading.check_ids(self.file, name, ids, n_vocab)
        specs = list(self.kind.tensors(self.config))
        return loading.check_draft_weights(self.file, specs, n_vocab)

    def build(self, backend: Backend, target: Target) -> Draft:
        """Load the weights and create the draft. It shares the slots and pages of `target`."""
        assert self.file is not None and self.kind is not None
        # Check before allocating: the metadata may claim sizes that the file does not have.
        present = self.check(target.config.n_vocab)
        ring_slack = backend.ring_slack(target.chunk)
        caches = [backend.cache(shape, target.space, ring_slack) for shape in self.shapes()]
        weights = loading.load_weights(self.file, present, backend)
        draft: Draft = self.kind.Drafter(
            self.config,
            weights,
            backend.ops,
            target,
            self.file,
            caches,
            target.n_states,
            self.window,
        )
        return draft
