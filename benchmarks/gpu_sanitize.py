"""Run compute-sanitizer over everything that the small families do on a GPU.

    python benchmarks/gpu_sanitize.py racecheck [NAME ...] [--at-once 4] [--limit 500]

The tool is memcheck (accesses out of bounds) or racecheck (races in shared memory). Programs: the
trained family in five types with each of its drafts, also with the kernels for older GPUs; random
targets (dense, experts, per-layer embeddings) with drafts of every kind. Each program is a process:
it reads a prompt and generates with draft lengths 1, 7 and the maximum, greedy or sampled, then
three requests at once. It runs first without the tool, so that nothing is compiled under it. Only
kernels of this project are observed, and API errors are not reported: the driver is asked for
functions that it may not have.

Each program ends with a planted race and a planted access out of bounds (`gpu_planted.cu`). It
passes if the tool reports that one and nothing else: a tool that lost the process would also report
0 errors. memcheck knows only allocations of the driver, so torch allocates each tensor separately,
and graphs, for which that is impossible, are replayed kernel by kernel. A reported access ends only
that kernel: faults that end the context, in several processes at once, made a GPU unusable.

Writes `results/<date>-gpu-<tool>.json`. The exit code is 1 if a program does not pass or takes
longer than `--limit` seconds.

racecheck takes minutes and 20 GB of memory per program. Versions before CUDA 13.5 (2026.4) report
false races around mbarriers and bulk copies, by NVIDIA's release notes, and do not detect missing
proxy fences. Install a newer one with `pip install nvidia-cuda-sanitizer-api` (`--sanitizer`).
2026.4 reports a race for every ring of slots that bulk copies refill, also for a textbook one
(LOG.md, 2026-11-27): three of these programs, whose rings wrap, do not pass for this reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.measure import prompts
from g4spec.ops.sampling import Sampler
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from tests.emulator import runtime
from tests.gpu import family

GREEDY, RANDOM = Sampler(), Sampler(temperature=0.7, seed=1)
PROMPT_TOKENS, NEW_TOKENS, TEXTS = 100, 3, 3
BARRIERS = "128"  # of a block, at most; the tools count too few in an array
FIRST_PORT, PORTS = 20000, 16  # each program has its own: with the default ones they mix
ENVIRONMENT = {"G4SPEC_LINEINFO": "1", "OMP_NUM_THREADS": "1"}  # several at once
APART = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # set: each tensor is an allocation of its own
OURS = "regex=^_Z[0-9]"  # kernels in no namespace: not those of torch and cuBLAS
PLANTED = {"memcheck": "planted_access", "racecheck": "planted_race"}
ONE = re.compile(r"(?m)ERROR SUMMARY: 1 error$|SUMMARY: 1 hazard displayed \(1 error, 0 w")
KERNEL = re.compile(r"\bat (?:void )?(\w+).*\+0x")

Program = tuple[str, ...]
"""Target, draft, device and type of the cache."""


def programs(folder: Path) -> dict[str, Program]:
    """Make the files and return the programs by name."""
    out: dict[str, Program] = {}
    for type in family.TYPES:
        at = folder / type
        at.mkdir()
        files = family.trained(at, type)
        target = str(files.pop("target"))
        for name, draft in files.items():
            if type == "q4_k_m" or name == "dflash":
                out[f"{type} {name}"] = target, str(draft), "cuda", "f16"
    out["q4_k_m dflash q8_0-cache"] = target, str(files["dflash"]), "cuda", "q8_0"
    out["q4_k_m dflash portable"] = target, str(files["dflash"]), "cuda:portable", "f16"
    for kind in family.TARGETS:
        family.random(folder, kind)
    for kind, on in family.PAIRS:
        draft = family.draft(folder, kind, on)
        out[f"{on} {kind}"] = str(folder / f"{on}.gguf"), str(draft), "cuda", "q8_0"
    return out


def run(target: Path, draft: Path, device: str, cache_type: str) -> None:
    """Run one program: this is what the tools observe."""
    if APART in os.environ:
        graphs.Capture = runtime.Capture  # type: ignore[assignment, misc]
    engine = Engine.load(
        target, draft, device=device, cache_type=cache_type, n_ctx=family.CTX, parallel=TEXTS
    )
    assert engine.draft is not None
    text = prompts.prompts(engine.tokenizer, long_tokens=PROMPT_TOKENS)[-1].encode(engine.tokenizer)
    most = engine.draft.max_tokens
    accepted = 0
    for length, sampler in ((1, GREEDY), (min(7, most), RANDOM), (most, GREEDY)):
        done = family.generate(engine, text[:PROMPT_TOKENS], length, NEW_TOKENS, sampler)
        accepted += done.stats.accepted
    requests = [
        engine.submit(
            text[: PROMPT_TOKENS - 7 * i], Options(NEW_TOKENS, sampler, most, ignore_eos=True)
        )
        for i, sampler in enumerate((GREEDY, RANDOM, GREEDY))
    ]
    accepted += sum(r.stats.accepted for r in requests if list(r))
    print(f"accepted {accepted}")
    plant()


def plant() -> None:
    """Do what the tools must report."""
    file, x = str(Path(__file__).with_name("gpu_planted.cu")), torch.zeros(64, device="cuda")
    launch.kernel(file, PLANTED["racecheck"])(1, 64, x=x)
    plant_access()


def plant_access() -> None:
    """Do what memcheck must report."""
    file, x = str(Path(__file__).with_name("gpu_planted.cu")), torch.zeros(64, device="cuda")
    launch.kernel(file, PLANTED["memcheck"])(1, 1, x=x, n=64)
    torch.cuda.synchronize()


def sanitizer() -> str:
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def ended(command: list[str], env: dict[str, str], limit: float) -> tuple[str, int | None]:
    """Run a process. Return its output and exit code, or None if it and its children were
    killed at the limit."""
    with tempfile.TemporaryFile("w+") as out:
        started = subprocess.Popen(
            command,
            text=True,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            code: int | None = started.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            code = None
            started.wait()
        out.seek(0)
        return out.read(), code


def watched(
    name: str, program: Program, tool: str | None, by: str, port: int, limit: float
) -> dict[str, Any]:
    """Run a program under a tool, or alone, and return its result."""
    command = [sys.executable, __file__, "--run", *program]
    if tool is not None:
        command = [
            by,
            "--tool",
            tool,
            "--report-api-errors",
            "no",
            "--kernel-name",
            OURS,
            "--num-cuda-barriers",
            BARRIERS,
            "--target-processes",
            "application-only",
            "--port",
            str(port),
            "--max-connections",
            str(PORTS),
            "--launch-timeout",
            "120",
            "--force-synchronization-limit",
            "1",
            "--destroy-on-device-error",
            "kernel",
            *command,
        ]
    begin = time.perf_counter()
    text, code = ended(command, ENVIRONMENT | ({APART: "1"} if tool == "memcheck" else {}), limit)
    seconds = time.perf_counter() - begin
    kernels = Counter(KERNEL.findall(text))
    clean = code == 0
    if tool is not None:
        clean = clean and bool(ONE.search(text)) and set(kernels) == {PLANTED[tool]}
    lines, took = text.splitlines(), f"{seconds:.0f} s, exit {code}:"
    print(
        "clean" if clean else "NOT CLEAN",
        tool or "alone",
        name,
        took,
        *(lines[-1:] if clean else [*lines[:6], "...", *lines[-2:], dict(kernels)]),
        flush=True,
        sep=" " if clean else "\n",
    )
    return {
        "program": name,
        "tool": tool,
        "clean": clean,
        "exit": code,
        "seconds": round(seconds, 1),
        "reported": dict(kernels),
        "output": "" if clean else text[:6000],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=["memcheck", "racecheck"])
    parser.add_argument("names", nargs="*", help="parts of names of programs; all by default")
    parser.add_argument("--sanitizer", default=sanitizer(), help="default: the installed one")
    parser.add_argument("--limit", type=float, default=500)
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 4) // 4))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.at_once) as pool:
        chosen = {
            n: p
            for n, p in programs(Path(name)).items()
            if not args.names or any(part in n for part in args.names)
        }
        results: list[dict[str, Any]] = []
        for tool in (None, args.tool):
            jobs = [
                pool.submit(watched, n, p, tool, args.sanitizer, port, args.limit)
                for port, (n, p) in zip(count(FIRST_PORT, PORTS), chosen.items())
            ]
            results += [job.result() for job in jobs]
    clean = all(r["clean"] for r in results)
    said = subprocess.check_output([args.sanitizer, "--version"], text=True)
    watch.write_result(
        args.out,
        f"gpu-{args.tool}",
        {
            "sanitizer": said.strip().splitlines()[-1],
            "clean": clean,
            "results": results,
        },
    )
    return 0 if clean else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
    else:
        sys.exit(main())
