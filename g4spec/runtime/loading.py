"""Loads the tensors of a target or a draft after checking them against the list of its kind.

A file may claim anything. Whatever is used must be present, have the right shape and be in range
before the first kernel sees it: a bad file is an InputError at load, never a crash later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.backend import Backend
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.models.spec import LayerSpec, TensorSpec, factors_name

ROPE = "rope_freqs.weight"
UNROTATED = 1e29
"""Divisors from this one on make the angle zero; converters write 1e30."""
INPUT_SCALE = "input_scale"
"""Ending of a tensor with which llama.cpp rounds the input of NVFP4 weights. It may be ignored:
inputs are not rounded here."""


def nvfp4_factors(file: GGUF, names: Collection[str]) -> dict[str, TensorSpec]:
    """Return the tensors by which llama.cpp multiplies NVFP4 weights, a factor for each matrix, by
    the names of these weights.

    Args:
        names: those of a kind's own tensors. Some have such factors in all files, of any type.
    """
    found = {}
    for weight in names:
        info, name = file.tensors.get(weight), factors_name(weight)
        if info and info.format.name == "nvfp4" and name in file.tensors and name not in names:
            found[weight] = TensorSpec(name, info.shape[:-2] or (1,), "vector", None)
    return found


def unknown_tensors(file: GGUF, names: Collection[str]) -> list[str]:
    """Return the names of tensors that are neither a kind's own nor belong to its NVFP4 weights."""
    known = {*names, *(spec.name for spec in nvfp4_factors(file, names).values())}
    known |= {f"{name.removesuffix('weight')}{INPUT_SCALE}" for name in names}
    return [name for name in file.tensors if name not in known]


def scaled_array(file: GGUF, name: str, factors: NDArray[np.float32] | None) -> NDArray[Any]:
    """Return a tensor as numbers; the values of matrix i of several are multiplied by `factors`
    [i]."""
    array = file.array(name)
    if factors is None:
        return array
    return array * factors.reshape(-1, *[1] * (array.ndim - 1))


def load_weights(
    file: GGUF,
    present: Sequence[TensorSpec],
    backend: Backend,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Load tensors by name.

    Args:
        present: tensors to load, as `check_weights` returned them.
        progress: called with the bytes loaded so far, and in total.
    """
    out, done = {}, 0
    factors = nvfp4_factors(file, {spec.name for spec in present})
    total = sum(file.tensors[spec.name].nbytes for spec in present)
    for spec in present:
        by = factors.get(spec.name)
        out[spec.name] = backend.load(file, spec.name, None if by is None else file.array(by.name))
        done += file.tensors[spec.name].nbytes
        if progress is not None:
            progress(done, total)
    return out


def check_weights(file: GGUF, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return those of a kind's tensors that the file has.

    Raises:
        InputError: a tensor that is required is missing, or one has another shape or type or is a
            vector with NaN or infinite values.
        Unsupported: the file has a bias, or a factor of a type other than NVFP4, for one of the
            weights.
    """
    known = {spec.name for spec in specs}
    for name in unknown_tensors(file, known):
        weight = f"{name.rpartition('.')[0]}.weight"
        if weight in known:
            raise Unsupported(
                f"{file.path}: tensor {name} changes what {weight} computes; this version has no "
                "code for it",
                fix="use a file without it: only weights of type NVFP4 may have a scale",
            )
    for spec in nvfp4_factors(file, known).values():
        _usable(file, spec)
    return [spec for spec in specs if _usable(file, spec)]


def _usable(file: GGUF, spec: TensorSpec) -> bool:
    """Return whether the file has a tensor. Raise InputError if it is unusable, or missing but
    required."""
    info = file.tensors.get(spec.name)
    if info is None:
        if spec.optional:
            return False
        raise InputError(
            f"{file.path}: tensor {spec.name} is missing",
            expected=f"shape {list(spec.shape)}",
            fix="convert it again with `g4spec convert`",
        )
    if info.shape != spec.shape:
        raise InputError(
            f"{file.path}: tensor {spec.name}: shape",
            expected=list(spec.shape),
            found=list(info.shape),
            fix="convert it again with `g4spec convert`",
        )
    _check_type(file, spec)
    return True


def _check_type(file: GGUF, spec: TensorSpec) -> None:
    """Raise InputError unless index tensors are integers, other tensors real, and vectors
    finite."""
    info = file.tensors[spec.name]
    if info.format.integer != (spec.role == "index"):
        kind = "integers" if spec.role == "index" else "real numbers"
        raise InputError(
            f"{file.path}: tensor {spec.name}: type", expected=kind, found=info.format.name
        )
    if spec.role == "vector" and not bool(np.isfinite(file.array(spec.name)).all()):
        raise InputError(
            f"{file.path}: tensor {spec.name} holds values that are not finite",
            fix="run `g4spec validate` on the file",
        )


def check_rotation(file: GGUF, layers: Sequence[LayerSpec]) -> None:
    """Raise InputError unless the divisors of RoPE angles in the file, by which llama.cpp rotates,
    rotate the pairs that `layers` rotate here: without a key of ours, the first quarter."""
    info = file.tensors.get(ROPE)
    full = [s for s in layers if s.window is None] or layers
    if info is None or info.format.name != "f32" or info.shape != (full[0].head_dim // 2,):
        return
    divisors, n = file.array(ROPE), full[0].rotary_pairs
    if not ((divisors[:n] == 1).all() and (divisors[n:] >= UNROTATED).all()):
        raise InputError(
            f"{file.path}: {ROPE}",
            expected=f"{n} ones, then 1e30",
            found=f"{int((divisors == 1).sum())} ones",
            fix="convert the checkpoint with `g4spec convert`, which records another share",
        )


def check_ids(file: GGUF, name: str, values: Any, n_vocab: int) -> None:
    """Raise InputError unless every id in `values` is a token of the target's vocabulary."""
    ids = np.asarray(values)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= n_vocab):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise InputError(
            f"{file.path}: {name} names a token outside the vocabulary",
            expected=f"0..{n_vocab - 1}",
            found=bad,
        )


def check_draft_weights(file: GGUF, specs: Sequence[TensorSpec], n_vocab: int) -> list[TensorSpec]:
    """Return those of a draft's tensors that the file has, as `check_weights`, after checking that
    the ids in its index tensors are tokens of the target.

    Raises:
        InputError: as for `check_weights`, or the file has a tensor that the kind does not have,
            so it belongs to another kind whose metadata is missing.
    """
    known = {spec.name for spec in specs}
    if unknown := unknown_tensors(file, known):
        raise InputError(
            f"{file.path}: tensor {unknown[0]} is not part of such a draft",
            expected=f"{len(known)} tensors",
            found=f"{len(file.tensors)}",
            fix="convert it again with `g4spec convert`",
        )
    present = check_weights(file, specs)
    for spec in present:
        if spec.role == "index":
            check_ids(file, spec.name, file.array(spec.name), n_vocab)
    return present
