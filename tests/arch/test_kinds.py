"""Every kind of draft in `g4spec/models/` has the interface that commands use, and is in every
table of tests/support/kinds.py. A quant type is described once."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import pytest

from g4spec import models
from g4spec.models import gemma4, ngram
from g4spec.models.spec import DraftConfig, DraftKind
from g4spec.quant import readable
from g4spec.quant.sizes import FORMATS
from g4spec.validate import rule
from g4spec.validate.rules.keys import KEYS
from tests.oracle import build
from tests.support import kinds, memory_engine, tiny

DRAFTS = models.drafts()


def members(protocol: type) -> list[str]:
    """Public names of a protocol."""
    return [n for n in {**vars(protocol), **inspect.get_annotations(protocol)} if n[0] != "_"]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_kind_has_the_interface_that_commands_use(name: str) -> None:
    kind = DRAFTS[name]
    for member in members(DraftKind):
        assert hasattr(kind, member), f"{kind.__name__} has no {member}: see models.spec.DraftKind"
        if inspect.isfunction(function := vars(DraftKind).get(member)):
            wanted = list(inspect.signature(function).parameters)[1:]
            assert list(inspect.signature(getattr(kind, member)).parameters) == wanted, member


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("kinds") / "target")


@pytest.mark.parametrize("table", kinds.TABLES)
def test_tables_of_checkpoints_have_every_kind(table: str, target: Path, tmp_path: Path) -> None:
    missing: dict[str, ModuleType] = dict(DRAFTS)
    on = gemma4.parse_hf(build.checkpoint(target))
    for i, (make, options) in enumerate(kinds.TABLES[table]):
        if not missing:
            break
        make(tmp_path / str(i), target, **options)
        read = build.checkpoint(tmp_path / str(i))
        (name,) = (n for n, kind in DRAFTS.items() if kind.claims(read))
        if kind := missing.pop(name, None):
            config = kind.parse_hf(read, on)
            assert all(hasattr(config, member) for member in members(DraftConfig)), name
            assert config.arch in models.architectures(), "ARCH or ARCHS of its kind"
            assert config.arch in rule.DRAFTS, "add it to a tuple of validate/rule.py in DRAFTS"
            own = [key for key in kind.metadata(config) if key.startswith(f"{config.arch}.")]
            untyped = {key.removeprefix(config.arch) for key in own} - KEYS.keys()
            assert not untyped, "add them to KEYS of validate/rules/keys.py"
            required = {
                key for key, want in KEYS.items() if key[0] == "." and config.arch in want.on
            }
            lacking = required - {key.removeprefix(config.arch) for key in own}
            assert not lacking, "its file lacks them: see `on` in KEYS of validate/rules/keys.py"
            names = {tensor.name for tensor in kind.tensors(config)}
            marked = [n for n, k in DRAFTS.items() if names & {*getattr(k, "UNIQUE_TENSORS", ())}]
            assert marked in ([], [name]), "UNIQUE_TENSORS that another kind has, too"
    assert not missing, f"kinds.{table} makes no checkpoint of {list(missing)}"


def test_readme_counts_the_kinds() -> None:
    page = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    number = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    nth = ("sixth", "seventh", "eighth", "ninth", "tenth")[len(DRAFTS) - 5]
    for words in (
        f"[{number[len(DRAFTS)]} kinds of drafts](docs/kinds.md)",
        f"A {nth} kind, n-gram lookup, needs no file",
    ):
        assert words in " ".join(page.split()), f"README.md, What opens: write {words!r}"


def test_engines_in_memory_have_every_kind() -> None:
    on = memory_engine.target()
    types = {type(make(on)) for make in memory_engine.DRAFTS.values()}
    wanted = {kind.Drafter for kind in DRAFTS.values()} | {ngram.Drafter}
    assert types == wanted, "add one to DRAFTS of tests/support/memory_engine.py"


def test_a_quant_type_is_described_once() -> None:
    both = {f.name for f in FORMATS} & readable().keys()
    assert not both, "has a codec in quant/formats: its line in quant/sizes.py is not read any more"
    numbers = [f.type for f in (*FORMATS, *readable().values())]
    assert len(set(numbers)) == len(numbers)
