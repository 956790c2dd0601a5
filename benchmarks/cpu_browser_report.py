"""Test a report of `g4spec bench` in a real browser, headless.

    python benchmarks/cpu_browser_report.py [demo/report.html demo/bench.json]

Without arguments the report shows invented numbers. Uses wide and phone windows, light and dark:

- no console message, and nothing is loaded;
- every chart and each of its parts has a size, and the page is not wider than the window;
- the numbers in the table equal those in the JSON file.

Needs Chromium or Chrome (Debian: `apt-get install chromium`); `CHROME` selects another binary.
Measurements run in a script that is added to a copy of the page; the console is read from the
unchanged page. --pictures DIR writes screenshots. The exit code is 1 if a check fails.
"""

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

WINDOWS = {"wide": (1200, 900), "phone": (500, 900)}
SCHEMES = {"dark": 0, "light": 1}
FIELDS = {
    "tokens_per_second": "{:.1f}",
    "ratio": "{:.2f}",
    "committed": "{:.2f}",
    "draft_ms": "{:.2f}",
    "step_ms": "{:.2f}",
    "prefill_tokens_per_second": "{:.0f}",
}

MEASURE = """<script>
addEventListener("load", () => {
  const size = e => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
  const cells = {};
  for (const row of document.querySelectorAll("tr[data-row]"))
    for (const cell of row.querySelectorAll("td[data-field]"))
      cells[row.dataset.row + " " + cell.dataset.field] = cell.innerText;
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify({
    charts: [...document.querySelectorAll("svg")].map(s => [s.getAttribute("aria-label"), size(s)]),
    marks: [...document.querySelectorAll("svg circle, svg path, svg polyline, .bar")].map(size),
    texts: [...document.querySelectorAll("svg text")].filter(t => t.textContent).map(size),
    width: document.documentElement.scrollWidth, window: innerWidth, cells: cells,
    background: getComputedStyle(document.body).backgroundColor,
    lead: document.getElementById("recommendation").innerText,
    loaded: performance.getEntriesByType("resource").map(r => r.name),
  });
  document.body.append(out);
});
</script>"""


def browser() -> str:
    """Return the path of a browser, or exit."""
    names = [os.environ.get("CHROME", ""), "chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        sys.exit("no Chromium or Chrome found: install one, or name it in CHROME")
    return found


def run(page: Path, window: str, scheme: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Open `page` and close it again."""
    wide, high = WINDOWS[window]
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [
                browser(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                f"--window-size={wide},{high}",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                *options,
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )


def measured(page: Path, window: str, scheme: str) -> dict:
    """Return the layout of the page as the browser renders it."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', MEASURE, text)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.html"
        copy.write_text(text, encoding="utf-8")
        dom = run(copy, window, scheme, "--dump-dom").stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the page did not finish loading"
    return json.loads(html.unescape(found[1]))


def problems(seen: dict, data: dict, console: str) -> list[str]:
    """Return the failures in one view of the page."""
    wrong = [line for line in console.splitlines() if "CONSOLE" in line]
    wrong += [f"loaded {name}" for name in seen["loaded"]]
    wrong += [f"chart without size: {n}" for n, (w, h) in seen["charts"] if w < 100 or h < 60]
    wrong += [f"mark without size: {s}" for s in seen["marks"] if max(s) <= 0]
    wrong += [f"text without size: {s}" for s in seen["texts"] if min(s) <= 0]
    categories = {r["category"] for r in data["rows"]} - {"all"}
    if len(seen["charts"]) < len(categories) + 1:
        wrong.append(f"{len(seen['charts'])} charts for {len(categories)} categories")
    if seen["width"] > seen["window"]:
        wrong.append(f"page of {seen['width']} pixels in a window of {seen['window']}")
    if seen["lead"].strip() != data["recommendation"]["words"]:
        wrong.append(f"recommendation: {seen['lead']!r}")
    for row in data["rows"]:
        for field, form in FIELDS.items():
            key = f"{row['category']}/{row['length']} {field}"
            if seen["cells"].get(key) != form.format(row[field]):
                wrong.append(f"{key}: {seen['cells'].get(key)} on the page, {row[field]} measured")
    return wrong


def made_up(folder: Path) -> tuple[Path, Path]:
    """Return a report of invented numbers."""
    from g4spec.measure import bench_report as report
    from tests.support import bench_result

    page, data = folder / "report.html", bench_result.result()
    page.write_text(report.page(data), encoding="utf-8")
    (folder / "bench.json").write_text(json.dumps(data))
    return page, folder / "bench.json"


def main() -> int:
    """Check all views and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    args = parser.parse_args()
    if args.page and not args.data:
        parser.error("pass the JSON file too")
    failed, backgrounds = False, set()
    with tempfile.TemporaryDirectory() as folder:
        page, source = (args.page, args.data) if args.page else made_up(Path(folder))
        data = json.loads(source.read_text(encoding="utf-8"))
        for window in WINDOWS:
            for scheme in SCHEMES:
                console = run(page, window, scheme, "--dump-dom").stderr
                seen = measured(page, window, scheme)
                wrong = problems(seen, data, console)
                backgrounds.add(seen["background"])
                failed |= bool(wrong)
                print(
                    f"{window}, {scheme}: {len(seen['charts'])} charts, {len(seen['cells'])} "
                    f"numbers, {'; '.join(wrong) or 'ok'}"
                )
                if args.pictures:
                    args.pictures.mkdir(parents=True, exist_ok=True)
                    picture = args.pictures.resolve() / f"report-{window}-{scheme}.png"
                    run(page, window, scheme, f"--screenshot={picture}")
    if len(backgrounds) != len(SCHEMES):
        print(f"light and dark look alike: {backgrounds}")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
