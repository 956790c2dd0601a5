"""Record how many drafted tokens would be accepted at each position, for `auto_lengths.py`.

    python benchmarks/auto_record.py [--family examples/tiny] [--prompts 3] [--n-predict 128]

Text does not depend on the draft, so one plain run with a proposal of full length at each position
covers every choice of lengths: a draft of n tokens has min(n, recorded) tokens accepted there.
(A block draft that is asked for fewer tokens proposes slightly different ones; this is ignored.)
Writes `tests/data/acceptance.json`: one hexadecimal digit per position, by draft and prompt, and
the seconds of a cycle by draft length, as `auto` measures them on this machine.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from g4spec import convert
from g4spec.cli._demo_family import DRAFTS
from g4spec.measure import prompts
from g4spec.measure import run_record as provenance
from g4spec.ops.sampling import Sampler
from g4spec.runtime.cycle_timing import CycleMeter
from g4spec.runtime.engine import Engine
from tests.support.one_sequence import SequenceDraft, SequenceTarget, single_sequence_with_draft

ROOT = Path(__file__).parent.parent
N_CTX, LONG_TOKENS = 2048, 800
MEASURED = 6
"""Measurements of the costs, the fastest of which counts: the machine may be busy."""


def follow(engine: Engine, ids: list[int], n_predict: int) -> str:
    """Return the accepted tokens at each position of the plain continuation of `ids`, one hex
    digit each."""
    assert engine.draft is not None
    sampler, longest = Sampler(), engine.draft.max_tokens
    with single_sequence_with_draft(engine) as (target, draft):
        for read in target.prefill(ids):
            draft.commit(read)
        position = len(ids)
        text = [sampler.choose(engine.target.logits(read.hidden[-1:])[0], position)]
        proposals = walked(engine, target, draft, text, position, n_predict + longest)
    held = []
    for at, drafted in enumerate(proposals[:n_predict], 1):
        pairs = zip(drafted, text[at:], strict=False)
        held.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafted)))
    return "".join(f"{min(h, len(text) - at):x}" for at, h in enumerate(held, 1))


def walked(
    engine: Engine,
    target: SequenceTarget,
    draft: SequenceDraft,
    text: list[int],
    position: int,
    most: int,
) -> list[list[int]]:
    """Return the proposals at every position until `most` tokens or a stop token."""
    assert engine.draft is not None
    sampler, proposals = Sampler(), list[list[int]]()
    while len(text) <= most and text[-1] not in engine.stop_ids:
        proposals.append(draft.propose(text[-1], position, engine.draft.max_tokens, sampler))
        out = target.step([text[-1]], position)
        draft.commit(out.read, 1)
        text.append(sampler.choose(out.logits[0], position + 1))
        position += 1
    return proposals


def record(target: Path, draft: Path | str, count: int, n_predict: int) -> dict[str, object]:
    """Return the texts and cycle costs of one draft."""
    engine = Engine.load(target, draft, n_ctx=N_CTX)
    assert engine.draft is not None
    texts = prompts.prompts(engine.tokenizer, count=count, long_tokens=LONG_TOKENS)
    meter = CycleMeter(engine.target, engine.draft, engine.pool, engine.scheduler.cycles.runners)
    measured = []
    for _ in range(MEASURED):
        found = meter.cycles()
        measured.append({count: s for (texts, count), s in found.items() if texts == 1})
    return {
        "longest": engine.draft.max_tokens,
        "seconds": {str(n): round(min(m[n] for m in measured), 5) for n in measured[0]},
        "held": {p.name: follow(engine, p.encode(engine.tokenizer), n_predict) for p in texts},
    }


def main() -> None:
    """Convert the family into a temporary folder and record every draft."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", type=Path, default=ROOT / "examples" / "tiny")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "acceptance.json")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target.gguf"
        convert.convert(args.family / "target", target)
        for name in [*DRAFTS, "ngram"]:
            draft: Path | str = name
            if name != "ngram":
                draft = Path(folder) / f"{name}.gguf"
                convert.convert(args.family / name, draft, target=target)
            found[name] = record(target, draft, args.prompts, args.n_predict)
            print(name, found[name]["seconds"], flush=True)
    result = {
        "machine": provenance.describe_machine(),
        "commit": provenance.commit(),
        "drafts": found,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
