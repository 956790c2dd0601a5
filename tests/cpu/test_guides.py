"""The commands of the guides and the notebook run as written, and every page is in the
navigation."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli, convert
from g4spec.runtime.request import Stats

ROOT = Path(__file__).resolve().parents[2]
FAMILY = ROOT / "examples" / "tiny"
GUIDES = [p for p in sorted((ROOT / "docs" / "guides").glob("*.md")) if p.stem != "many-texts"]
"""All guides except the one that test_readme.py runs."""
ELSEWHERE = {
    "bench --synthetic 31b": "wants a GPU",
    "serve": "test_readme.py starts one",
    "self-test": "its exit code is the machine's",
    "--probe": "test_probe.py; minutes",
    "bench -m": "test_readme.py runs one",
}
"""Commands of guides that are not run here, recognised by a part of them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the files of a clone after `make demo` that the guides use."""
    folder = tmp_path_factory.mktemp("guides")
    (folder / "demo").mkdir()
    (folder / "examples").mkdir()
    (folder / "examples" / "tiny").symlink_to(FAMILY)
    target = folder / "demo" / "target.gguf"
    convert.convert(FAMILY / "target", target)
    for name in ("dflash", "dflash-other"):
        convert.convert(FAMILY / name, folder / "demo" / f"{name}.gguf", target=target)
    return folder


@pytest.fixture(autouse=True)
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def lines(page: Path) -> list[str]:
    """Return the `g4spec ...` lines of a page's code blocks, without `g4spec`."""
    found = re.findall(r"^    g4spec (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [line for line in found if not any(part in line for part in ELSEWHERE)]


COMMANDS = [(page, line) for page in GUIDES for line in lines(page)]


@pytest.mark.parametrize("page,line", COMMANDS, ids=[f"{p.stem}: {x}" for p, x in COMMANDS])
def test_commands(page: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    if words[0] in ("verify", "generate"):
        words += ["--device", "cpu"]
    assert cli.run(words) == 0, capsys.readouterr().err


def test_output_shown_on_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Output printed on a page equals the output of the command above it."""
    text = (ROOT / "docs" / "guides" / "my-gpu.md").read_text(encoding="utf-8")
    (line,), (shown,) = (
        re.findall(r"^    g4spec (.*)\n\n```text", text, re.M),
        re.findall(r"```text\n(.*?)```", text, re.DOTALL),
    )
    assert cli.run(shlex.split(line)) == 0
    assert shown in capsys.readouterr().out


def cells() -> list[str]:
    notebook = json.loads((ROOT / "examples" / "python.ipynb").read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def blocks() -> list[str]:
    text = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_notebook_is_the_page() -> None:
    assert [c.strip() for c in cells()[-len(blocks()) :]] == [b.strip() for b in blocks()]


def test_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The cells run in order, and their output equals the saved output."""
    names: dict[str, Any] = {}
    for cell in cells():
        exec(compile(cell, "python.ipynb", "exec"), names)
    output = capsys.readouterr().out
    notebook = json.loads((ROOT / "examples" / "python.ipynb").read_text(encoding="utf-8"))
    kept = "".join("".join(o["text"]) for c in notebook["cells"] for o in c.get("outputs", []))
    assert output == kept and "0 errors" in output


def test_one_draft_is_examined_until_it_is_found_wrong() -> None:
    """Steps 1 to 3 of "My draft gains nothing" use the unfitting draft, later ones the other."""
    text = (ROOT / "docs" / "guides" / "no-gain.md").read_text(encoding="utf-8")
    steps = re.split(r"^## ", text, flags=re.MULTILINE)[2:]
    drafts = [
        set(re.findall(r"demo/(dflash[\w-]*)\.gguf", " ".join(re.findall(r"^    .*$", s, re.M))))
        for s in steps
    ]
    assert drafts == [{"dflash-other"}] * 3 + [{"dflash"}] * 2 + [set()]


def test_stop_reasons_are_listed_where_users_of_python_look() -> None:
    """Every reason in the engine's code is in the guide and in the docstring of `Stats`."""
    found = set()
    for name in ("scheduler", "request"):
        code = (ROOT / "g4spec" / "runtime" / f"{name}.py").read_text(encoding="utf-8")
        found |= set(re.findall(r'_finish\(task, "(\w+)"', code))
        found |= set(re.findall(r'stop_reason = f?"([a-z ]+)', code))
    assert {"length", "stop string", "stop token "} < found
    text = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    for place in (str(Stats.__doc__), text):
        assert [r for r in sorted(found) if f'"{r}' not in place and f"| `{r}" not in place] == []


def shown() -> tuple[str, ...]:
    """Return `SHOWN` of docs/site.py, which imports mkdocs."""
    site = ast.parse((ROOT / "docs" / "site.py").read_text(encoding="utf-8"))
    found = [
        ast.literal_eval(node.value)
        for node in site.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHOWN"
    ]
    assert len(found) == 1 and found[0]
    patterns: tuple[str, ...] = found[0]
    return patterns


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {p.relative_to(ROOT).as_posix() for each in shown() for p in ROOT.glob(each)}
    assert {p for p in pages if p.endswith(".md")} <= named
    assert {n for n in named if not (ROOT / n).exists()} == {"docs/commands.md"}, "generated"


def test_no_brackets_are_taken_for_references() -> None:
    """`[a][b]` outside of code is a link to the definition of `b`."""
    for page in (ROOT / "benchmarks" / "LOG.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r".*\]\[.*", text), page.name


def test_the_log_has_an_index() -> None:
    text = (ROOT / "benchmarks" / "LOG.md").read_text(encoding="utf-8")
    index, *sections = re.split(r"^## (?=\d{4})", text, flags=re.MULTILINE)
    missing = [t for t in (s.splitlines()[0] for s in sections) if f"[{t[12:]}](#" not in index]
    assert not missing, "a line for each section, with what came of it"


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_have_targets(page: Path) -> None:
    """Links to files and anchors of the repository."""
    text = re.sub(r"```.*?```|^    .*$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for address, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", text):
        to = (page.parent / address).resolve() if address else page
        assert to.exists() or to.name == "commands.md", address
        if anchor and to.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in heads}
            assert anchor in slugs, f"{address}#{anchor}"


def test_every_result_is_cited() -> None:
    """Every result file is named by a page, script or test."""
    cited = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("benchmarks", "docs", "tests", "g4spec")
        for end in ("*.md", "*.py", "*.toml")
        for path in (ROOT / folder).rglob(end)
    ) + (ROOT / "README.md").read_text(encoding="utf-8")
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert {name for name in kept if name not in cited} == set()


def test_the_page_of_quality_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/quality.md is what `cpu_quality.py --page` writes for the result that it names."""
    for folder in (ROOT / "benchmarks", FAMILY):
        monkeypatch.syspath_prepend(str(folder))
    cpu_quality = importlib.import_module("cpu_quality")
    text = cpu_quality.PAGE.read_text(encoding="utf-8")
    (name,) = re.findall(r"results/(\S+)\.json", text)
    result = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    written = cpu_quality.page(json.loads(result))
    assert written == text, "change `page` of benchmarks/cpu_quality.py and the page alike"


def test_acceptance_has_one_word() -> None:
    """The glossary's word is "tokens per step"; the others are in its brackets only."""
    other = re.compile(r"tokens a (step|cycle)|tokens( per |/)cycle|acceptance length", re.I)
    files = [
        *ROOT.glob("g4spec/**/*.py"),
        *ROOT.glob("g4spec/**/*.toml"),
        *ROOT.glob("docs/guides/*.md"),
    ]
    files += [*ROOT.glob("g4spec/**/*.html"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    found = [
        f"{file.relative_to(ROOT)}: {hit[0]}"
        for file in files
        if file.name != "glossary.md"
        for hit in other.finditer(file.read_text(encoding="utf-8"))
    ]
    assert found == []
