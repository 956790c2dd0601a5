"""An invented sweep result with plausible numbers, for tests of code that reads results."""

from __future__ import annotations

import json
from typing import Any

from g4spec.measure.bench import BenchConfig, SweepResult
from g4spec.measure.bench_summary import SweepRow
from g4spec.measure.draft_lengths import LENGTHS
from g4spec.measure.recommendation import recommend

HOLDS = {
    "code": 0.82,
    "chat": 0.62,
    "maths": 0.75,
    "extraction": 0.85,
    "rewriting": 0.9,
    "long": 0.7,
}


def row(category: str, length: Any, hold: float) -> SweepRow:
    """Return a row of a draft whose tokens are each accepted with probability `hold`; the cost
    grows with the draft length."""
    n = 4 if length == "auto" else length
    cycles = 200
    accepted = [round(cycles * hold ** (i + 1)) if i < n else 0 for i in range(15)]
    drafted = [cycles if i < n else 0 for i in range(15)]
    lengths = [cycles - accepted[0], *(accepted[i] - accepted[i + 1] for i in range(14))]
    committed = 1 + sum(accepted) / cycles
    draft, step = (1.2 + 0.25 * n if n else 0.0), 9.0 + 0.5 * n
    speed = 1000 * committed / (draft + step)
    ratio = speed / (1000 / 9.0)
    spread = (speed * 0.99, speed * 1.01)
    return SweepRow(
        category=category,
        length=length,
        prompts=8,
        tokens=round(cycles * committed),
        tokens_per_second=speed,
        spread=spread,
        prompt_range=(speed * 0.8, speed * 1.3),
        ratio=ratio,
        ratio_spread=(ratio * 0.99, ratio * 1.01),
        committed=committed,
        committed_range=(committed * 0.8, committed * 1.2),
        acceptance=sum(accepted) / sum(drafted) if n else 0.0,
        acceptance_range=(0.1, 0.9),
        drafted_by_position=drafted,
        accepted_by_position=accepted,
        accepted_lengths=[*lengths, accepted[14]],
        draft_ms=draft,
        step_ms=step,
        prefill_tokens_per_second=2000.0,
        looping=0,
    )


def result() -> dict[str, Any]:
    """Return the content of a result file."""
    lengths = (*LENGTHS, "auto")
    rows = [row(c, n, p) for c, p in {**HOLDS, "all": 0.78}.items() for n in lengths]
    memory = {
        "n_ctx": 4096,
        "weights": 31 << 20,
        "cache": 12 << 20,
        "draft_weights": 6 << 20,
        "draft_cache": 2 << 20,
        "workspace": 4 << 20,
        "total": 55 << 20,
        "grown": 61 << 20,
    }
    texts = {f"{c}-{i}": {"prompt": f"p{c}{i}", "text": f"t{c}{i}"} for c in HOLDS for i in (0, 1)}
    done = SweepResult(BenchConfig(lengths), rows, [], texts, ["a <b>note</b>"], memory)
    done.engine = {"n_ctx": 4096, "cache_type": "f32", "draft_window": None, "draft_p_min": 0.0}
    file = {
        "name": "target.gguf",
        "bytes": 30_000_000,
        "sha256": "ab" * 32,
        "kind": "gemma4",
        "types": {"q8_0": 57, "f32": 66},
    }
    provenance = {
        "date": "2026-11-21T10:00:00+00:00",
        "command": "bench -m target.gguf -md <draft>",
        "target": file,
        "draft": {**file, "name": "draft.gguf", "kind": "dflash"},
        "g4spec": "0.1.0",
        "commit": "0123456789ab",
        "python": "3.11.7",
        "torch": "2.11.0",
        "machine": {"cpu": "Example CPU", "cores": 2, "threads": 2, "os": "Linux 6.1"},
        "ops": "Ops",
        "overridden_ops": [],
    }
    data: dict[str, Any] = json.loads(json.dumps(done.json(provenance, recommend(rows).json())))
    return data
