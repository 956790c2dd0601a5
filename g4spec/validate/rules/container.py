"""The GGUF container: errors that make a file unreadable, at least for some loaders.

Source of the limits: ggml `src/gguf.cpp`; each was tested with a build of llama.cpp.
"""

from __future__ import annotations

from collections import Counter

from g4spec import models
from g4spec.convert import dialects
from g4spec.gguf import ValueType, regular_files
from g4spec.gguf.header import MAX_ALIGNMENT
from g4spec.validate.header import MAX_NAME, Header
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

HEADER = Needs.HEADER
AGAIN = "download or convert the file again"


@rule("G4-GGUF-001", ERROR, "the file must begin with GGUF", needs=HEADER)
def magic(s: Subject) -> Findings:
    """A download that failed leaves a web page, a Git LFS pointer or an empty file under the
    right name; servers that only looked at the name took it for another kind of model."""
    if s.header.magic != b"GGUF":
        with regular_files.open_regular(s.path) as file:
            pointer = regular_files.is_lfs_pointer(file.read(64))
        short = f"a file of {s.header.size} bytes" if s.header.size else "an empty file"
        found = "a Git LFS pointer" if pointer else s.header.magic.hex(" ") or short
        yield Finding(
            "byte 0", "47 47 55 46 (GGUF)", found, regular_files.LFS_FIX if pointer else AGAIN
        )


@rule("G4-GGUF-002", ERROR, "the container version must be 2 or 3", needs=HEADER)
def version(s: Subject) -> Findings:
    """Loaders refuse 0, 1 and unknown versions; a value in the high half is a big-endian file."""
    begun = s.header.size >= 8  # a shorter file has no version: G4-GGUF-003
    if s.header.magic == b"GGUF" and begun and s.header.version not in (2, 3):
        yield Finding(
            "byte 4", "2 or 3", s.header.version, "convert the model again with a current converter"
        )


@rule("G4-GGUF-003", ERROR, "the header must be complete", needs=HEADER)
def whole(s: Subject) -> Findings:
    """An interrupted copy or a damaged length field ends the header in the middle; parsers
    without bounds checks then read garbage sizes and allocate gigabytes."""
    if s.header.broken and s.header.magic == b"GGUF":
        yield Finding("header", "a complete header", s.header.broken, AGAIN)


@rule("G4-GGUF-004", ERROR, "metadata keys must be unique and not empty", needs=HEADER)
def unique_keys(s: Subject) -> Findings:
    """Rewriting tools append a corrected key and leave the old one; loaders refuse the file, or
    use whichever they meet first."""
    for name, n in Counter(k.name for k in s.header.keys).items():
        if n > 1 or not name:
            yield Finding(repr(name), "one key of each name", n, "write the file again")


@rule("G4-GGUF-005", ERROR, "tensor names must be unique and fit 63 bytes", needs=HEADER)
def unique_tensors(s: Subject) -> Findings:
    """A second tensor of the same name hides the first one."""
    for name, n in Counter(t.name for h in s.headers for t in h.tensors).items():
        if n > 1 or not 0 < len(name.encode()) < MAX_NAME:
            yield Finding(f"{name!r:.80}", "one short name per tensor", n, "write the file again")


@rule("G4-GGUF-006", ERROR, "tensor types must be defined by ggml", needs=HEADER)
def known_types(s: Subject) -> Findings:
    """Type numbers from 41 on mean different things in TurboQuant forks: 42 is Q2_0 upstream,
    TQ3_0 in one fork, TURBO3_0 in another; the wrong guess decodes to noise."""
    for t in s.entries.values():
        if t.format is None:
            yield Finding(
                t.name, "a type of ggml", f"type {t.type}", "convert from the original checkpoint"
            )


@rule(
    "G4-GGUF-007", ERROR, "shapes must be possible and rows must divide into blocks", needs=HEADER
)
def rows_divide(s: Subject) -> Findings:
    """A row that does not divide shifts every following block by part of a row."""
    for t in s.entries.values():
        if not t.shape or min(t.shape) <= 0:
            yield Finding(t.name, "positive dimensions", t.shape, AGAIN)
        elif t.format is not None and t.nbytes is None:
            yield Finding(
                t.name,
                f"rows of a multiple of {t.format.block}",
                t.shape[-1],
                "store this tensor as F16",
            )


@rule("G4-GGUF-008", ERROR, "the alignment must be a power of two", needs=HEADER)
def alignment(s: Subject) -> Findings:
    """Everything after the header is placed by it; 0 divides by zero."""
    n = s.header.alignment
    if not 0 < n <= MAX_ALIGNMENT or n & (n - 1):
        expected = f"a power of two up to {MAX_ALIGNMENT}"
        yield Finding("general.alignment", expected, n, "write the file again")


@rule("G4-GGUF-009", ERROR, "tensors must be stored without gaps or overlaps", needs=HEADER)
def running_sum(s: Subject) -> Findings:
    """A tool that dropped or swapped tensors and kept the old offsets makes a file that its own
    reader accepts and ggml refuses; reading it without the check gives weights of other layers."""
    for header in s.headers:
        expected = 0
        for t in header.tensors:
            if t.offset != expected:
                yield Finding(t.name, f"offset {expected}", t.offset, "write the file again")
                return
            if t.nbytes is None:
                return
            expected += header.pad(t.nbytes)


@rule("G4-GGUF-010", ERROR, "all tensor data must be inside the file", needs=HEADER)
def complete(s: Subject) -> Findings:
    """A truncated download opens, and reads beyond its end, or as zeros on sparse disks."""
    for header in s.headers:
        end = _data_end(header)
        if header.tensors and end > header.size:
            yield Finding("end of file", f"{end} bytes", f"{header.size} bytes", AGAIN)


@rule("G4-GGUF-011", WARNING, "nothing should follow the last tensor", needs=HEADER)
def trailing(s: Subject) -> Findings:
    """Loaders ignore what follows, so a file written over a longer one looks healthy."""
    for header in s.headers:
        end = header.pad(_data_end(header))
        if header.broken is None and header.tensors and header.size > end:
            yield Finding(
                "end of file",
                f"{end} bytes",
                f"{header.size} bytes",
                "write the file again if you did not append to it",
            )


@rule("G4-GGUF-012", ERROR, "the file must have tensors and metadata", needs=HEADER)
def not_empty(s: Subject) -> Findings:
    """Converters that matched no tensor name wrote a valid file with nothing in it and said
    that they succeeded."""
    h = s.header
    if h.broken is None and not (s.entries and h.keys):
        yield Finding(
            "header", "tensors and metadata", f"{len(s.entries)} tensors, {len(h.keys)} keys", AGAIN
        )


@rule("G4-GGUF-013", ERROR, "all parts of a split model must be present", needs=HEADER)
def split(s: Subject) -> Findings:
    """Parts find each other by their names: one that was renamed, or whose download failed, leaves
    a model that lacks layers."""
    if s.split_refusal:
        yield Finding(
            "split.count",
            "all parts, named as they were published",
            s.split_refusal,
            "download all parts into one folder",
        )


@rule("G4-GGUF-014", ERROR, "the reader must be able to open the file", needs=HEADER, fallback=True)
def opens(s: Subject) -> Findings:
    """Reports errors that no other rule covers: the runtime cannot load what the reader refuses."""
    if s.refusal:
        yield Finding("header", "a file that opens", s.refusal, AGAIN)


@rule("G4-GGUF-015", ERROR, "the architecture must be known", needs=HEADER)
def architecture(s: Subject) -> Findings:
    """Forks store the same drafts under other names, tensors and layer-id conventions
    (`gemma4_mtp`, `gemma4-dflash-draft`); loading one as the other is silently wrong."""
    if s.has(models.ADAPTER):
        yield Finding(models.ADAPTER, "a model", "a LoRA adapter", "name its model")
    elif s.header.broken is None and s.header.keys and s.kind is None:
        names = [k.name for k in s.header.keys] + [t.name for t in s.header.tensors]
        dialect = dialects.recognise(s.arch, names)
        fix = (
            "rewrite it with g4spec convert FILE --target TARGET -o NEW.gguf"
            if dialect
            else "convert from the original checkpoint with g4spec convert"
        )
        told = {models.TYPE: s.text(models.TYPE), models.ARCHITECTURE: s.arch}
        if (other := models.other_file(told)) is not None:
            fix = f"name a model: this is {other[0]}"
        yield Finding(
            "general.architecture",
            ", ".join(models.architectures()),
            f"{s.arch!r}" + (f" (by {dialect.title})" if dialect else ""),
            fix,
        )


@rule("G4-GGUF-016", ERROR, "strings must be UTF-8", needs=Needs.FILE)
def utf8(s: Subject) -> Findings:
    """Token lists are read late, so a damaged one passes for a good file until the first prompt."""
    for key in s.header.keys:
        if key.item is ValueType.STRING and s.strings(key.name) is None:
            yield Finding(key.name, "UTF-8", "invalid bytes", AGAIN)


def _data_end(header: Header) -> int:
    """Return the position after the last tensor, from all offsets and sizes that are valid."""
    ends = [t.offset + t.nbytes for t in header.tensors if t.nbytes is not None]
    return header.data_start + max(ends, default=0)
