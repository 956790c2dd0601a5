"""Load malformed and unusual targets and drafts on a GPU, under compute-sanitizer's memcheck.

    python benchmarks/gpu_malformed.py [NAME ...] [--plain] [--at-once 8] [--limit 500]
        [--out DIR]

For every kind of target and draft: each tensor missing, too short, of another type, or not finite,
and each list of ids out of range. Each file must be refused by an InputError before a kernel of
this project is launched. Then drafts whose blocks contain NaN, and targets and drafts with sizes
that no kernel supports: their output must equal that of the target alone, and the target's logits
must be close to the CPU reference. The cases are in `tests/gpu/hostile.py`.

Each kind runs in its own process. memcheck observes all kernels, including torch's; each tensor is
a separate allocation. At its end each process makes one access out of bounds, which memcheck must
report, and nothing else: a tool that lost the process would also report 0 errors. `--plain` runs
without the tool; run it first, so that kernels are compiled. Writes
`results/<date>-gpu-malformed.json`; the exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import gpu_sanitize, watch
from g4spec.runtime.cuda.step import graphs
from tests.emulator import runtime
from tests.gpu import family, hostile
from tests.support import malformed

Rows = list[dict[str, Any]]


def note(rows: Rows, part: str, what: str, why: str | None) -> None:
    rows.append({"part": part, "what": what, "wrong": why})
    if why:
        print(f"WRONG {part}: {what}: {why}", flush=True)


def targets(kind: str, folder: Path, rows: Rows) -> None:
    for what, write in hostile.broken_targets(hostile.write_target(folder, hostile.KINDS[kind])):
        path = write(folder / "broken.gguf")
        wrong = hostile.refused(partial(hostile.load_target, path))
        note(rows, f"malformed target, {kind}", what, wrong)


def drafts(kind: str, folder: Path, rows: Rows) -> None:
    target = hostile.write_target(folder, hostile.KINDS["dense"])
    engine = hostile.load_target(target)
    source = hostile.write_draft(folder, family.DRAFTS[kind])
    for what, write in hostile.broken_drafts(kind, source):
        path = write(folder / "broken.gguf")
        load = partial(hostile.build, path, engine.backend, engine.target)
        note(rows, f"malformed draft, {kind}", what, hostile.refused(load))
    name = malformed.blocks(source)[0]
    path = malformed.changed(source, folder / "blocks.gguf", name, malformed.bad_blocks)
    note(rows, f"draft of no numbers, {kind}", name, tried(hostile.wrong_text, target, path))


def odd_target(kind: str, folder: Path, rows: Rows) -> None:
    target = hostile.write_target(folder, hostile.ODD_TARGETS[kind])
    cache, near = hostile.CACHE.get(kind, "f16"), hostile.NEAR.get(kind, 0.05)
    note(rows, "unusual target", kind, tried(hostile.wrong_text, target, None, cache, near))


def odd_draft(kind: str, folder: Path, rows: Rows) -> None:
    target = hostile.write_target(folder, hostile.ON.get(kind, {}))
    draft = hostile.write_draft(folder, hostile.ODD_DRAFTS[kind])
    note(rows, "unusual draft", kind, tried(hostile.wrong_text, target, draft))


PROGRAMS: dict[str, Callable[[Path, Rows], None]] = {
    **{f"unusual draft: {kind}": partial(odd_draft, kind) for kind in hostile.ODD_DRAFTS},
    **{f"unusual target: {kind}": partial(odd_target, kind) for kind in hostile.ODD_TARGETS},
    **{f"draft {kind}": partial(drafts, kind) for kind in family.DRAFTS},
    **{f"target {kind}": partial(targets, kind) for kind in hostile.KINDS},
}
"""Programs by name; the slow ones first."""


def tried(run: Callable[..., str | None], *args: Any) -> str | None:
    """Return what is wrong with a run, exceptions included, or None."""
    try:
        return run(*args)
    except Exception as error:  # noqa: BLE001  whatever it is, it is what is looked for
        return f"{type(error).__name__}: {error}"[:400]


def run(part: str, out: Path) -> None:
    """Run one program: this is what memcheck observes."""
    if gpu_sanitize.APART in os.environ:  # graphs need torch's own memory
        graphs.Capture = runtime.Capture  # type: ignore[assignment, misc]
    faulthandler.dump_traceback_later(120, repeat=True)  # for a program that does not end
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        PROGRAMS[part](Path(folder), rows)
    torch.cuda.synchronize()
    out.write_text(json.dumps(rows))
    if gpu_sanitize.APART in os.environ:
        gpu_sanitize.plant_access()


def watched(part: str, tool: str | None, number: int, limit: float, out: Path) -> dict[str, Any]:
    """Run a program, under the tool or alone. Return its rows and what the tool reported."""
    command = [sys.executable, __file__, "--run", part, str(out)]
    more = {"CUDA_VISIBLE_DEVICES": str(number % max(torch.cuda.device_count(), 1))}
    port = gpu_sanitize.FIRST_PORT + number * gpu_sanitize.PORTS
    if tool is not None:
        more[gpu_sanitize.APART] = "1"
        command = [
            tool,
            "--tool",
            "memcheck",
            "--report-api-errors",
            "no",
            "--port",
            str(port),
            "--target-processes",
            "application-only",
            "--launch-timeout",
            "120",
            "--destroy-on-device-error",
            "kernel",
            *command,
        ]
    begin = time.perf_counter()
    text, code = gpu_sanitize.ended(command, gpu_sanitize.ENVIRONMENT | more, limit)
    rows = json.loads(out.read_text()) if out.is_file() else []
    reported = Counter(gpu_sanitize.KERNEL.findall(text))
    clean = code == 0 and bool(rows)
    if tool is not None:
        planted = {gpu_sanitize.PLANTED["memcheck"]}
        clean = clean and bool(gpu_sanitize.ONE.search(text)) and set(reported) == planted
    print(
        "clean" if clean else f"NOT CLEAN\n{text[:1500]}\n{text[-3000:]}",
        part,
        f"exit {code}",
        flush=True,
    )
    return {
        "part": part,
        "cases": len(rows),
        "clean": clean,
        "exit": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "reported": dict(reported),
        "by": dict(Counter(r["part"] for r in rows)),
        "wrong": [r for r in rows if r["wrong"]],
        "output": "" if clean else text[:6000],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--at-once", type=int, default=8, help="programs, shared among the GPUs")
    parser.add_argument("--plain", action="store_true", help="without compute-sanitizer")
    parser.add_argument("--sanitizer", default=gpu_sanitize.sanitizer())
    parser.add_argument("--limit", type=float, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tool = None if args.plain else args.sanitizer
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.at_once) as pool:
        jobs = [
            pool.submit(
                watched,
                part,
                tool,
                i,
                args.limit,
                Path(name) / f"{i}.json",
            )
            for i, part in enumerate(args.programs)
        ]
        results = [job.result() for job in jobs]
    fine = all(r["clean"] and not r["wrong"] for r in results)
    said = subprocess.check_output([tool, "--version"], text=True).strip() if tool else ""
    watch.write_result(
        args.out,
        "gpu-malformed",
        {
            "what": "malformed files are refused before any kernel, unusual ones run as torch ops",
            "sanitizer": said.splitlines()[-1] if said else None,
            "fine": fine,
            "cases": sum(r["cases"] for r in results),
            "results": results,
        },
    )
    print(f"{sum(r['cases'] for r in results)} files, {'fine' if fine else 'NOT FINE'}")
    return 0 if fine else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
