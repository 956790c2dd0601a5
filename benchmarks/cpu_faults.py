"""Plant every plausible fault in a good file of every kind and count those that `validate` detects.

    python benchmarks/cpu_faults.py [--kinds dflash eagle3] [--every 1] [--workers 2] [--out DIR]

The faults are those of `tests/support/faults.py`, for every key and every tensor. Each is checked
twice: with target and source, and with the target alone. The result lists every undetected fault;
`fault_costs.py` measures what these cost. Targets, DFlash drafts and assistants are those of
`examples/tiny`; the other kinds are small random checkpoints.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from watch import write_result  # noqa: E402

from g4spec import convert  # noqa: E402
from g4spec.validate import validate  # noqa: E402
from tests.support import faults, tiny, tiny_drafts  # noqa: E402

FAMILY = ROOT / "examples" / "tiny"
TRAINED = ("target", "dflash", "dflash-speculators", "assistant")
TARGETS: dict[str, Callable[[Path], Path]] = {
    "experts": lambda path: tiny.target(path, experts=8),
    "per-layer": lambda path: tiny.target(path, k_eq_v=False, ple=16, shared=6),
}
DRAFTS: dict[str, Callable[[Path, Path], Path]] = {
    "dspark": tiny_drafts.speculators_dspark,
    "deepspec": tiny_drafts.deepspec_dspark,
    "eagle3": tiny_drafts.eagle3,
    "peagle": partial(tiny_drafts.eagle3, depths=4),
    "dflash2": tiny_drafts.zlab_dflash2,
}
KINDS = (*TRAINED, *TARGETS, *DRAFTS)
LEAST = {"target and source": 0.99, "target alone": 0.60}


def checkpoints(kind: str, work: Path) -> tuple[Path, Path | None]:
    """Return the checkpoint of a kind, and its target's if it is a draft; random ones are
    written."""
    if kind in TRAINED:
        return FAMILY / kind, None if kind == "target" else FAMILY / "target"
    if kind in TARGETS:
        return TARGETS[kind](work / kind), None
    target = tiny.target(work / "random-target")
    return DRAFTS[kind](work / kind, target), target


def good_files(kind: str, work: Path) -> tuple[Path, Path | None, Path]:
    """Return the converted file of a kind, its target's file if it is a draft, and its
    checkpoint."""
    source, target = checkpoints(kind, work)
    good, pair = work / "good.gguf", None
    if target is not None:
        pair = work / "target.gguf"
        convert.convert(target, pair)
    convert.convert(source, good, target=target)
    return good, pair, source


def examine(kind: str, every: int) -> dict[str, Any]:
    """Plant the faults of one kind; return the detected shares and the undetected faults."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        good, pair, source = good_files(kind, work)
        file = faults.read(good)
        planted = faults.faults(file)[::every]
        out: dict[str, Any] = {
            "faults": len(planted),
            "of_keys": sum(f.where in file.kv for f in planted),
            "of_tensors": dict(Counter(f.name for f in planted if f.where in file.tensors)),
        }
        for how, against in (("target and source", source), ("target alone", None)):
            began = time.perf_counter()
            known = faults.findings(validate(good, pair, against))
            missed = [
                fault
                for fault in planted
                if not faults.named(file, fault, work / "planted.gguf", known, pair, against)
            ]
            out[how] = {
                "named": 1 - len(missed) / len(planted),
                "silent_keys": [f"{f.where}: {f.name}" for f in missed if f.where in file.kv],
                "silent_tensors": [
                    f"{f.where}: {f.name}" for f in missed if f.where in file.tensors
                ],
                "seconds": time.perf_counter() - began,
            }
    return out


def main() -> int:
    """Examine each kind and write the result; return 1 if a share is below its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--every", type=int, default=1, help="plant one in this many faults")
    parser.add_argument("--workers", type=int, default=1, help="processes, a kind each")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        jobs = {pool.submit(examine, kind, args.every): kind for kind in args.kinds}
        for job in as_completed(jobs):
            found[jobs[job]] = got = job.result()
            named = ", ".join(f"{how} {got[how]['named']:.1%}" for how in LEAST)
            print(f"{jobs[job]}: {got['faults']} faults, {named}", flush=True)
    kinds = {kind: found[kind] for kind in args.kinds}
    total = sum(v["faults"] for v in kinds.values())
    shares = {
        how: sum(v[how]["named"] * v["faults"] for v in kinds.values()) / total for how in LEAST
    }
    write_result(
        args.out,
        "cpu-faults",
        {"faults": total, "every": args.every, "named": shares, "kinds": kinds},
    )
    print(f"all: {total} faults, " + ", ".join(f"{h} {s:.1%}" for h, s in shares.items()))
    return 0 if all(shares[how] >= least for how, least in LEAST.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
