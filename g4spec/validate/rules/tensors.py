"""The set of tensors: those of the architecture, with the expected shapes and types."""

from __future__ import annotations

import re

from g4spec.models.fields import MAX_LAYERS
from g4spec.runtime.loading import unknown_tensors
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, Finding, Findings, rule
from g4spec.validate.subject import Subject

RECONVERT = "convert again from the original checkpoint"

KNOWN_EXTRAS = (
    (r"t2d", "drop it: it repeats what d2t says"),
    (
        r"(mtp\.|mtp_)?(masked_embd_|centroids|token_ordering).*",
        "the centroid head belongs into g4spec.assistant.* metadata; upstream crashes on the "
        "tensor",
    ),
    (
        r"blk\.\d+\.attn_[kv](_norm)?\.weight",
        "an assistant has no keys and values of its own, it reads its target's",
    ),
    (r"output\.weight", "the head of this model is tied to token_embd.weight"),
    (r"verifier_.*", "drop it: it is a copy of the target's tensor"),
    (r".*\.scale", "only weights of type NVFP4 may have a scale: use a file without it"),
    (r"dflash[._].*", "the file is in a fork's dialect; convert from the original checkpoint"),
    (r"(v|a|mm)\..*", "vision and audio belong into a separate mmproj file"),
)
"""Extra tensors that published files contain, and the fix for each."""


@rule("G4-TNS-001", ERROR, "every tensor must be present")
def missing(s: Subject) -> Findings:
    """Converters whose tensor list lacked an entry (TOKEN_EMBD and OUTPUT of DFlash drafts,
    buffers such as `layer_scalar` that are no parameters) left the tensor out and went on."""
    have = s.open_file.tensors
    for spec in s.specs.values():
        if spec.name not in have and not spec.optional:
            yield Finding(spec.name, list(spec.shape), "nothing", RECONVERT)


@rule("G4-TNS-002", ERROR, "the file must have no tensors that upstream does not expect")
def extra(s: Subject) -> Findings:
    """Upstream refuses a file with a single tensor too many ("wrong number of tensors"); an
    assistant's centroid tensors even crash it."""
    for name in unknown_tensors(s.open_file, s.specs):
        fix = next((f for pattern, f in KNOWN_EXTRAS if re.fullmatch(pattern, name)), "drop it")
        yield Finding(name, "no such tensor", list(s.shape(name) or ()), fix)


@rule("G4-TNS-003", ERROR, "shapes must be those of the configuration")
def shapes(s: Subject) -> Findings:
    """A loader that derives row strides from a size it never checks reads shifted rows: the
    31B loader of one fork carried the 26B constants."""
    for spec in s.specs.values():
        found = s.shape(spec.name)
        if found is not None and found != spec.shape and spec.name not in ("d2t", "fc.weight"):
            yield Finding(
                spec.name,
                list(spec.shape),
                list(found),
                "use the configuration that belongs to these weights",
            )


@rule("G4-TNS-004", ERROR, "norms and scales must be F32")
def vectors(s: Subject) -> Findings:
    """Kernels add norms in F32 and upstream aborts on F16 ones; a quantized norm costs accuracy
    in every layer and saves nothing. Upstream's converter writes a confidence head in 16 bits."""
    for spec in s.specs.values():
        found = s.type_name(spec.name)
        allowed = ("F32",) if len(spec.shape) == 1 else ("F32", "F16", "BF16")
        if spec.role == "vector" and found not in (None, *allowed):
            yield Finding(spec.name, "F32", found, "quantize again with g4spec quantize")


@rule("G4-TNS-005", ERROR, "matrices must not have an integer type")
def matrices(s: Subject) -> Findings:
    """An integer type on a weight is a converter's cast gone wrong; it loads and computes 0."""
    for spec in s.specs.values():
        found = s.type_name(spec.name) or ""
        if spec.role in ("matrix", "embed", "output") and re.fullmatch(r"I\d+|F64", found):
            yield Finding(spec.name, "a float or quantized type", found, RECONVERT)


@rule("G4-TNS-006", ERROR, "every layer must have tensors", needs=Needs.FILE)
def empty_success(s: Subject) -> Findings:
    """A converter that matched few tensor names wrote a header for 60 layers with the token table
    behind it, and said that it succeeded."""
    n = s.integer(".block_count") or 0
    have = {name.split(".")[1] for name in s.open_file.tensors if name.startswith("blk.")}
    lacking = [i for i in range(min(n, MAX_LAYERS)) if str(i) not in have]
    if lacking:
        yield Finding(
            s.name(".block_count"),
            f"tensors for {n} layers",
            f"none for {len(lacking)} of them, blk.{lacking[0]} the first",
            RECONVERT,
        )


@rule("G4-TNS-007", ERROR, "tensor types must be ones that can be dequantized", needs=Needs.FILE)
def readable(s: Subject) -> Findings:
    """llama.cpp has newer types, and types that it only computes with, for which there is no code
    here: the file cannot run, and the values of such a tensor were not checked."""
    for name, info in s.open_file.tensors.items():
        form = info.format
        if form.decode is None and form.stored is None:
            yield Finding(
                name,
                "a type that can be dequantized",
                form.name.upper(),
                "use a file of another type, or convert the checkpoint",
            )
