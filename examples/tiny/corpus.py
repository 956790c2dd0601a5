"""The pinned corpus: Python's library sources (3.11.7) and documentation (3.11.2).

`python corpus.py build LIB DOC` writes `corpus.tar.xz` and `corpus.sha256` from the `Lib` folder of
a CPython 3.11.7 installation and the `_sources` folder of the documentation of 3.11.2 (Debian's
python3.11-doc); all other scripts read the archive and check it against the list.
The files are licensed under the PSF License Agreement (the archive holds its text).
"""

import hashlib
import io
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARCHIVE, LIST = HERE / "corpus.tar.xz", HERE / "corpus.sha256"
SKIP_DIRS = {
    "site-packages",
    "__pycache__",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "encodings",
    "data",
    "idle_test",
    "cjkencodings",
    "crashers",
    "bad_coding",
    "config-3.11-x86_64-linux-gnu",
}
MAX_BYTES = 300_000


def wanted(path: Path, text: str) -> bool:
    """Return True for texts of moderate size that are not tables of numbers."""
    if not 400 < len(text) < MAX_BYTES or path.name == "topics.py":
        return False
    return sum(c.isdigit() for c in text) < 0.06 * len(text)


def collect(lib: Path, doc: Path) -> dict[str, bytes]:
    """Return relative path -> content of every file of the corpus, sorted by path."""
    files = {
        f"doc/{p.relative_to(doc).as_posix()}": p.read_bytes()
        for p in sorted(doc.rglob("*.rst.txt"))
    }
    for path in sorted(lib.rglob("*.py")):
        relative = path.relative_to(lib)
        if SKIP_DIRS & set(relative.parts):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if wanted(path, text):
            files[relative.as_posix()] = path.read_bytes()
    return files


def build(lib: Path, doc: Path) -> None:
    """Write the archive (fixed owner, time and order) and its list of checksums."""
    files = collect(lib, doc)
    files["LICENSE.txt"] = (lib / "LICENSE.txt").read_bytes()
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as tar:
        for name, blob in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    LIST.write_text(
        "".join(f"{hashlib.sha256(blob).hexdigest()}  {name}\n" for name, blob in files.items())
    )


def load() -> dict[str, str]:
    """Return path -> text of the corpus; raise ValueError if a file differs from the list."""
    wanted_digests = dict(reversed(line.split("  ", 1)) for line in LIST.read_text().splitlines())
    texts: dict[str, str] = {}
    with tarfile.open(ARCHIVE) as tar:
        for member in tar:
            blob = tar.extractfile(member).read()
            if hashlib.sha256(blob).hexdigest() != wanted_digests.pop(member.name, None):
                raise ValueError(f"{member.name}: not the file of the pinned corpus")
            texts[member.name] = blob.decode("utf-8")
    if wanted_digests:
        raise ValueError(f"the archive lacks {sorted(wanted_digests)[:3]}")
    del texts["LICENSE.txt"]
    return texts


def held_out(name: str) -> bool:
    """Return True for the one file in twenty that is not trained on."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 7


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "build":
        sys.exit("usage: python corpus.py build LIB DOC")
    build(Path(sys.argv[2]), Path(sys.argv[3]))
