"""Check that llama.cpp loads our DSpark, EAGLE-3 and DFlash2 drafts and proposes the same tokens.

    python benchmarks/llama_cpp_drafts.py --bin LLAMA_BUILD/bin

Upstream is llama.cpp. The script converts tiny random checkpoints. For each file,
`g4spec.models.upstream` predicts whether upstream computes the same, something slightly different,
or refuses to load it. `llama-speculative-simple` logs the proposals of its draft; our draft
proposes at the same positions of the same text. Decoding is greedy; files and caches are F32. If
proposals differ, they are compared again with upstream's GELU (`benchmarks.upstream.gelu_table`).

llama.cpp logs proposals of DFlash2 drafts only with `llama_cpp_dflash2.patch`, which adds nothing
else: run `patch -p1 < llama_cpp_dflash2.patch` in the source folder, then build.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.llama_cpp import RecordingChooser, first_difference
from benchmarks.upstream import CTX, Round, Upstream, gelu_table
from g4spec.convert import convert
from g4spec.gguf import GGUF
from g4spec.models import find_kind
from g4spec.models.upstream import judge
from g4spec.runtime.engine import Engine
from tests.support import tiny, tiny_drafts
from tests.support.one_sequence import SequenceDraft, SequenceTarget, single_sequence_with_draft

PROMPT = "The list type has methods that change it in place, and the sorted function returns a new"
N_MAX = 7
"""Maximum draft length; drafts with smaller blocks propose fewer."""

DRAFTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dspark": (tiny_drafts.speculators_dspark, {"block": 3}, "dspark"),
    "dspark-bonus": (tiny_drafts.speculators_dspark, {"from_anchor": False}, "dspark"),
    "dspark-full-vocabulary": (
        tiny_drafts.speculators_dspark,
        {"from_anchor": False, "draft_vocab": None},
        "dspark",
    ),
    "dspark-no-confidence": (
        tiny_drafts.speculators_dspark,
        {"from_anchor": False, "confidence": "none"},
        "dspark",
    ),
    "dspark-gated": (tiny_drafts.speculators_dspark, {"head": "gated"}, "dspark"),
    "dspark-rnn": (tiny_drafts.speculators_dspark, {"head": "rnn"}, "dspark"),
    "dspark-window": (
        tiny_drafts.speculators_dspark,
        {"from_anchor": False, "window": 8},
        "dspark",
    ),
    "deepspec": (tiny_drafts.deepspec_dspark, {"block": 3, "softcap": None}, "dspark"),
    "deepspec-softcap": (tiny_drafts.deepspec_dspark, {"block": 3}, "dspark"),
    "dflash-from-anchor": (tiny.speculators_dflash, {"sample_from_anchor": True}, "dflash"),
    "dflash2": (tiny_drafts.speculators_dflash2, {}, "dflash"),
    "dflash2-zlab": (
        tiny_drafts.zlab_dflash2,
        {"window": 4096, "layer_types": ["full_attention"] * 2},
        "dflash",
    ),
    "dflash2-taps": (
        tiny_drafts.speculators_dflash2,
        {"block": 8, "kernel": 4, "group": 8, "rank": 16, "top_k": 7},
        "dflash",
    ),
    "eagle3": (tiny_drafts.eagle3, {}, "eagle3"),
    "eagle3-norms": (tiny_drafts.eagle3, {"before_fc": True, "before_residual": False}, "eagle3"),
    "eagle3-specforge": (
        tiny_drafts.eagle3,
        {"layout": "specforge", "draft_vocab": None},
        "eagle3",
    ),
    "eagle3-window": (tiny_drafts.eagle3, {"window": 8}, "eagle3"),
    "eagle3-qwen": (tiny_drafts.eagle3, {"qwen": True}, "eagle3"),
    "p-eagle": (tiny_drafts.eagle3, {"depths": 3}, "eagle3"),
}
"""Name -> function that writes the checkpoint, its options, and upstream's `--spec-type` without
"draft-"."""


def compare_proposals(
    engine: Engine, ids: list[int], text: list[int], rounds: list[Round]
) -> dict[str, Any]:
    """Compare our proposals with upstream's after the same tokens. If some differ, also count those
    that are equal with GELU rounded as in upstream's CPU backend."""
    found = replay(engine, ids, text, rounds)
    if found["first_difference"]:
        vars(engine.target.ops)["gelu_tanh"] = gelu_table
        found["equal_with_its_gelu"] = replay(engine, ids, text, rounds)["equal"]
    return found


def replay(engine: Engine, ids: list[int], text: list[int], rounds: list[Round]) -> dict[str, Any]:
    """Let our draft propose in every round of upstream; count the equal tokens."""
    with single_sequence_with_draft(engine) as (target, draft):
        return replay_rounds(target, draft, [*ids, *text], rounds)


def replay_rounds(
    target: SequenceTarget, draft: SequenceDraft, ids: list[int], rounds: list[Round]
) -> dict[str, Any]:
    same, drafted, different = 0, 0, []
    chunks = list(target.prefill(ids))
    for round in [r for r in rounds if r.drafted]:
        draft.begin()
        for rows in chunks:
            n = max(0, min(len(rows.batch), round.position - int(rows.batch.positions[0])))
            if n:
                draft.commit(rows, n)
        chooser = RecordingChooser()
        proposal = draft.propose(round.anchor, round.position, len(round.drafted), chooser)
        same += sum(a == b for a, b in zip(proposal, round.drafted, strict=True))
        drafted += len(round.drafted)
        different += first_difference(proposal, round.drafted, chooser.logits, round.position + 1)
    return {
        "rounds": len(rounds),
        "rounds_different": len(different),
        "drafted": drafted,
        "equal": same,
        "first_difference": different[0] if different else None,
    }


def check_draft(upstream: Upstream, work: Path, name: str) -> dict[str, Any]:
    """Convert one of DRAFTS, run upstream with it, and compare the proposals."""
    make, options, kind = DRAFTS[name]
    folder, file = work / name, work / f"{name}.gguf"
    make(folder, work / "target", **({"dtype": "F32"} | options))
    convert(folder, file, target=work / "target", type="f32")
    with GGUF(file) as g:
        module = find_kind(g["general.architecture"], g.tensors)
        assert module is not None
        config = module.parse_gguf(g.kv, g.shapes())
    verdict = judge(module.LIMITS, config)
    out: dict[str, Any] = {
        "architecture": config.arch,
        "case": verdict.case,
        "reasons": [r.what for r in verdict.reasons],
    }
    engine = Engine.load(work / "target.gguf", file, n_ctx=CTX)
    assert engine.draft is not None
    ids = engine.tokenizer.encode(PROMPT)
    (work / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    try:
        text, rounds = upstream.draft(
            work / "target.gguf",
            file,
            f"draft-{kind}",
            min(N_MAX, engine.draft.max_tokens),
            work / "prompt.txt",
            ids,
        )
    except SystemExit as refused:
        why = next(x for x in str(refused).splitlines() if "unknown model" in x)
        return out | {"upstream": "refuses it", "says": why.partition("error loading model: ")[2]}
    return out | {"upstream": "runs it"} | compare_proposals(engine, ids, text, rounds)


def remark(found: dict[str, Any]) -> str:
    """Return the last column of the printed line: an error message or the first difference."""
    if found.get("drafted") == 0:
        return "its log has no proposals"
    if not found.get("first_difference"):
        return str(found.get("says", ""))
    first, equal = found["first_difference"], found["equal_with_its_gelu"]
    return f"first difference: {first}; equal with upstream's GELU: {equal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    env = os.environ.get("LLAMA_CPP_BIN")
    parser.add_argument(
        "--bin", type=Path, default=env and Path(env), help="folder of llama.cpp's programs"
    )
    parser.add_argument(
        "--patches",
        nargs="+",
        default=[],
        help="names of patches in this build of llama.cpp, for the result file",
    )
    parser.add_argument(
        "--only", nargs="+", default=list(DRAFTS), choices=list(DRAFTS), help="drafts to compare"
    )
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if not args.bin:
        raise SystemExit("give --bin DIR or set LLAMA_CPP_BIN to llama.cpp's programs")
    torch.set_num_threads(1)
    upstream = Upstream(args.bin, None, args.patches)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result: dict[str, Any] = {"date": today, "llama.cpp": upstream.version(), "drafts": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checkpoint = tiny.target(
            work / "target", nested=False, layers=6, period=3, window=16, vocab=512, dtype="F32"
        )
        convert(checkpoint, work / "target.gguf", type="f32")
        for name in args.only:
            result["drafts"][name] = found = check_draft(upstream, work, name)
            print(
                f"{name:24} {found['architecture']:14} {found['case']:8} {found['upstream']:11}",
                f"{found.get('equal', '-')}/{found.get('drafted', '-')}",
                remark(found),
            )
    out = args.out or Path(__file__).parent / "results" / f"{today}-llama-cpp-drafts.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
