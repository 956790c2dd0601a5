"""Plant plausible faults in valid files of every kind and count those that `validate` reports.

    python benchmarks/cpu_faults.py [--kinds dflash eagle3] [--every 1] [--out benchmarks/results]

The faults are those of `tests/support/faults.py`, for every key and every tensor. Each file is
validated twice: with target and source, and with the target alone. Faults that are not reported are
listed. Kinds of the trained family use its checkpoints; the others use small random ones.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from watch import keep  # noqa: E402

from g4spec import convert  # noqa: E402
from g4spec.validate import validate  # noqa: E402
from tests.support import faults, tiny, tiny_drafts  # noqa: E402

FAMILY = ROOT / "examples" / "tiny"
TRAINED = ("target", "dflash", "dflash-speculators", "assistant")
LEAST = {"target and source": 0.99, "target alone": 0.60}


def sources(work: Path, wanted: list[str]) -> Iterator[tuple[str, Path, Path | None]]:
    """Name, checkpoint and the target's checkpoint of each kind, made as they are asked for."""
    for name in TRAINED:
        if not wanted or name in wanted:
            yield name, FAMILY / name, None if name == "target" else FAMILY / "target"
    base = tiny.target(work / "random-target")
    makers = {
        "experts": lambda path: tiny.target(path, experts=8),
        "per-layer": lambda path: tiny.target(path, k_eq_v=False, ple=16, shared=6),
        "dspark": lambda path: tiny_drafts.speculators_dspark(path, base),
        "deepspec": lambda path: tiny_drafts.deepspec_dspark(path, base),
        "eagle3": lambda path: tiny_drafts.eagle3(path, base),
        "peagle": lambda path: tiny_drafts.eagle3(path, base, depths=4),
        "dflash2": lambda path: tiny_drafts.zlab_dflash2(path, base),
    }
    for name, make in makers.items():
        if not wanted or name in wanted:
            yield name, make(work / name), None if name in ("experts", "per-layer") else base


def examine(name: str, source: Path, target: Path | None, work: Path, every: int) -> dict[str, Any]:
    """Plant the faults of one kind; returns shares and what was missed."""
    good, pair = work / f"{name}.gguf", None
    if target is not None:
        pair = work / f"target-of-{name}.gguf"
        convert.convert(target, pair)
    convert.convert(source, good, target=target)
    file = faults.read(good)
    planted = faults.faults(file)[::every]
    out: dict[str, Any] = {
        "faults": len(planted),
        "of_keys": sum(f.where in file.kv for f in planted),
    }
    for how, against in (("target and source", source), ("target alone", None)):
        known, missed = faults.spoken(validate(good, pair, against)), []
        began = time.perf_counter()
        for fault in planted:
            if not faults.named(file, fault, work / "planted.gguf", known, pair, against):
                missed.append(fault)
        keys = [f"{f.where}: {f.name}" for f in missed if f.where in file.kv]
        tensors = Counter(f.name for f in missed if f.where in file.tensors)
        out[how] = {
            "named": 1 - len(missed) / len(planted),
            "silent_keys": keys,
            "silent_tensors": dict(tensors.most_common()),
            "of_tensors": dict(Counter(f.name for f in planted if f.where in file.tensors)),
            "seconds": time.perf_counter() - began,
        }
    return out


def main() -> int:
    """Examine each kind and write the result; 1 if a share is below its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--every", type=int, default=1, help="plant every so many of the faults")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, source, target in sources(work, args.kinds):
            found[name] = got = examine(name, source, target, work, args.every)
            shares = ", ".join(f"{how} {got[how]['named']:.1%}" for how in LEAST)
            print(f"{name}: {got['faults']} faults, {shares}", flush=True)
    total = sum(v["faults"] for v in found.values())
    shares = {
        how: sum(v[how]["named"] * v["faults"] for v in found.values()) / total for how in LEAST
    }
    keep(
        args.out,
        "cpu-faults",
        {"faults": total, "every": args.every, "named": shares, "kinds": found},
    )
    print(f"all: {total} faults, " + ", ".join(f"{h} {s:.1%}" for h, s in shares.items()))
    return 0 if all(shares[how] >= least for how, least in LEAST.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
