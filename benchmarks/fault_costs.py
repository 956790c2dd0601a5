"""Measure what faults cost that `validate` does not detect without a source.

    python benchmarks/fault_costs.py RESULT_OF_cpu_faults.json [--every 10] [--kinds dflash]

Plants such faults in the trained drafts one at a time and counts tokens per step on built-in
prompts. A fault is costly if it lowers them by a tenth or more. Each costly fault is probed as
`validate --probe` does without the source, and the result lists the findings. With the source the
probe names all of them, because it compares with the good file. The good files are probed, too:
they must have no findings. To save time, the settings that are changed are those of the key with
the fault, and none for a fault of a tensor.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cpu_faults import good_files  # noqa: E402
from watch import write_result  # noqa: E402

from g4spec.errors import G4Error  # noqa: E402
from g4spec.gguf import GGUF, KV  # noqa: E402
from g4spec.measure import draft_probe, draft_variants  # noqa: E402
from tests.support import faults  # noqa: E402

DRAFTS = ("dflash", "dflash-speculators", "assistant")
COSTLY = 0.9
"""Tokens per step over those of the good file, at or below which a fault counts as costly."""
UNUSED = ("general.", "tokenizer.", "g4spec.stop_ids", "g4spec.target.", "g4spec.dflash.t2d")
"""Keys from which no proposal is computed; their faults are left out."""
TOKENS, PROMPTS = 48, 1
"""Tokens per text, and prompts per category."""


def tokens_per_step(target: Path, draft: Path) -> float:
    texts = draft_probe._measure(target, draft, TOKENS, PROMPTS, "cpu")
    return draft_probe.AcceptanceCounts.total([*texts]).per_step


def findings(target: Path, draft: Path, key: str = "") -> list[str]:
    """Probe a pair, with settings of keys that begin with `key` changed; return the key or tensor
    of each finding, with its found value."""

    def settings(file: GGUF) -> Iterator[tuple[str, KV]]:
        return ((name, kv) for name, kv in draft_variants.variants(file) if name.startswith(key))

    with mock.patch.object(draft_probe, "variants", settings):
        found = draft_probe.probe(target, draft).findings
    return [f"{f.where}: {f.found}" for f in found]


def examine(kind: str, silent: list[str], work: Path) -> dict[str, Any]:
    """Return tokens per step of the good file and of each fault, and findings of the probe."""
    good, target, _ = good_files(kind, work)
    assert target is not None
    file, path = faults.read(good), work / "planted.gguf"
    planted = {f"{f.where}: {f.name}": f for f in faults.faults(file)}
    base = tokens_per_step(target, good)
    of_good = findings(target, good)
    print(kind, base, of_good, flush=True)
    costs: dict[str, Any] = {}
    for name in silent:
        fault = planted[name]
        fault.plant(file).write(path)
        entry: dict[str, Any] = {}
        try:
            entry["tokens_per_step"] = own = tokens_per_step(target, path)
            entry["of_good"] = own / base
            if own <= COSTLY * base:
                entry["findings"] = findings(target, path, fault.where)
        except G4Error as e:
            entry["refused"] = str(e)
        costs[name] = entry
        print(kind, name, entry, flush=True)
    return {"tokens_per_step": base, "findings": of_good, "faults": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path, help="result of cpu_faults.py")
    parser.add_argument("--kinds", nargs="*", default=DRAFTS, choices=DRAFTS)
    parser.add_argument("--every", type=int, default=1, help="plant one in this many tensor faults")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    known = json.loads(args.result.read_text(encoding="utf-8"))["kinds"]
    kinds: dict[str, Any] = {}
    for kind in args.kinds:
        alone = known[kind]["target alone"]
        keys = [name for name in alone["silent_keys"] if not name.startswith(UNUSED)]
        silent = [*keys, *alone["silent_tensors"][:: args.every]]
        with tempfile.TemporaryDirectory() as folder:
            kinds[kind] = examine(kind, silent, Path(folder))
    ran = [e for k in kinds.values() for e in k["faults"].values() if "of_good" in e]
    costly = [e for e in ran if e["of_good"] <= COSTLY]
    total = {
        "run": len(ran),
        "costly": len(costly),
        "costly_named": sum(bool(e["findings"]) for e in costly),
        "findings_of_good_files": sum(len(k["findings"]) for k in kinds.values()),
        "every": args.every,
    }
    which = "" if set(args.kinds) == set(DRAFTS) else "-" + "-".join(args.kinds)
    write_result(args.out, f"fault-costs{which}", {**total, "kinds": kinds})
    print(total)


if __name__ == "__main__":
    main()
