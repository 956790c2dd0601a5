"""Fuzzing of everything that reads files: seeds, mutations, coverage and verdicts.

`tests/cpu/test_hostile.py` runs some of it and replays the kept corpus; `benchmarks/cpu_fuzz.py`
runs it at length. A reader may only raise G4Error, within `SECONDS` and `GROWTH`.
"""

from __future__ import annotations

import math
import random
import resource
import signal
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from g4spec import models, quant
from g4spec.convert import convert, provenance, safetensors, tokenizer
from g4spec.errors import G4Error, InputError
from g4spec.gguf import GGUF, Value, ValueType, parts, string
from g4spec.runtime import template
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.validate import validate
from tests.cpu import gguf_fixtures as fixtures
from tests.fuzz.coverage import Lines
from tests.fuzz.mutation import FILES, mutate_bytes, mutate_gguf, mutate_json
from tests.support import kinds, tiny
from tests.support.quant_blocks import random_blocks
from tests.support.tiny_dialects import ASSISTANT, DFLASH, Parts
from tests.support.tiny_tokenizer import TEMPLATE

CORPUS = Path(__file__).parent / "corpus"
N_PARTS = 3
"""Parts of the split model of `split_parts`."""
SECONDS, GROWTH = 5, 200 << 20

# ---- fuzzed readers


@dataclass
class Surface:
    """One reader: `check` gets bytes, and may raise G4Error only."""

    name: str
    seeds: list[bytes]
    check: Callable[[bytes], object]
    mutate: Callable[[bytes, random.Random, bytes], bytes]
    contained: bool = False  # time and memory are bounded by a process around it


def surfaces(folder: Path) -> list[Surface]:
    """Return all readers, with small seeds built in `folder`."""
    target = tiny.target(folder / "target", layers=6, hidden=32, inter=32)
    convert(target, folder / "target.gguf", type="bf16")
    drafts = [make(folder / name, target) for name, make in kinds.READERS.items()]
    ggufs = _ggufs(folder, drafts)
    return [
        Surface("gguf", ggufs, Reading(folder).gguf, mutate_gguf),
        Surface("validate", ggufs, Reading(folder).validate, mutate_gguf),
        Surface("parts", split_parts(folder), Reading(folder).parts, mutate_gguf),
        Surface("dialect", _dialects(folder), Reading(folder).dialect, mutate_gguf),
        Surface(
            "safetensors", [_small_safetensors(folder)], Reading(folder).safetensors, mutate_bytes
        ),
        Surface(
            "config",
            [(d / "config.json").read_bytes() for d in drafts],
            Reading(folder).config,
            mutate_json,
        ),
        Surface(
            "target config",
            [(target / "config.json").read_bytes()],
            Reading(folder).target_config,
            mutate_json,
        ),
        Surface(
            "tokenizer.json",
            [(target / "tokenizer.json").read_bytes()],
            Reading(folder).tokenizer_json,
            mutate_json,
        ),
        Surface(
            "tokenizer_config.json",
            [(target / "tokenizer_config.json").read_bytes()],
            Reading(folder).tokenizer_config,
            mutate_json,
        ),
        Surface(
            "index",
            [b'{"weight_map": {"fc.weight": "a.safetensors", "b": "b.safetensors"}}'],
            Reading(folder).index,
            mutate_json,
        ),
        Surface(
            "template",
            [
                TEMPLATE.encode(),
                b"{% for m in messages %}{{ m.content | trim }}"
                b"{{ m | tojson }}{% endfor %}{% set n = namespace(a=1) %}",
            ],
            Reading(folder).template,
            mutate_bytes,
            contained=True,
        ),
    ]


def _ggufs(folder: Path, drafts: list[Path]) -> list[bytes]:
    out = []
    for draft in drafts:
        path = folder / f"{draft.name}.gguf"
        convert(draft, path, target=folder / "target")
        out.append(_kept(Parts.of(path), path))
    return [*out, _kept(Parts.of(folder / "target.gguf"), folder / "target.gguf"), _every_type()]


def _every_tensor() -> dict[str, fixtures.Entry]:
    """Return a tensor of every type whose blocks can be read."""
    shape = (2, 256)
    return {
        name: fixtures.Entry(shape, form.type, random_blocks(name, *shape).tobytes())
        for name, form in quant.readable().items()
        if form.quantized
    }


def _every_type() -> bytes:
    """Return a file with a tensor of every type whose blocks can be read."""
    file = fixtures.File({"general.architecture": string("gemma4")}, _every_tensor())
    data = file.bytes()
    FILES[data] = file
    return data


def split_parts(folder: Path) -> list[bytes]:
    """Return the parts of a split target that also has a tensor of every type."""
    whole = Parts.of(folder / "target.gguf")
    tensors = {n: fixtures.Entry(*entry) for n, entry in whole.tensors.items()}
    tensors |= _every_tensor()
    names = list(tensors)
    out = []
    for no in range(N_PARTS):
        keys = {
            parts.NO: Value(ValueType.U16, no),
            parts.COUNT: Value(ValueType.U16, N_PARTS),
            parts.TENSORS: Value(ValueType.I32, len(tensors)),
        }
        file = fixtures.File(
            keys if no else whole.kv | keys, {name: tensors[name] for name in names[no::N_PARTS]}
        )
        out.append(file.bytes())
        FILES[out[-1]] = file
    return out


def _dialects(folder: Path) -> list[bytes]:
    out = []
    for change in DFLASH.values():
        draft = Parts.of(folder / "zlab.gguf")
        change(draft)
        out.append(_kept(draft))
    for chat in ASSISTANT.values():
        draft = Parts.of(folder / "asst.gguf")
        chat(draft, folder / "asst.gguf")
        out.append(_kept(draft))
    return out


def _kept(content: Parts, path: Path | None = None) -> bytes:
    kv = dict(content.kv)
    if path is not None:
        with GGUF(path) as g:
            kv |= {k: g.value(k) for k in g if k.startswith("g4spec.")}
    tensors = {n: fixtures.Entry(*entry) for n, entry in content.tensors.items()}
    file = fixtures.File(kv, tensors)
    data = file.bytes()
    FILES[data] = file
    return data


def _small_safetensors(folder: Path) -> bytes:
    import numpy as np

    path = folder / "small.safetensors"
    tiny.save(
        path, {"a": (np.ones((2, 3)), "BF16"), "b": (np.ones(4), "I64"), "c": (np.ones(5), "BOOL")}
    )
    return path.read_bytes()


class Reading:
    """The checks. Files are written only into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at = folder, folder / "fuzzed.gguf"
        self.good_parts: list[bytes] = []
        from g4spec.convert import target_info

        self.target = target_info.load(folder / "target.gguf")

    def gguf(self, data: bytes) -> None:
        self.at.write_bytes(data)
        self._read(self.at)

    def validate(self, data: bytes) -> None:
        """Read with the tolerant reader and run all rules. Raises InputError for an error."""
        self.at.write_bytes(data)
        report = validate(self.at)
        report.json()
        if not report.ok:
            raise InputError(f"{self.at}: invalid")

    def parts(self, data: bytes) -> None:
        """Read split models with the input in place of each part; raises if none can be read."""
        if not self.good_parts:
            self.good_parts = split_parts(self.folder)
        paths = [self.folder / parts.part_name("part", no, N_PARTS) for no in range(N_PARTS)]
        errors = []
        for place in range(N_PARTS):
            for no, path in enumerate(paths):
                path.write_bytes(data if no == place else self.good_parts[no])
            validate(paths[0]).json()
            try:
                self._read(paths[0])
            except G4Error as error:
                errors.append(error)
        if len(errors) == N_PARTS:
            raise errors[0]

    def _read(self, path: Path) -> None:
        with GGUF(path) as g:
            for key in g:
                g.first_entries(key, 3) if g.length(key) > 1 else g[key]
            kind = models.find_kind(g.get("general.architecture"), g.tensors)
            if kind is not None:
                kind.tensors(kind.parse_gguf(g.kv, g.shapes()))
            for name in list(g.tensors)[:128]:
                g.array(name)
            Tokenizer.from_gguf(g).encode("in the a\n\n b", bos=True)

    def dialect(self, data: bytes) -> None:
        self.at.write_bytes(data)
        convert(self.at, self.folder / "out.gguf", target=self.folder / "target.gguf", dry_run=True)

    def safetensors(self, data: bytes) -> None:
        path = self.folder / "fuzzed.safetensors"
        path.write_bytes(data)
        for tensor in safetensors.read(path).values():
            if tensor.format is not None:
                tensor.array()

    def config(self, data: bytes) -> None:
        from g4spec.convert import sources

        config = safetensors.parse_json(data, "config.json")
        for draft in kinds.READERS:
            shapes = self._shapes(draft)
            checkpoint = sources.Checkpoint(config, shapes)
            for kind in models.drafts().values():
                if kind.claims(checkpoint):
                    kind.tensors(kind.parse_hf(checkpoint, self.target.config))

    def target_config(self, data: bytes) -> None:
        from g4spec.convert import sources

        config = safetensors.parse_json(data, "config.json")
        checkpoint = sources.Checkpoint(config, self._shapes("target"))
        kind = models.targets()["gemma4"]
        if kind.claims(checkpoint):
            got = kind.parse_hf(checkpoint)
            kind.tensors(got)
            kind.metadata(got)

    def _shapes(self, name: str) -> dict[str, tuple[tuple[int, ...], str]]:
        if name not in SHAPES:
            found = safetensors.read(self.folder / name / "model.safetensors")
            SHAPES[name] = {n: (t.shape, t.dtype) for n, t in found.items()}
        return SHAPES[name]

    def tokenizer_json(self, data: bytes) -> None:
        self._tokenizer("tokenizer.json", data)

    def tokenizer_config(self, data: bytes) -> None:
        self._tokenizer("tokenizer_config.json", data)

    def _tokenizer(self, name: str, data: bytes) -> None:
        place = self.folder / "tokenizer"
        place.mkdir(exist_ok=True)
        for other in ("tokenizer.json", "tokenizer_config.json"):
            text = (self.folder / "target" / other).read_bytes()
            (place / other).write_bytes(data if other == name else text)
        kv, _ = tokenizer.from_folder(place, {"eos_token_id": [1, 106]}, {})
        provenance.pairing_keys(kv, 32, 6)
        from g4spec.gguf import write

        write(self.folder / "tokenizer.gguf", kv, [])
        with GGUF(self.folder / "tokenizer.gguf") as g:
            Tokenizer.from_gguf(g).encode("in the a\n\n b")

    def index(self, data: bytes) -> None:
        path = self.folder / "x.safetensors.index.json"
        path.write_bytes(data)
        safetensors.weight_map(path)

    def template(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")[:20000]
        template.render_in_process(
            text, [{"role": "user", "content": "hi"}], bos="<bos>", eos="<eos>"
        )


SHAPES: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}


# ---- verdicts


class Hang(BaseException):
    """Raised if a case takes more than SECONDS."""


@dataclass
class Verdict:
    """Results of the inputs of one surface."""

    ran: int = 0
    refused: int = 0
    passed: int = 0
    stopped: int = 0
    slowest: float = 0.0
    growth: int = 0
    lines: int = 0
    kept: list[bytes] = field(default_factory=list)
    failures: list[tuple[str, bytes]] = field(default_factory=list)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_input(surface: Surface, data: bytes, verdict: Verdict) -> None:
    """Run one input and record the result."""
    start, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict.ran += 1
    try:
        with alarm(1 if surface.contained else SECONDS):
            surface.check(data)
        verdict.passed += 1
    except G4Error:
        verdict.refused += 1
    except (Hang, MemoryError) as error:
        verdict.stopped += 1
        if not surface.contained:
            verdict.failures.append((type(error).__name__, data))
    except Exception as error:  # noqa: BLE001  whatever it is, it is a bug to be reported
        frames = traceback.extract_tb(error.__traceback__)
        last = next(f for f in reversed(frames) if "/g4spec/" in f.filename)
        place = f"{last.filename.split('/g4spec/')[-1]}:{last.lineno}"
        verdict.failures.append((f"{place}: {type(error).__name__}: {error}"[:200], data))
    verdict.slowest = max(verdict.slowest, time.perf_counter() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    verdict.growth = max(verdict.growth, grown)
    if grown > GROWTH and not surface.contained:
        verdict.failures.append((f"memory grew by {grown >> 20} MB", data))


def fuzz(
    surface: Surface,
    runs: int,
    seed: int = 0,
    cover: bool = True,
    corpus: list[bytes] | None = None,
) -> Verdict:
    """Mutate seeds and inputs that reached new lines, `runs` times."""
    rng, verdict, coverage = random.Random(seed), Verdict(), Lines(math.inf)
    pool = [*surface.seeds, *(corpus or [])]
    for data in pool:
        with coverage.watch():
            run_input(surface, data, Verdict())
    for _ in range(runs):
        before = len(coverage)
        data = surface.mutate(rng.choice(pool), rng, rng.choice(pool))
        if cover:
            with coverage.watch():
                run_input(surface, data, verdict)
        else:
            run_input(surface, data, verdict)
        if len(coverage) > before:
            pool.append(data)
            verdict.kept.append(data)
    verdict.lines = len(coverage)
    return verdict


def saved(name: str) -> list[bytes]:
    """Return the stored corpus of a surface."""
    path = CORPUS / f"{name.replace(' ', '-')}.zip"
    if not path.is_file():
        return []
    with zipfile.ZipFile(path) as z:
        return [z.read(n) for n in sorted(z.namelist())]


def save(name: str, entries: list[bytes]) -> None:
    """Store a corpus; equal entries give equal bytes."""
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name.replace(' ', '-')}.zip", "w", zipfile.ZIP_LZMA) as z:
        for i, data in enumerate(entries):
            info = zipfile.ZipInfo(f"{i:04d}")
            info.compress_type = zipfile.ZIP_LZMA
            z.writestr(info, data)
