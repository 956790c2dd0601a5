"""Command lines by grammar: what a case is, how one is made and how it is changed.

A case is named by the numbers that made it, so that a corpus is a list of numbers.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.cpu import gguf_fixtures as fixtures
from tests.fuzz.family import Family
from tests.fuzz.grammar import (
    COMMANDS,
    FOLDERS,
    LATER,
    NONE,
    TEXTS,
    WHOLE,
    Grammar,
    Rng,
    Value,
    anything,
)
from tests.fuzz.mutation import change_gguf, mutate_bytes, mutate_json


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
    """Makes a case of numbers: the first chooses a line of the grammar, others change it."""

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
        if first % 12 == 0:
            grammar = LATER[self.rng.choice(list(LATER))]
        line = self.rng.choice(grammar.lines)
        case = Case(
            [each if isinstance(each, str) else each(self) for each in line],
            terminal=self.rng.random() < 0.5,
            made_by=numbers,
        )
        for number in more:
            self.rng = Rng(number)
            self._change(case, grammar)
        return case

    def _change(self, case: Case, grammar: Grammar) -> None:
        if self.rng.random() < 0.3:
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
