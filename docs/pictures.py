"""Draw docs/colours.png from a real run: `pictures.py TARGET DRAFT`, on a machine with Chromium.

The terminal's own output of `generate --show-draft` is turned into HTML by rich and photographed.
docs/live.png is written by benchmarks/cpu_browser_page.py --pictures DIR, docs/sweep.png is the top
of a report of `g4spec bench`.
"""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PROMPT = (
    "Turn this record into JSON:\nname: Clara\ncity: Lisbon\nage: 41\njob: painter\n"
    "email: clara52@example.com"
)
THEME = TerminalTheme(
    (29, 32, 38),
    (216, 222, 233),
    [
        (59, 66, 82),
        (240, 113, 120),
        (126, 211, 133),
        (235, 203, 139),
        (129, 161, 193),
        (180, 142, 173),
        (136, 192, 208),
        (229, 233, 240),
    ],
)
PAGE = """<html style="background:#1d2026"><body style="margin:0;color:#d8dee9">
<pre style="margin:18px 22px;font:15px/1.5 'DejaVu Sans Mono',monospace">{code}</pre></body>"""


def terminal(command: list[str]) -> str:
    """Return what a command writes to a terminal of 84 columns."""
    ours, its = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "84"}
    with subprocess.Popen(command, stdout=its, stderr=subprocess.DEVNULL, env=env) as process:
        os.close(its)
        got = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not block:
                break
            got += block
        if process.wait():
            raise SystemExit(f"{command} ended with {process.returncode}")
    return got.decode().replace("\r\n", "\n")


def main(target: str, draft: str) -> None:
    """Run the model, and write the picture beside this file."""
    words = [
        "generate",
        "-m",
        target,
        "-md",
        draft,
        "--chat",
        "-n",
        "64",
        "--draft-max",
        "7",
        "--show-draft",
    ]
    said = terminal([str(Path(sys.executable).with_name("g4spec")), *words, "-p", PROMPT])
    shown = Console(record=True, width=84, file=io.StringIO())
    line = "$ g4spec generate -m target.gguf -md dflash.gguf --chat --draft-max 7 --show-draft"
    shown.print(f"{line} \\\n      -p '{PROMPT}'\n", style="dim", highlight=False)
    shown.print(Text.from_ansi(said))
    code = shown.export_html(theme=THEME, inline_styles=True, code_format=PAGE)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(code, encoding="utf-8")
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--window-size=840,410",
                f"--screenshot={Path(__file__).with_name('colours.png')}",
                str(page),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
