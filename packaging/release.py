"""Give a release the address of the repository that builds it: `release.py URL`; or say whether a
version is the package's: `release.py --check VERSION`.

Adds `[project.urls]` to pyproject.toml and makes README's links and pictures absolute, since a
package index shows README without the files beside it. The workflow runs this in its own checkout
before `python -m build`; nothing is committed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "Repository": "",
    "Documentation": "/tree/main/docs",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
}


def urls(text: str, home: str) -> str:
    """Return pyproject.toml with the addresses of the project; raise ValueError if it has some."""
    if "[project.urls]" in text:
        raise ValueError("pyproject.toml has [project.urls] already; expected none; take them out")
    table = "".join(f'{name} = "{home}{page}"\n' for name, page in PAGES.items())
    head, tail = text.split("[project.scripts]", 1)
    return f"{head}[project.urls]\n{table}\n[project.scripts]{tail}"


def absolute(text: str, home: str) -> str:
    """Return README with absolute addresses: of raw files for pictures, of pages for links."""
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)([^)]+)", rf"\1{home}/raw/main/\2", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)([^)]+)", rf"\1{home}/blob/main/\2", text)


def version() -> str:
    """Return the version of the package in this checkout, without importing it."""
    text = (ROOT / "g4spec" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)[0]


def main(words: list[str]) -> None:
    """Change the two files of a checkout, or compare versions."""
    if words[0] == "--check":
        if words[1] != version():
            sys.exit(f"the tag says {words[1]}, g4spec.__version__ {version()}: change one of them")
        return
    for name, change in (("pyproject.toml", urls), ("README.md", absolute)):
        text = (ROOT / name).read_text(encoding="utf-8")
        (ROOT / name).write_text(change(text, words[0].rstrip("/")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
