"""Command lines by grammar: what a case is, how one is made and how it is changed.

A case is named by the numbers that made it, so that a corpus is a list of numbers.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cpu import gguf_fixtures as fixtures
from tests.fuzz.family import Family
from tests.fuzz.mutation import change_gguf, mutate_bytes, mutate_json

Rng = random.Random
Value = Callable[["Maker"], str]

TEXTS = ["", "a", "in the a", "\n\n\n", "<bos><|turn>user", "\x1b]0;t\x07", "é😀" * 40, "\u202e", "a" * 3000,
         "\ud800", "\x00", "-1", "--json", "{{ x }}", "<0x1B>"]  # fmt: skip
WHOLE = ["0", "1", "2", "3", "7", "16", "64", "-1", "257", "2147483648", "9223372036854775808",
         "1" * 30, "x", "", "1.5", "0x10"]  # fmt: skip
REAL = ["0", "1", "0.5", "0.9", "-1", "1e-9", "1e9", "1e400", "nan", "inf", "x", ""]
TYPES = ["q8_0", "bf16", "f16", "f32", "q4_0", "q4_k_m", "q5_k_m", "iq4_nl", "q6_k", "mxfp4", "x", ""]
OUTPUTS = ["o.gguf", "o.gguf", "o.gguf", "o.json", "new/o.gguf", "t.gguf", "Z", "", "/dev/full", "pipe",
           "o" * 300, ".", "a\x1bb.gguf", "loop"]  # fmt: skip
CARDS = ["h200", "RTX 3090", "2x RTX 3090", "h100", "x", "", "8x b200", "\x9b31m", "0x h200"]
BIAS = ["5+1", "5-1", "5=0.5", "99999+1", "5+nan", "5", "-1+2", "x+1", "5+1e400", "5=-inf"]


def _one(*values: str) -> Value:
    return lambda make: make.rng.choice(values)


def _file(*names: str) -> Value:
    return lambda make: make.named(*names)


def _any(make: Maker) -> str:
    return make.rng.choice(["h:nowhere", "org/name", "z-lab/gemma-4-31B-it-DFlash", "31b", "nowhere.gguf",
                            "", ".", "~nobody/x", "T", "Z", *make.family.data])  # fmt: skip


GGUFS = ("t.gguf", "z.gguf", "s.gguf", "a.gguf", "p.gguf", "e.gguf", "d.gguf", "every.gguf")
DRAFTS = ("z.gguf", "s.gguf", "a.gguf", "p.gguf", "e.gguf", "d.gguf")
FOLDERS = ("Z", "S", "A", "P", "E", "D")
DIALECTS = tuple(f"dialect-{i}.gguf" for i in range(9))
TARGET, DRAFT = _file("t.gguf"), _file(*DRAFTS, *FOLDERS, *DIALECTS)
SOURCE = _file(*FOLDERS, *FOLDERS, "T", *GGUFS, *DIALECTS)
INT, FLOAT, STR = _one(*WHOLE), _one(*REAL), _one(*TEXTS)
NONE: Value = lambda make: ""  # noqa: E731  a flag
OUT, RESULT = _one(*OUTPUTS), _one(*(o for o in OUTPUTS if o != "pipe"))
SMALL = {"-c": _one("64", "64", "96", "17", *WHOLE), "-n": _one("1", "2", "3", *WHOLE),
         "--draft-window": INT, "--draft-p-min": FLOAT, "--device": _one("cpu", "cuda", "auto", "x"),
         "--cache-type": _one("f16", "q8_0", "x"), "--seed": INT, "--json": NONE, "-q": NONE}  # fmt: skip
SAMPLING = {"--temp": FLOAT, "--top-k": INT, "--top-p": FLOAT, "--min-p": FLOAT, "--ignore-eos": NONE}
LENGTH = _one("1", "2", "auto", "0", "15", "1,2", "sweep", *WHOLE)


@dataclass(frozen=True)
class Grammar:
    """A command: lines that reach far, and its options with what may stand behind each."""

    weight: int
    lines: tuple[tuple[Any, ...], ...]
    options: dict[str, Value] = field(default_factory=dict)


RULES = _one("G4-TNS-002", "G4-KEY-001", "x", "")
COMMANDS: dict[str, Grammar] = {
    "inspect": Grammar(9, (("inspect", SOURCE),), {"--no-tensors": NONE, "--json": NONE}),
    "validate": Grammar(9, (
        ("validate", _file(*GGUFS)), ("validate", _file(*DRAFTS), "--target", TARGET),
        ("validate", _file("z.gguf"), "--against", _file("Z")),
        ("validate", _file("t.gguf"), "--against", _file("T"))),
        {"--upstream": NONE, "--strict": NONE, "--list-rules": NONE, "--rule": RULES,
         "--target": _any, "--against": _any, "--json": NONE, "-q": NONE}),
    "convert": Grammar(9, (
        ("convert", _file(*FOLDERS), "--target", _file("t.gguf", "T"), "-o", OUT),
        ("convert", _file(*DIALECTS), "--target", TARGET, "-o", OUT),
        ("convert", _file("T"), "-o", OUT), ("convert", SOURCE, "--target", _any, "--dry-run")),
        {"--type": _one(*TYPES), "--tensor-type": _one("ffn=q4_0", "(=f16", "x", "a" * 40 + "*=f16"),
         "--split-max-size": _one("1M", "0M", "1G", "x", "-1M"), "--dry-run": NONE, "--json": NONE}),
    "quantize": Grammar(5, (("quantize", _file(*GGUFS), OUT, "--type", _one(*TYPES)),),
        {"--allow-requantize": NONE, "--dry-run": NONE, "--report": NONE, "--json": NONE,
         "--tensor-type": _one("ffn=q4_0", "(=f16", "x"), "--split-max-size": _one("1M", "x")}),
    "generate": Grammar(5, (
        ("generate", "-m", TARGET, "-md", DRAFT, "-p", "in the", "-n", "2", "-c", "64"),
        ("generate", "-m", TARGET, "-p", "a", "-n", "1", "-c", "64"),
        ("generate", "-m", TARGET, "-md", "ngram", "-f", _file("p.txt"), "-n", "2", "-c", "64"),
        ("generate", "-m", TARGET, "-md", DRAFT, "--tokens-file", _file("ids.txt"), "-n", "1"),
        ("generate", "-m", TARGET, "-p", STR, "-n", "1", "-c", "96", "--chat")),
        {**SMALL, **SAMPLING, "--show-draft": NONE, "--stop": STR, "--chat": NONE, "--system": STR,
         "--logit-bias": _one(*BIAS), "--repeat-penalty": FLOAT, "--presence-penalty": FLOAT,
         "--frequency-penalty": FLOAT, "--draft-max": LENGTH, "-md": _any}),
    "tokenize": Grammar(8, (
        ("tokenize", "-m", TARGET, STR), ("tokenize", "-m", TARGET, "--file", _file("p.txt")),
        ("tokenize", "-m", TARGET, "--ids-to-text", _one("2 7 8", "300 301", "[1,2]", "999999", "x")),
        ("tokenize", "-m", TARGET, "--file", "-")),
        {"--csv": NONE, "--no-bos": NONE, "--json": NONE, "-q": NONE, "--ids-to-text": NONE}),
    "verify": Grammar(1, (
        ("verify", "-m", TARGET, "-md", DRAFT, "--cases", "1", "-n", "3", "-c", "512"),),
        {**SMALL, "-np": _one("1", "2", "0", "x"), "--long-tokens": INT}),
    "bench": Grammar(2, (
        ("bench", "-m", TARGET, "-md", DRAFT, "--draft-max", "1", "-n", "1", "--prompts", "1",
         "--repeats", "1", "--categories", "chat", "-c", "512", "-o", RESULT),
        ("bench", "-m", TARGET, "--preset", "mt-bench", "--dataset", _file("q.jsonl"), "--prompts", "1",
         "--repeats", "1", "-n", "1", "-c", "96", "--draft-max", "0"),
        ("bench", "-m", TARGET, "-md", DRAFT, "--draft-max", "1", "-n", "1", "--prompts", "1",
         "--categories", "chat", "-c", "512", "-np", "2")),
        {**SMALL, **SAMPLING, "--draft-max": LENGTH, "--categories": _one("code", "x", "", "code,x"),
         "--repeats": _one("1", "2", "0", "-1", "x"), "--report": RESULT, "-o": RESULT, "--prompts": INT, "-np": _one("1", "0", "x"),
         "--synthetic": _one("31b", "x"), "--accept-length": INT}),
    "doctor": Grammar(9, (
        ("doctor", "-m", SOURCE, "-md", SOURCE, "--assume", "h200"), ("doctor", "-m", SOURCE),
        ("doctor", "--log", _file("log.txt")), ("doctor", "-m", _any, "-md", _any, "--assume", "h100")),
        {"-c": INT, "--kv": _one("f16", "q8_0", "x", ""), "--engine": _one("vllm", "llama.cpp", "g4spec", "x"),
         "--gpus": INT, "--assume": _one(*CARDS), "--with": _one("vllm=0.19.2", "vllm", "=", "cuda=13"),
         "--why": _one("x", "", "vllm"), "-v": NONE, "--json": NONE, "--log": _any,
         "--attention-backend": _one("TRITON_ATTN", "x", "")}),
    "recipe": Grammar(7, (
        ("recipe", _one("llama.cpp", "vllm", "sglang", "g4spec"), "-m", SOURCE, "-md", SOURCE, "--assume", "h200"),
        ("recipe", _one("llama.cpp", "vllm", "x", ""), "-m", _any, "--assume", _one(*CARDS))),
        {"-c": INT, "--kv": _one("f16", "q8_0", "x"), "--gpus": INT, "--nodes": INT, "--compose": NONE,
         "-o": _one("rec", "rec", "Z", "t.gguf", "", "pipe"), "--json": NONE,
         "--with": _one("vllm=0.19.2", "x=1")}),
    "compare": Grammar(9, (("bench", "compare", _file("r.json"), _file("s.json")),),
        {"--tolerance": _one("5%", "0", "x", "1e400", "nan%"), "--force": NONE, "--json": NONE}),
    "words": Grammar(1, ((_one("help", "", "--version", "inspekt", "demo"), STR),),
        {"--help": NONE, "--json": NONE}),
}  # fmt: skip


@dataclass
class Case:
    """A command line, and the files that are not the family's as they were.

    Attributes:
        argv: without the program. `changed`: name -> bytes, or the kind of what is no file.
        terminal: whether it writes to one. `made_by`: the numbers that make it again.
    """

    argv: list[str]
    changed: dict[str, bytes | str] = field(default_factory=dict)
    trees: dict[str, fixtures.File] = field(default_factory=dict)
    terminal: bool = False
    made_by: tuple[int, ...] = ()

    def show(self) -> str:
        files = {n: d if isinstance(d, str) else len(d) for n, d in self.changed.items()}
        return f"{self.argv} {files}"


class Maker:
    """Makes a case of numbers: the first chooses a line of the grammar, each other one changes it."""

    def __init__(self, family: Family) -> None:
        self.family, self.rng = family, Rng(0)
        self._commands = [c for c, g in COMMANDS.items() for _ in range(g.weight)]

    def named(self, *names: str) -> str:
        return self.rng.choice(names)

    def make(self, numbers: tuple[int, ...]) -> Case:
        first, *more = numbers
        self.rng = Rng(first)
        command = self.rng.choice(self._commands)
        line = self.rng.choice(COMMANDS[command].lines)
        case = Case([each if isinstance(each, str) else each(self) for each in line],
                    terminal=self.rng.random() < 0.5, made_by=numbers)  # fmt: skip
        for number in more:
            self.rng = Rng(number)
            self._change(case, command)
        return case

    def _change(self, case: Case, command: str) -> None:
        if self.rng.random() < 0.3:
            self._option(case, COMMANDS[command].options)
        else:
            self._file(case)

    def _option(self, case: Case, options: dict[str, Value]) -> None:
        kind, at = self.rng.random(), len(case.argv)
        if kind < 0.75:
            flag = self.rng.choice(list(options))
            case.argv += [flag] if options[flag] is NONE else [flag, options[flag](self)]
        elif kind < 0.85 and at > 2:
            del case.argv[self.rng.randrange(1, at)]
        elif kind < 0.95:
            case.argv[self.rng.randrange(1, at)] = self.rng.choice([*TEXTS, *WHOLE, _any(self)])
        else:
            case.argv.insert(self.rng.randrange(1, at + 1), self.rng.choice(TEXTS))
        case.argv = [a.encode("utf-8", "replace").decode().replace("\x00", "?") for a in case.argv]

    # ---- files

    def _file(self, case: Case) -> None:
        """Change one of the files that the command line names."""
        named = [a for a in case.argv if a in self.family.data]
        for folder in (a for a in case.argv if a in ("T", *FOLDERS)):
            named += [n for n in self.family.data if n.startswith(f"{folder}/")]
        if not named:
            return
        name, kind = self.rng.choice(named), self.rng.random()
        if kind < 0.04:
            kinds = ["gone", "folder", "loop", "locked"]
            typed = name in ("p.txt", "ids.txt", "log.txt")  # the user's own may be a pipe
            case.changed[name] = self.rng.choice(kinds if typed else [*kinds, "pipe", "zero"])
            case.trees.pop(name, None)
        elif kind < 0.08:
            case.changed[name] = self._data(case, self.rng.choice(list(self.family.data)))
            case.trees.pop(name, None)
        elif name in self.family.gguf and kind < 0.8:
            self._gguf(case, name)
        else:
            data = self._data(case, name)
            other = self._data(case, self.rng.choice(named))
            mutate = mutate_json if name.endswith(("json", "jsonl")) else mutate_bytes
            case.changed[name] = mutate(data, self.rng, other)
            case.trees.pop(name, None)

    def _gguf(self, case: Case, name: str) -> None:
        tree = case.trees.get(name)
        if tree is None:
            if name in case.changed:  # its bytes have been changed before
                case.changed[name] = mutate_bytes(self._data(case, name), self.rng, b"")
                return
            tree = case.trees[name] = self.family.copy(name)
        change_gguf(tree, self.rng)
        try:
            case.changed[name] = tree.bytes()
        except (ValueError, OverflowError, fixtures.struct.error):
            case.changed[name] = mutate_bytes(self.family.data[name], self.rng, b"")
            del case.trees[name]

    def _data(self, case: Case, name: str) -> bytes:
        data = case.changed.get(name, self.family.data[name])
        return data if isinstance(data, bytes) else self.family.data[name]


# ---- the folder of a case


class Place:
    """The folder where cases run, with links to the family's files; nothing else is written to."""

    def __init__(self, family: Family, base: Path) -> None:
        self.family, self.base, self.work = family, base, base / "work"
        self._seeds = base / "seeds"
        for name, data in family.data.items():
            path = self._seeds / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for name in ("home", "cache", "hf", "tmp"):
            (base / name).mkdir()

    def environment(self) -> dict[str, str]:
        """Of the process: no cache, home or hub but these."""
        return {"HOME": str(self.base / "home"), "XDG_CACHE_HOME": str(self.base / "cache"),
                "HF_HOME": str(self.base / "hf"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100",
                "TERM": "xterm", "TMPDIR": str(self.base / "tmp")}  # fmt: skip

    def lay(self, case: Case) -> None:
        """Put the files of a case where it runs, which becomes the working folder."""
        os.chdir(self.base)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.base / "cache", ignore_errors=True)
        self.work.mkdir()
        line = set(case.argv) | set(case.changed)
        for name in self.family.data:
            if name in line or name.partition("/")[0] in line:
                self._one(name, case.changed.get(name))
        os.mkfifo(self.work / "pipe")
        (self.work / "loop").symlink_to("loop")
        os.chdir(self.work)

    def _one(self, name: str, data: bytes | str | None) -> None:
        path = self.work / name
        path.parent.mkdir(exist_ok=True)
        if data is None:
            os.link(self._seeds / name, path)
        elif isinstance(data, bytes):
            path.write_bytes(data)
        elif data == "pipe":
            os.mkfifo(path)
        elif data in ("zero", "loop"):
            path.symlink_to("/dev/zero" if data == "zero" else path.name)
        elif data == "folder":
            path.mkdir()
        elif data == "locked":
            path.write_bytes(self.family.data[name])
            path.chmod(0)

    def damaged(self) -> list[str]:
        """Names of the family's files that a case has changed, repaired."""
        wrong = [n for n, data in self.family.data.items() if not self._same(n, data)]
        for name in wrong:
            (self._seeds / name).unlink(missing_ok=True)
            (self._seeds / name).write_bytes(self.family.data[name])
        return wrong

    def _same(self, name: str, data: bytes) -> bool:
        path = self._seeds / name
        return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def longer(numbers: tuple[int, ...], rng: Rng) -> tuple[int, ...]:
    """A case that is changed once or a few times more, or in another way."""
    kept = numbers if rng.random() < 0.8 else numbers[: rng.randrange(1, len(numbers) + 1)]
    return (*kept, *(rng.randrange(1 << 30) for _ in range(rng.choice([1, 1, 2, 4]))))[:12]


