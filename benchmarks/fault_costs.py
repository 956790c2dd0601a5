"""Measure what faults cost that `validate` does not detect without a source.

    python benchmarks/fault_costs.py RESULT_OF_cpu_faults.json [--every 10] [--kinds dflash]

Plants such faults in the trained drafts one at a time and counts tokens per step on built-in
prompts. A fault is costly if it lowers them by a tenth or more. Of those the result says which
`validate --probe` names: it fails below the published figure of the kind (`draft_probe.REACHED`).
Faults of keys are probed in full, with changed settings; settings do not explain those of tensors.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cpu_faults import good_files  # noqa: E402
from watch import keep  # noqa: E402

from g4spec.errors import G4Error  # noqa: E402
from g4spec.measure import draft_probe  # noqa: E402
from tests.support import faults  # noqa: E402

DRAFTS = ("dflash", "dflash-speculators", "assistant")
COSTLY = 0.9
"""Tokens per step over those of the good file, at or below which a fault counts as costly."""
TOKENS, PROMPTS = 48, 1
"""Tokens per text, and prompts per category."""


def tokens_per_step(target: Path, draft: Path) -> float:
    texts = draft_probe._measure(target, draft, TOKENS, PROMPTS, "cpu")
    return draft_probe.AcceptanceCounts.total([*texts]).per_step


def examine(kind: str, silent: list[str], work: Path) -> dict[str, Any]:
    """Return tokens per step of the good file and of each fault."""
    good, target, _ = good_files(kind, work)
    assert target is not None
    file, path = faults.read(good), work / "planted.gguf"
    planted = {f"{f.where}: {f.name}": f for f in faults.faults(file)}
    base = tokens_per_step(target, good)
    reached = draft_probe.REACHED.get(draft_probe._kind(good), draft_probe.LEAST)
    found: dict[str, Any] = {}
    for name in silent:
        fault = planted[name]
        fault.plant(file).write(path)
        entry: dict[str, Any] = {}
        try:
            entry["tokens_per_step"] = own = tokens_per_step(target, path)
            entry["of_good"] = own / base
            entry["probe_names"] = own < reached
            if fault.where in file.kv and not entry["probe_names"] and own <= COSTLY * base:
                entry["probe_names"] = not draft_probe.probe(target, path, count=PROMPTS).ok
        except G4Error as e:
            entry["refused"] = str(e)
        found[name] = entry
        print(kind, name, entry, flush=True)
    return {"tokens_per_step": base, "reached": reached, "faults": found}


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
        silent = [*alone["silent_keys"], *alone["silent_tensors"][:: args.every]]
        with tempfile.TemporaryDirectory() as folder:
            kinds[kind] = examine(kind, silent, Path(folder))
    ran = [e for k in kinds.values() for e in k["faults"].values() if "of_good" in e]
    costly = [e for e in ran if e["of_good"] <= COSTLY]
    total = {
        "run": len(ran),
        "costly": len(costly),
        "costly_named": sum(e["probe_names"] for e in costly),
        "every": args.every,
    }
    keep(args.out, "fault-costs", {**total, "kinds": kinds})
    print(total)


if __name__ == "__main__":
    main()
