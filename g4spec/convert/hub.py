"""Download models from the Hugging Face hub by id (`hub_id`).

Downloads use huggingface_hub with its cache, token, resumption and settings (HF_HUB_OFFLINE,
HF_ENDPOINT, HF_HUB_DOWNLOAD_TIMEOUT). Only the files that are needed are downloaded.
Nothing that the hub sends is trusted: `transfer.TransferGuard` checks headers, sizes and times
before anything is written, and each downloaded file is checked against its digest.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from g4spec.convert import hub_settings, quant_methods, safetensors
from g4spec.convert.hub_digest import check_digest
from g4spec.convert.hub_id import HubId, drafts, holds_model, is_safe
from g4spec.convert.provenance import SMALL
from g4spec.convert.transfer import TransferGuard
from g4spec.errors import EnvironmentProblem, G4Error, InputError
from g4spec.gguf import regular_files
from g4spec.gguf.atomic import atomic_write
from g4spec.gguf.parts import FILES, has_suffix, model_name

Purpose = Literal["any", "draft", "tokenizer", "gguf"]
"""Files needed: a checkpoint or GGUF, that of a draft, a target's tokenizer and configuration, or a
GGUF to run."""

T = TypeVar("T")
INDEX = ".safetensors.index.json"
MAX_LISTING_BYTES = 16 << 20
"""Maximum size of the list of a repository's files in bytes."""
TRIES = 3
TRANSIENT = {408, 429, 500, 502, 503, 504}

Choose = Callable[[HubId, Mapping[str, int]], str | None]
"""Returns one of the GGUF files of a repository, given as name -> bytes (of a split model the first
part and the bytes of all parts), or None if it cannot tell."""


def resolve(
    text: str | Path, purpose: Purpose = "any", choose: Choose | None = None
) -> tuple[Path, list[str]]:
    """Return the local path of a path or hub id, and notes for the user.

    An existing path has precedence over a hub id. Text that is neither is returned unchanged.
    `choose`: chooses one of several GGUF files; without it they are an error.

    Raises InputError or EnvironmentProblem if the download fails, UsageError for a malformed
    setting or token of huggingface_hub.
    """
    name = str(text)
    found, path = HubId.parse(name), Path(name)
    if found is None:
        return path, []
    if path.exists():
        return path, [f"{name} is a local path; the hub was not asked"]
    downloaded = fetch(found, purpose, choose)
    return downloaded, [f"{name}: took {downloaded} from the hub"]


def fetch(id: HubId, purpose: Purpose = "any", choose: Choose | None = None) -> Path:
    """Download the files needed for `purpose`; return the file or the folder of the snapshot."""
    return _Hub(id, choose).fetch(purpose)


class _Hub:
    def __init__(self, id: HubId, choose: Choose | None) -> None:
        hub_settings.check_settings()
        import huggingface_hub as hf
        from huggingface_hub import constants, errors
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            hub_settings.check_token(Path(constants.HF_TOKEN_PATH))
        self.id, self.hf, self.errors, self.constants = id, hf, errors, constants
        self.choose = choose
        self.cache = Path(os.path.abspath(constants.HF_HUB_CACHE))
        # Base class of the transport's errors; it differs between versions of huggingface_hub.
        self.transport: type[Exception] = errors.HfHubHTTPError.__mro__[1]
        if not sys.stderr.isatty():
            disable_progress_bars()

    def fetch(self, purpose: Purpose) -> Path:
        if self.constants.HF_HUB_OFFLINE:
            return self._offline(purpose)
        revision, names = self._list()
        if self.id.file:
            if self.id.file not in names:
                raise InputError(
                    f"{self.id} has no file {self.id.file}",
                    found=_shown(n for n in names if has_suffix(n)),
                )
            parts = [n for n in names if model_name(n) == model_name(self.id.file)]
            found = {name: self._get(name, revision) for name in parts}
            self._remember(found[self.id.file], revision)
            return found[self.id.file]
        chosen = self._needed(names, purpose, revision)
        if "config.json" in chosen and purpose != "tokenizer":
            self._check_quantization(chosen, revision)
        paths = [self._get(name, revision) for name in chosen]
        self._remember(paths[0], revision)
        return paths[0] if has_suffix(chosen[0]) else paths[0].parent

    def _list(self) -> tuple[str, dict[str, int]]:
        """Return the commit of the revision, and its files: name -> bytes, 0 if not given."""
        api = self.hf.HfApi(endpoint=hub_settings.endpoint())
        timeout = float(self.constants.HF_HUB_ETAG_TIMEOUT)
        try:
            info = self._call(
                lambda: api.model_info(
                    self.id.repo,
                    revision=self.id.revision,
                    timeout=timeout,
                    files_metadata=self.choose is not None,
                ),
                lambda: TransferGuard(self._what, MAX_LISTING_BYTES),
            )
            files = {s.rfilename: s.size for s in info.siblings or []}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise InputError(
                f"{self.id}: malformed answer of the hub", found=f"{type(e).__name__}: {e}"
            ) from e
        if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
            raise InputError(f"{self.id}: no commit in the hub's answer", found=f"{info.sha!r:.80}")
        return str(info.sha), {
            name: size if isinstance(size, int) else 0
            for name, size in files.items()
            if isinstance(name, str) and is_safe(name)
        }

    def _check_quantization(self, chosen: Iterable[str], revision: str) -> None:
        """Raise Unsupported for weights that cannot be read, before they are downloaded."""
        path = self._get("config.json", revision)
        if quant_methods.OWN_FILE in chosen:
            self._get(quant_methods.OWN_FILE, revision)
        config = safetensors.load_json(path)
        quant_methods.settings(quant_methods.with_own_file(path.parent, config))

    def _needed(self, names: Mapping[str, int], purpose: Purpose, revision: str) -> list[str]:
        """Return the files to download; the first one is the model or is in its folder."""
        top = [n for n in names if "/" not in n]
        small = [n for n in SMALL if n in top]
        tensors = sorted(n for n in top if n.endswith(".safetensors"))
        ggufs = sorted(n for n in names if has_suffix(n) and holds_model(n))
        if purpose == "draft":
            ggufs = drafts(ggufs)
        if self.id.type:
            return self._of_type(ggufs)
        if purpose == "gguf" or not (
            tensors or (purpose == "tokenizer" and "tokenizer.json" in top)
        ):
            parts = self._one_model({name: names[name] for name in ggufs})
            return parts or self._no_gguf(ggufs, names, bool(tensors))
        if "config.json" not in small:
            raise InputError(f"{self.id} has no config.json", found=_shown(names))
        if purpose == "tokenizer":
            return small
        small += [n for n in top if n == quant_methods.OWN_FILE]
        indexes = sorted(n for n in top if n.endswith(INDEX))
        if indexes:
            index = self._get(indexes[0], revision)
            shards = sorted(set(safetensors.weight_map(index).values()))
            missing = [s for s in shards if s not in top]
            if missing:
                raise InputError(
                    f"{self.id}: shards named in its index are missing", found=_shown(missing)
                )
            return [*small, indexes[0], *shards]
        return [*small, *(["model.safetensors"] if "model.safetensors" in tensors else tensors)]

    def _one_model(self, ggufs: Mapping[str, int]) -> list[str]:
        """Return all parts of the only model among files (name -> bytes), or of the chosen one; []
        if there are several and none was chosen."""
        models: dict[str, list[str]] = {}
        for name in sorted(ggufs):
            models.setdefault(model_name(name), []).append(name)
        if len(models) == 1:
            return next(iter(models.values()))
        sizes = {parts[0]: sum(ggufs[p] for p in parts) for parts in models.values()}
        chosen = self.choose(self.id, sizes) if self.choose is not None and models else None
        return models[model_name(chosen)] if chosen is not None else []

    def _of_type(self, ggufs: Iterable[str]) -> list[str]:
        """Return the only file of the requested type, or all parts of it."""
        found = self.id.of_type(ggufs)
        if len({model_name(name) for name in found}) != 1:
            named = found or list(ggufs) or ["FILE.gguf"]
            raise InputError(
                f"{self._what}: no single GGUF file has that type in its name",
                found=_shown(found or ggufs),
                fix=f"name one, as {self.id}:{named[0]}",
            )
        return found

    def _no_gguf(self, ggufs: list[str], names: Iterable[str], tensors: bool) -> NoReturn:
        if ggufs:
            raise InputError(
                f"{self.id} has {len(ggufs)} GGUF files",
                found=_shown(ggufs),
                fix=f"name one, as {self.id}:{ggufs[0]}",
            )
        if tensors:
            raise InputError(
                f"{self.id} has no GGUF file",
                found="a safetensors checkpoint",
                fix=f"convert it first: `g4spec convert {self.id} -o NAME.gguf`; a draft also "
                "needs `--target TARGET`",
            )
        safetensors.refuse_pickles(str(self.id), names)
        raise InputError(f"{self.id} has neither safetensors nor GGUF files", found=_shown(names))

    def _get(self, name: str, revision: str) -> Path:
        """Return the path of one file of a commit, from the cache or downloaded and checked."""
        options: dict[str, Any] = {"revision": revision, "cache_dir": self.cache}
        cached = self.hf.try_to_load_from_cache(self.id.repo, name, **options)
        guards: list[TransferGuard] = []

        def guarded() -> TransferGuard:
            guards.append(self._guard(name, revision))
            return guards[-1]

        path = Path(
            self._call(
                lambda: self.hf.hf_hub_download(
                    self.id.repo, name, endpoint=hub_settings.endpoint(), **options
                ),
                guarded,
            )
        )
        if self.cache.resolve() not in path.resolve().parents:
            raise InputError(f"{self.id}: {name} is outside the cache", found=path.resolve())
        if not isinstance(cached, str):
            check_digest(path, guards[-1].digest, f"{self.id}: {name}")
        return path

    def _guard(self, name: str, revision: str) -> TransferGuard:
        """Return the limits of a download: MAX_READ_BYTES for files that are read at once, the
        free disk space for all others."""
        whole = name in (*SMALL, quant_methods.OWN_FILE) or name.endswith(INDEX)
        existing = next(p for p in (self.cache, *self.cache.parents) if p.exists())
        limit = regular_files.MAX_READ_BYTES if whole else shutil.disk_usage(existing).free
        # The Xet client ignores these limits, so it is only allowed for the official hub.
        official = hub_settings.endpoint() == hub_settings.HOME
        return TransferGuard(
            f"{self.id}: {name}", limit, disk=not whole, commit=revision, xet=official
        )

    def _remember(self, path: Path, revision: str) -> None:
        """Record the commit of a branch or tag in the cache, so that it can be used offline."""
        name = self.id.revision or "main"
        if name != revision:
            storage = path.relative_to(self.cache).parts[0]  # of this repository
            reference = self.cache / storage / "refs" / name
            with atomic_write(reference, len(revision)) as file:
                file.write(revision.encode())

    def _offline(self, purpose: Purpose) -> Path:
        """Return the files from the cache, without network access."""
        options: dict[str, Any] = {"revision": self.id.revision, "cache_dir": self.cache}
        options["local_files_only"] = True
        try:
            if self.id.file:
                return Path(self.hf.hf_hub_download(self.id.repo, self.id.file, **options))
            folder = Path(self.hf.snapshot_download(self.id.repo, **options))
        except (self.errors.LocalEntryNotFoundError, self.errors.HFValidationError) as e:
            raise EnvironmentProblem(
                f"{self._what} is not in the cache, and HF_HUB_OFFLINE is set",
                fix="unset HF_HUB_OFFLINE to download",
            ) from e
        found = (str(p.relative_to(folder)) for p in folder.rglob(FILES))
        names = sorted(name for name in found if holds_model(name))
        names = drafts(names) if purpose == "draft" else names
        if self.id.type:
            return folder / self._of_type(names)[0]
        if any(folder.glob("*.safetensors")):
            return folder
        top = [name for name in names if purpose == "draft" or Path(name).name == name]
        parts = self._one_model({name: (folder / name).stat().st_size for name in top})
        return folder / parts[0] if parts else folder

    @property
    def _what(self) -> str:
        part = self.id.file or self.id.type
        return f"{self.id}:{part}" if part else str(self.id)

    def _call(self, call: Callable[[], T], guarded: Callable[[], TransferGuard]) -> T:
        """Return `call()`; try up to TRIES times while errors are transient."""
        for attempt in range(TRIES):
            guard = guarded()
            try:
                with guard:
                    return call()
            except (ValueError, self.transport, OSError) as e:
                if guard.expired:
                    raise guard.timeout_error() from e
                if attempt == TRIES - 1 or not self._is_transient(e):
                    raise self._explain(e) from e
                time.sleep(0.5 * 2**attempt)
        raise AssertionError

    def _is_transient(self, error: BaseException) -> bool:
        """True if the same request may succeed a moment later."""
        status = _status(error)
        if isinstance(error, self.errors.LocalEntryNotFoundError) and error.__cause__:
            return self._is_transient(error.__cause__)
        if status is not None:
            return status in TRANSIENT
        local_error = isinstance(error, OSError) and error.errno is not None
        return not local_error and not isinstance(
            error, (self.errors.OfflineModeIsEnabled, ValueError)
        )

    def _explain(self, error: BaseException) -> G4Error:
        """Turn an exception of huggingface_hub into an error of one line with a fix."""
        errors, what = self.errors, self._what
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
            return self._explain(error.__cause__)
        nowhere = f"{what}: no such file or folder here, and"
        page = f"{self.constants.ENDPOINT}/{self.id.repo}"
        for kind, text, fix in (
            (
                errors.GatedRepoError,
                f"{what} is gated",
                f"accept its licence at {page} and set HF_TOKEN to your token",
            ),
            (
                errors.RevisionNotFoundError,
                f"{self.id.repo} has no revision {self.id.revision!r}",
                "name a branch, a tag or a commit",
            ),
            (errors.EntryNotFoundError, f"{what}: a listed file is missing on the hub", None),
            (
                errors.RepositoryNotFoundError,
                f"{nowhere} no such repository on the hub",
                "if it is private, set HF_TOKEN",
            ),
            (errors.HFValidationError, f"{nowhere} not a valid hub id", None),
            (ValueError, f"{what}: malformed answer of the hub ({error!s:.200})", None),
        ):
            if isinstance(error, kind):
                return InputError(text, fix=fix)
        status = _status(error)
        if status in (401, 403):
            return InputError(
                f"{what}: the hub refuses access ({status})",
                fix="set HF_TOKEN to a token that may read it",
            )
        if status is not None:
            return EnvironmentProblem(f"{what}: the hub answered {status}", fix="try again later")
        if isinstance(error, OSError) and error.filename is not None:
            return EnvironmentProblem(f"{what}: cannot write {error.filename}: {error.strerror}")
        return self._unreachable(error, nowhere)

    def _unreachable(self, error: BaseException, nowhere: str) -> G4Error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return EnvironmentProblem(
                f"{self._what}: no space left in {self.cache}",
                fix="free disk space, or set HF_HUB_CACHE",
            )
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return EnvironmentProblem(
            f"{nowhere} the hub cannot be reached",
            found=found,
            fix="check the network and run the command again; downloads are resumed",
        )


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) and status >= 400 else None


def _shown(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "") or "nothing"
