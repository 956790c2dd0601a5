"""Hooks of mkdocs. The site is the repository's own pages where they lie, so that a link works on
both; `docs/commands.md` is made from the command line here. `REPOSITORY_URL` says where code that a
page names can be read; without it such links become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from g4spec import cli

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.png",
    "benchmarks/*.md",
    "benchmarks/results/*.json",
    "examples/*/README.md",
    "examples/*.ipynb",
    "tests/emulator/README.md",
)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take pages from all of the repository, and the theme's own files."""
    directory = config.use_directory_urls
    ours = [
        File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, directory)
        for pattern in SHOWN
        for path in sorted(ROOT.glob(pattern))
    ]
    made = File.generated(config, "docs/commands.md", content=commands())
    themes = [f for f in files if f.src_dir != config.docs_dir]
    return Files([*themes, *ours, made])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to code to the repository; a link to nothing fails the build."""
    folder = posixpath.dirname(page.file.src_uri)

    def changed(link: re.Match[str]) -> str:
        picture, text, address, anchor = link.groups()
        if re.match(r"[a-z]+:", address):
            return link[0]
        name = posixpath.normpath(posixpath.join(folder, address))
        if files.get_file_from_path(name):
            return link[0]
        if not (ROOT / name).exists():
            raise PluginError(f"{page.file.src_uri}: {address} is not in the repository")
        if not config.repo_url:
            return text
        return f"{picture}[{text}]({config.repo_url}/blob/main/{name}{anchor or ''})"

    return LINK.sub(changed, markdown)


def commands() -> str:
    """Return the page on all commands: usage, description, and each option with its default."""
    top: Any = typer.main.get_command(cli.app())
    parts = ["# Commands", "", "Generated; `g4spec COMMAND --help` shows the same.", ""]
    for name, command in top.commands.items():
        parts += _command(name, command)
        for inner, one in getattr(command, "commands", {}).items():
            parts += _command(f"{name} {inner}", one)
    return "\n".join(parts) + "\n"


def _command(name: str, command: Any) -> list[str]:
    """Return the lines on one command."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {name}", "", f"    g4spec {name} {usage}", "", command.help or "", ""]
    rows = [_option(p, context) for p in command.params if not getattr(p, "hidden", False)]
    return [*lines, "| option | |", "|---|---|", *rows, ""]


def _option(param: Any, context: Any) -> str:
    """Return the table row of one option or argument."""
    record = param.get_help_record(context)
    names = record[0] if record else param.human_readable_name
    said = record[1] if record else getattr(param, "help", "") or ""
    escaped = said.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return f"| `{names.replace('|', chr(92) + '|')}` | {escaped} |"
