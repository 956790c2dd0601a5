"""Convert and quantize: make a plan, then write the file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from g4spec import gguf, models, quant
from g4spec.convert import derived, output_checks, provenance, sources, target_info, tokenizer
from g4spec.convert import plan as planning
from g4spec.convert import rewrite as rewriting
from g4spec.convert.output import Output, Result
from g4spec.convert.plan import Plan, PlannedTensor
from g4spec.convert.sources import CheckpointFolder, DetectedSource
from g4spec.convert.target_info import TargetInfo
from g4spec.convert.tensors import StoredTensor, recode, worker_pool
from g4spec.convert.unchanged import UnchangedCheck
from g4spec.errors import InputError, Unsupported, UsageError
from g4spec.gguf import GGUF, KV, TensorData, ValueType, array, imatrix, string, u32
from g4spec.gguf.imatrix import Imatrix
from g4spec.gguf.writer import Progress
from g4spec.models import ollama
from g4spec.models.gemma4 import PARTS
from g4spec.models.spec import check_heads, factors_name
from g4spec.quant import policy
from g4spec.quant.format import Floats
from g4spec.quant.mix import Mix
from g4spec.quant.policy import Policy

QUANTIZATION_VERSION = 2


def convert(
    source: str | Path,
    out: str | Path,
    *,
    target: str | Path | None = None,
    type: str = "q8_0",
    tensor_types: Sequence[str] = (),
    split_max_size: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Convert a checkpoint folder into a GGUF for upstream llama.cpp and for this package.

    Args:
        source: checkpoint of a target or a draft. A draft GGUF in another program's dialect is
            rewritten, any other GGUF (a file or in a folder) is requantized.
        target: folder or GGUF of the draft's target. Required for drafts: their tokenizer comes
            from it, and their shapes are checked against it.
        type: type or mix of matrices, one of `policy.names()`; vectors stay F32.
        tensor_types: types of single tensors, see `policy.parse_type`.
        split_max_size: split the model into parts of at most this many bytes, named after `out`.
        dry_run: make the plan only.

    Raises:
        InputError: the source cannot be converted. Raised before anything is written.
    """
    source, out = Path(source), Path(out)
    target = None if target is None else Path(target)
    mix = check_arguments(out, type, dry_run, tensor_types)
    output = Output(out, split_max_size, dry_run, progress, UnchangedCheck(source, target))
    found = sources.detect(source)
    with found:
        if isinstance(found.source, GGUF) and found.dialect is None:
            note = f"{found.path} is a GGUF already; {ollama.changes(found.source)}"
            note += "; `target` is ignored" if target else ""
            return _requantize(found.source, output, mix, False, [*found.notes, note])
        if found.is_target and target is not None:
            raise UsageError(
                f"{found.path} is a target; `target` is for drafts",
                fix="omit `target`, or name the draft as the source",
            )
        output_checks.refuse_overwrite(output, found.files)
        return _convert(found, output, mix, target)


def _convert(found: DetectedSource, output: Output, mix: Mix, target: Path | None) -> Result:
    """Convert a checkpoint folder, or a GGUF in another program's dialect."""
    start = time.perf_counter()
    info = target_info.from_source(found) if found.is_target else _target_of(found, target)
    output_checks.refuse_overwrite(output, info.files)
    config, tensors, canonical_names, notes, dropped = read(found, info)
    plan = planning.build(found.kind, config, tensors, mix, info.n_tokens, canonical_names)
    notes = [*notes, *plan.notes()]
    plan = replace(plan, tensors=(*plan.tensors, *dropped))
    computed = _computed_values(plan, tensors, config)
    kv = _metadata(found, config, mix, info, computed, plan, output, target)
    notes = [*dict.fromkeys((*found.notes, *info.notes)), *notes]  # those of a target are in both
    rows = [r for r in plan.tensors if r.action in ("copy", "make")]
    if output.dry_run:
        files = output.planned(kv, rows)
    else:
        with worker_pool() as pool:
            files = output.write(kv, [_tensor_data(r, tensors, computed, pool) for r in rows])
    return Result(plan, notes, files, time.perf_counter() - start, not output.dry_run)


def read(
    found: DetectedSource, info: TargetInfo
) -> tuple[
    Any, Mapping[str, StoredTensor], Mapping[str, str] | None, list[str], list[PlannedTensor]
]:
    """Read a source for the plan.

    Returns the configuration, the tensors, their canonical names (None if a prefix is the only
    difference), notes for the user, and tensors that are already planned as dropped.
    """
    if isinstance(found.source, GGUF):
        assert found.dialect is not None
        rewritten = rewriting.rewrite(found.source, found.dialect, found.kind, info)
        check_heads(rewritten.config.layers)
        return (
            rewritten.config,
            rewritten.tensors,
            rewritten.canonical_names,
            rewritten.notes,
            rewritten.dropped,
        )
    checkpoint = found.source.checkpoint
    config = (
        found.kind.parse_hf(checkpoint)
        if found.is_target
        else found.kind.parse_hf(checkpoint, info.config)
    )
    check_heads(config.layers)
    describe = getattr(found.kind, "notes", None)
    return config, found.source.tensors, None, describe(checkpoint) if describe else [], []


def quantize(
    source: str | Path,
    out: str | Path,
    type: str,
    *,
    allow_requantize: bool = False,
    tensor_types: Sequence[str] = (),
    importance: Imatrix | None = None,
    split_max_size: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Rewrite a GGUF with matrices in another type; all metadata are kept.

    Args:
        allow_requantize: convert quantized matrices too. They lose quality twice, or grow without
            gaining quality.
        importance: importance matrix that weights quantization errors, see
            `g4spec.gguf.imatrix.read`.

    The other arguments are those of `convert`.
    """
    source, out = Path(source), Path(out)
    mix = check_arguments(out, type, dry_run, tensor_types)
    unchanged = UnchangedCheck(source)
    with GGUF(source) as file:
        models.refuse_other_files(source, file)
        output = Output(out, split_max_size, dry_run, progress, unchanged)
        return _requantize(file, output, mix, allow_requantize, [], importance, change=True)


def check_arguments(out: Path, type: str, dry_run: bool, tensor_types: Sequence[str]) -> Mix:
    """Return the mix named `type`. Raises UsageError if it is unknown, or if `out` is the name of a
    type or cannot be a file."""
    output_checks.refuse_type(out)
    if not dry_run:
        gguf.check_writable(out)
    return policy.parse_type(type, tensor_types)


def _target_of(found: DetectedSource, target: Path | None) -> TargetInfo:
    if target is not None:
        return target_info.load(target)
    config = found.source.config if isinstance(found.source, CheckpointFolder) else {}
    spec = config.get("speculators_config")
    verifier = spec.get("verifier") if isinstance(spec, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    raise UsageError(
        f"{found.path} is a {found.kind.TITLE}; its conversion also needs the target, for the "
        "tokenizer and to check shapes",
        fix=f"pass a folder or GGUF file with `target`{f' (made for {name})' if name else ''}",
    )


def _computed_values(
    plan: Plan, tensors: Mapping[str, StoredTensor], config: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Compute the values of planned tensors with action make or metadata, by name or key."""
    out: dict[str, np.ndarray[Any, Any]] = {}
    t2d = next((t for n, t in tensors.items() if n.split(".")[-1] == "t2d"), None)
    for row in plan.tensors:
        if row.action == "metadata":
            tensor = tensors[row.source or ""]
            out[row.name or ""] = derived.as_int32(tensor) if row.type == "I32" else tensor.array()
        elif row.action == "make" and row.source is None:
            out[row.name or ""] = derived.rope_freqs(config)
        elif row.action == "make":
            source = tensors[row.source or ""]
            out[row.name or ""] = derived.absolute_d2t(source, t2d, config.n_vocab)
    if t2d is not None:
        out[provenance.T2D_SHA256] = np.array(derived.t2d_sha256(t2d))
    return out


def _tensor_data(
    row: PlannedTensor,
    tensors: Mapping[str, StoredTensor],
    computed: Mapping[str, Any],
    pool: ThreadPoolExecutor,
    weights: Floats | None = None,
) -> TensorData:
    form = quant.get(row.type)
    assert row.name is not None
    if row.action == "make":
        return TensorData(row.name, row.shape, form.type, [computed[row.name]])
    tensor = tensors[row.source or ""]
    if tensor.shape != row.shape:
        tensor = tensor.first_rows(row.shape[0])
    if row.pairs:
        tensor = derived.interleave_head_rows(tensor, row.pairs)
    return TensorData(row.name, row.shape, form.type, recode(tensor, form, pool, weights))


def _metadata(
    found: DetectedSource,
    config: Any,
    mix: Mix,
    info: TargetInfo,
    computed: Mapping[str, Any],
    plan: Plan,
    output: Output,
    target: Path | None,
) -> KV:
    """Return all keys of the file: general, those of the kind, tokenizer, provenance."""
    model = model_keys(found.kind, config, info.tokenizer)
    kv: KV = {
        "general.architecture": model.pop("general.architecture"),
        "general.type": string("model"),
        "general.name": string(provenance.checkpoint_name(found.path).split("/")[-1]),
        **_file_type(plan, mix),
        "general.quantization_version": u32(QUANTIZATION_VERSION),
    }
    kv |= model
    for row in plan.with_action("metadata"):
        assert row.name is not None
        kv[row.name] = array(
            ValueType.I32 if row.type == "I32" else ValueType.F32, computed[row.name].reshape(-1)
        )
    if provenance.T2D_SHA256 in computed:
        kv[provenance.T2D_SHA256] = string(str(computed[provenance.T2D_SHA256]))
    kv |= info.pairing if target else info.sampling
    if found.is_target and info.weights:
        kv[provenance.WEIGHTS] = string(info.weights)
    with_target = f" --target {provenance.checkpoint_name(target)}" if target else ""
    command = f"g4spec convert {found.path.name}{with_target} -o {output.path.name}"
    command += f" --type {mix.name}"
    command += "".join(f" --tensor-type {p.pattern}={f.name}" for p, f in mix.tensor_types)
    if output.max_size:
        command += f" --split-max-size {output.max_size / 10**6:.12g}M"
    return kv | provenance.source_keys(found.source, command)


def model_keys(kind: ModuleType, config: Any, tokenizer: KV) -> KV:
    """Return the keys that describe a model and its tokenizer. `tokenizer.*` keys of the kind come
    last: the mask token of a draft overrides that of its target."""
    own: KV = kind.metadata(config)
    kv = {k: v for k, v in own.items() if not k.startswith("tokenizer.")}
    return kv | tokenizer | {k: v for k, v in own.items() if k.startswith("tokenizer.")}


def _file_type(plan: Plan, mix: Mix) -> KV:
    """Return `general.file_type` as a dict: the requested type, or the type of most bytes if
    quantized matrices were kept. Empty if llama.cpp has no number for it; it then looks at the
    tensors."""
    number = mix.file_type
    sizes: dict[str, int] = {}
    for row in plan.with_action("copy"):
        sizes[row.type] = sizes.get(row.type, 0) + row.nbytes
    kept = any(row.note.startswith("quantized already") for row in plan.tensors)
    if kept and sizes:
        number = quant.get(max(sizes, key=lambda name: sizes[name])).file_type
    return {} if number is None else {"general.file_type": u32(number)}


def _requantize(
    file: GGUF,
    output: Output,
    mix: Mix,
    allow: bool,
    notes: list[str],
    importance: Imatrix | None = None,
    *,
    change: bool = False,
) -> Result:
    """Rewrite a GGUF. `change`: refuse to replace an existing file by a copy of the source."""
    start = time.perf_counter()
    read = [importance.path] if importance and importance.path else []
    output_checks.refuse_overwrite(output, [*(part.path for part in file.parts), *read])
    used = ollama.text_tensors(file)
    choice = Policy(mix, {n: t.shape for n, t in used.items()}, importance is not None)
    rows = tuple(_requantized(file, name, choice, allow) for name in used)
    if change:
        output_checks.refuse_copy(file, output.path, rows)
    unused = (t for name, t in file.tensors.items() if name not in used)
    dropped = (PlannedTensor("drop", t.name, None, t.shape, "", PARTS) for t in unused)
    plan = Plan((*rows, *dropped), choice)
    notes = [*notes, *plan.notes()]
    weights = _weights(file, plan, importance, notes) if importance else {}
    file_type = _file_type(plan, mix)
    kv = {
        key: file.value(key) for key in file if file_type or key != "general.file_type"
    } | file_type
    kv |= tokenizer.usual_keys(file)
    kv["general.quantization_version"] = u32(QUANTIZATION_VERSION)
    kv |= imatrix.keys(importance) if importance and weights else {}
    if output.dry_run:
        files = output.planned(kv, rows)
    else:
        with worker_pool() as pool:
            stored = {name: rewriting.stored_tensor(file, name) for name in file.tensors}
            data = [_tensor_data(r, stored, {}, pool, weights.get(r.name or "")) for r in rows]
            files = output.write(kv, data)
    return Result(plan, notes, files, time.perf_counter() - start, not output.dry_run)


def _weights(file: GGUF, plan: Plan, importance: Imatrix, notes: list[str]) -> dict[str, Floats]:
    """Return the column weights of each matrix that will be quantized; matrices without weights
    are listed in `notes`. Raises InputError if the imatrix belongs to another model."""
    out, without = {}, []
    for row in plan.with_action("copy"):
        name = row.name or ""
        form = quant.get(row.type)
        if not form.weighted or form is file.tensors[name].format:
            continue
        found = importance.weights(name, row.shape)
        if found is not None:
            out[name] = found
        elif name not in policy.TABLES:  # llama-imatrix never has entries for token tables
            without.append(name)
    if without and not out:
        raise InputError(
            f"{importance.name}: no entry for any matrix of {file.path.name}",
            expected=without[0],
            found=next(iter(importance.entries)),
            fix="use an imatrix of this model",
        )
    if not without and not out:
        notes.append(f"{importance.name} changes nothing: no matrix is quantized with weights")
    if without:
        more = f" and {len(without) - 4} more" if len(without) > 4 else ""
        some = ", ".join(without[:4]) + more
        notes.append(f"{importance.name} has no entry for {some}: quantized without weights")
    return out


def _requantized(file: GGUF, name: str, choice: Policy, allow: bool) -> PlannedTensor:
    info = file.tensors[name]
    form, note = info.format, ""
    kept = len(info.shape) > 1 and not form.quantized and policy.never_quantized(name)
    if not (form.integer or kept):
        new_form, note = choice.choose(name, info.shape, "matrix")
        if form.decode is None and new_form is not form:
            raise Unsupported(
                f"{file.path}: tensor {name}: type {form.name.upper()} has no dequantizer here",
                fix="use a file of another type: F16, BF16 and Q8_0 are always read",
            )
        if form.quantized and new_form is not form:
            if not allow:
                raise InputError(
                    f"{file.path}: tensor {name} is quantized already, as {form.name.upper()}",
                    fix="start from a BF16 file, or quantize it with `allow_requantize`",
                )
            factors = factors_name(name)
            gains = factors.endswith("ffn_down_exps.scale")  # every file with experts has them
            if form.name == "nvfp4" and factors in file.tensors and not gains:
                raise Unsupported(
                    f"{file.path}: tensor {name} is multiplied by {factors}; this version cannot "
                    f"write such a matrix as {new_form.name.upper()}",
                    fix="start from the original checkpoint",
                )
        form = new_form
    return PlannedTensor(
        "copy", name, name, info.shape, form.name.upper(), note, form.nbytes(info.shape, name)
    )
