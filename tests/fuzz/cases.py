"""Random command lines from a grammar: how cases are made, and how they are changed.

A case is determined by a tuple of numbers, so that a corpus is a list of such tuples.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.cpu import gguf_fixtures as fixtures
from tests.fuzz.family import Family
from tests.fuzz.grammar import (
    COMMANDS,
    FD,
    FOLDERS,
    NONE,
    STREAM,
    TEXTS,
    TYPED,
    WHOLE,
    Grammar,
    Rng,
    Value,
    anything,
)
from tests.fuzz.mutation import change_gguf, mutate_bytes, mutate_events, mutate_json


@dataclass
class Case:
    """A command line, and the files that differ from the family's.

    Attributes:
        argv: arguments without the program.
        changed: name -> bytes, or the kind of a path that is not a regular file.
        reads: files that the command reads without naming them.
        given: text on standard input.
        terminal: True if the output is a terminal.
        made_by: numbers from which the case can be made again.
        kinds: deviations from the grammar.
    """

    argv: list[str]
    changed: dict[str, bytes | str] = field(default_factory=dict)
    trees: dict[str, fixtures.File] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    given: str = "a line\n"
    terminal: bool = False
    made_by: tuple[int, ...] = ()
    kinds: set[str] = field(default_factory=set)

    def show(self) -> str:
        files = {n: d if isinstance(d, str) else len(d) for n, d in self.changed.items()}
        return f"{self.argv} {files}"

    def json(self, family: Family) -> dict[str, Any]:
        """Return everything needed to run the case again, even if the grammar or the family
        changes."""
        files = {n: self.changed.get(n, family.data[n]) for n in files_of_case(self, family)}
        packed = {
            n: d if isinstance(d, str) else {"base64": base64.b64encode(d).decode()}
            for n, d in files.items()
        }
        return {
            "argv": self.argv,
            "given": self.given,
            "terminal": self.terminal,
            "numbers": self.made_by,
            "files": packed,
        }

    @classmethod
    def of_json(cls, tree: dict[str, Any]) -> Case:
        files = {
            n: d if isinstance(d, str) else base64.b64decode(d["base64"])
            for n, d in tree["files"].items()
        }
        return cls(
            tree["argv"],
            files,
            given=tree["given"],
            terminal=tree["terminal"],
            made_by=tuple(tree["numbers"]),
        )


def files_of_case(case: Case, family: Family) -> Iterator[str]:
    """Yield the family's files that a case needs in its folder."""
    line = {*case.argv, *case.changed, *case.reads}
    return (n for n in family.data if n in line or n.partition("/")[0] in line)


def kind_of_file(name: str) -> str:
    """Return what kind of file a name of the family is."""
    folder, _, file = name.rpartition("/")
    if folder:
        return f"{'target' if folder == 'T' else 'draft'} folder's {file}"
    if not name.endswith(".gguf"):
        return name
    return {"t": "target", "every": "all types", "dialect": "dialect"}.get(
        name.removesuffix(".gguf").split("-")[0], "draft"
    ) + " GGUF"


WORK = ("-n", "--n-predict", "--cases", "--repeats")
"""Options of commands that decode many texts whose large values are 10 s of asked-for work."""

TEXT_OPTIONS = (
    *("-f", "--file", "--tokens-file", "--messages", "--tools", "--log"),
    *("--chat-template-file", "--api-key-file", "imatrix", "perplexity"),
)
"""Words before the user's own text. It may come from a pipe, and is waited for."""


def _is_long(value: str) -> bool:
    return value.isdecimal() and 16 < int(value) < 1 << 40


class Maker:
    """Makes a case from numbers: the first chooses a line of the grammar, each further one changes
    it."""

    def __init__(self, family: Family) -> None:
        self.family, self.rng = family, Rng(0)
        self._commands = [c for c, g in COMMANDS.items() for _ in range(g.weight)]

    def named(self, *names: str) -> str:
        return self.rng.choice(names)

    def make(self, numbers: tuple[int, ...]) -> Case:
        first, *more = numbers
        self.rng = Rng(first)
        command = self.rng.choice(self._commands)
        grammar = COMMANDS[command]
        line = self.rng.choice(grammar.lines)
        case = Case(
            [each if isinstance(each, str) else each(self) for each in line],
            reads=grammar.reads,
            given=self.rng.choice(grammar.given),
            terminal=self.rng.random() < 0.5,
            made_by=numbers,
        )
        for number in more:
            self.rng = Rng(number)
            self._change(case, grammar)
        for before, word in pairwise(case.argv):
            if before in TEXT_OPTIONS and case.changed.get(word) in ("pipe", "zero"):
                case.changed[word] = "gone"
        if case.argv[:1] == ["demo"] and "--family" not in case.argv:
            case.argv.append("--help")  # the demo itself is 10 s of work
        for at, word in enumerate(case.argv[:-1]):  # other options belong to the fuzzer
            if word == "--stream-fd" and case.argv[at + 1].isdigit():
                case.argv[at + 1] = case.argv[at + 1] if case.argv[at + 1] == "999" else FD
            if case.argv[0] in ("verify", "bench") and word in WORK and _is_long(case.argv[at + 1]):
                case.argv[at + 1] = "7"
        return case

    def _change(self, case: Case, grammar: Grammar) -> None:
        if self.rng.random() < 0.3:
            case.kinds.add("options")
            self._option(case, grammar.options)
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
            case.argv[self.rng.randrange(1, at)] = self.rng.choice([*TEXTS, *WHOLE, anything(self)])
        else:
            case.argv.insert(self.rng.randrange(1, at + 1), self.rng.choice(TEXTS))
        case.argv = [a.encode("utf-8", "replace").decode().replace("\x00", "?") for a in case.argv]

    # ---- files

    def _file(self, case: Case) -> None:
        """Change one of the files that the command line names."""
        named = [a for a in (*case.argv, *case.reads) if a in self.family.data]
        for folder in (a for a in case.argv if a in ("T", *FOLDERS)):
            named += [n for n in self.family.data if n.startswith(f"{folder}/")]
        if not named:
            return
        name, kind = self.rng.choice(named), self.rng.random()
        if kind < 0.04:
            kinds = ["gone", "folder", "loop", "locked"]
            typed = name in TYPED  # the user's own text may come from a pipe
            case.changed[name] = self.rng.choice(kinds if typed else [*kinds, "pipe", "zero"])
            case.trees.pop(name, None)
            how = "no file"
        elif kind < 0.08:
            case.changed[name] = self._data(case, self.rng.choice(list(self.family.data)))
            case.trees.pop(name, None)
            how = "another file"
        elif name in self.family.gguf and kind < 0.8:
            self._gguf(case, name)
            how = "keys and tensors"
        else:
            data = self._data(case, name)
            other = self._data(case, self.rng.choice(named))
            mutate, how = mutate_bytes, "bytes"
            if name.endswith(("json", "jsonl")):
                mutate, how = mutate_json, "JSON"
            elif name.endswith(".sse"):
                mutate, how = mutate_events, "events"
            case.changed[name] = mutate(data, self.rng, other)
            case.trees.pop(name, None)
        case.kinds.add(f"{kind_of_file(name)}: {how}")

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
    """The folder in which cases run, with links to the family's files; cases may write nowhere
    else."""

    def __init__(self, family: Family, base: Path) -> None:
        self.family, self.base, self.work = family, base, base / "work"
        self._seeds, self._null = base / "seeds", os.open(os.devnull, os.O_WRONLY)
        for name, data in family.data.items():
            path = self._seeds / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for name in ("home", "cache", "hf", "tmp"):
            (base / name).mkdir()

    def environment(self) -> dict[str, str]:
        """Return environment variables that point cache, home and hub into the folder."""
        return {
            "HOME": str(self.base / "home"),
            "XDG_CACHE_HOME": str(self.base / "cache"),
            "HF_HOME": str(self.base / "hf"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
            "TERM": "xterm",
            "TMPDIR": str(self.base / "tmp"),
        }

    def lay(self, case: Case) -> None:
        """Write the files of a case into the folder and make it the working folder."""
        os.chdir(self.base)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.base / "cache", ignore_errors=True)
        self.work.mkdir()
        for name in files_of_case(case, self.family):
            self._one(name, case.changed.get(name))
        if "--daemon" in case.argv:
            os.dup2(self._null, STREAM)
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
        """Return the names of the family's files that a case has changed, and restore them."""
        wrong = [n for n, data in self.family.data.items() if not self._same(n, data)]
        for name in wrong:
            (self._seeds / name).unlink(missing_ok=True)
            (self._seeds / name).write_bytes(self.family.data[name])
        return wrong

    def _same(self, name: str, data: bytes) -> bool:
        path = self._seeds / name
        return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def mutated(numbers: tuple[int, ...], rng: Rng) -> tuple[int, ...]:
    """Return the numbers of a case with one or a few more changes, or with other ones."""
    kept = numbers if rng.random() < 0.8 else numbers[: rng.randrange(1, len(numbers) + 1)]
    return (*kept, *(rng.randrange(1 << 30) for _ in range(rng.choice([1, 1, 2, 4]))))[:12]
