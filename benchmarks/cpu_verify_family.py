"""Check that no draft of the bundled family changes the output: 240 cases per draft.

    python benchmarks/cpu_verify_family.py [--family examples/tiny] [--cases 240] [--drafts dflash]

Cases cover all shipped prompts, nine draft lengths from 1 to 15 and `auto`, and eight sampler
settings, each with its own seed. The result is written as dated JSON. The exit code is 1 at the
first difference.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from pathlib import Path

from g4spec import convert
from g4spec.cli._demo_family import DRAFTS
from g4spec.measure import prompts, verify
from g4spec.measure import run_record as provenance
from g4spec.runtime.engine import Engine

ROOT = Path(__file__).parent
N_CTX, LONG_TOKENS = 2048, 800


def check(target: Path, draft: Path | str, count: int, n_predict: int) -> dict[str, object]:
    """Verify one draft and return its entry of the result."""
    engine = Engine.load(target, draft, n_ctx=N_CTX)
    assert engine.draft is not None
    texts = prompts.prompts(engine.tokenizer, long_tokens=LONG_TOKENS)
    todo = verify.cases(texts, count, engine.draft.max_tokens)
    began = time.perf_counter()
    verdict = verify.verify(engine, todo, n_predict)
    return {
        **verdict.json(),
        "acceptance": verdict.accepted / max(verdict.drafted, 1),
        "tokens_per_cycle": 1 + verdict.accepted / max(verdict.cycles, 1),
        "seconds": time.perf_counter() - began,
        "longest_proposal": engine.draft.max_tokens,
        "file": provenance.describe_file(draft) if isinstance(draft, Path) else None,
    }


def main() -> int:
    """Convert the family into a temporary folder, verify every draft, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", type=Path, default=ROOT.parent / "examples" / "tiny")
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--n-predict", type=int, default=32)
    parser.add_argument("--drafts", nargs="*", default=[*DRAFTS, "ngram"])
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target.gguf"
        convert.convert(args.family / "target", target)
        for name in args.drafts:
            draft: Path | str = name
            if name != "ngram":
                draft = Path(folder) / f"{name}.gguf"
                convert.convert(args.family / name, draft, target=target)
            found[name] = check(target, draft, args.cases, args.n_predict)
            v = found[name]
            print(
                f"{name}: {v['cases']} cases, {v['tokens']} tokens, ok {v['ok']}, "
                f"{v['tokens_per_cycle']:.2f} tokens per step, {v['seconds']:.0f} s",
                flush=True,
            )
            if not v["ok"]:
                print(v["mismatch"] or "the draft proposed nothing")
        result = {
            "date": datetime.date.today().isoformat(),
            "n_predict": args.n_predict,
            "target": provenance.describe_file(target),
            "machine": provenance.describe_machine(),
            "commit": provenance.commit(),
            "drafts": found,
        }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{result['date']}-verify-family.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0 if all(v["ok"] for v in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
