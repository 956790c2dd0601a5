"""Hold more kinds of draft against llama.cpp: does it load them, and draft the same greedy tokens?

    python benchmarks/llama_cpp_drafts.py --bin LLAMA_BUILD/bin

Tiny random DSpark, EAGLE-3 and DFlash2 checkpoints are converted. For each file the kind's own
table says what upstream does with it (`g4spec.models.upstream`): the same, something a little
different, or refuse it. `llama-speculative-simple` logs what it drafts (not for DFlash2, of which
only loading and running is shown); our draft proposes at the same places of upstream's text.
Greedy, F32 files and caches.
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

from benchmarks.upstream import CTX, Round, Upstream
from g4spec.convert import convert
from g4spec.gguf import GGUF
from g4spec.models import of_gguf
from g4spec.models.spec import Committed
from g4spec.models.upstream import judge
from g4spec.runtime.engine import Engine
from g4spec.runtime.sampling import Sampler
from tests import tiny, tiny_drafts

PROMPT = "The list type has methods that change it in place, and the sorted function returns a new"
N_MAX = 3  # all that a block of 4 drafts behind its anchor; of EAGLE-3 as many
DRAFTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dspark": (tiny_drafts.speculators_dspark, {"block": 3}, "dspark"),
    "dspark-bonus": (tiny_drafts.speculators_dspark, {"from_anchor": False}, "dspark"),
    "dspark-full-vocabulary": (tiny_drafts.speculators_dspark,
                               {"from_anchor": False, "draft_vocab": None}, "dspark"),
    "dspark-no-confidence": (tiny_drafts.speculators_dspark,
                             {"from_anchor": False, "confidence": "none"}, "dspark"),
    "dspark-gated": (tiny_drafts.speculators_dspark, {"head": "gated"}, "dspark"),
    "dspark-rnn": (tiny_drafts.speculators_dspark, {"head": "rnn"}, "dspark"),
    "dspark-window": (tiny_drafts.speculators_dspark, {"from_anchor": False, "window": 8},
                      "dspark"),
    "deepspec": (tiny_drafts.deepspec_dspark, {"block": 3, "softcap": None}, "dspark"),
    "deepspec-softcap": (tiny_drafts.deepspec_dspark, {"block": 3}, "dspark"),
    "dflash-from-anchor": (tiny.speculators_dflash, {"sample_from_anchor": True}, "dflash"),
    "dflash2": (tiny_drafts.speculators_dflash2, {}, "dflash"),
    "dflash2-zlab": (tiny_drafts.zlab_dflash2, {"window": 4096, "layer_types":
                                                ["full_attention"] * 2}, "dflash"),
    "eagle3": (tiny_drafts.eagle3, {}, "eagle3"),
    "eagle3-norms": (tiny_drafts.eagle3, {"before_fc": True, "before_residual": False}, "eagle3"),
    "eagle3-specforge": (tiny_drafts.eagle3, {"layout": "specforge", "draft_vocab": None},
                         "eagle3"),
    "eagle3-window": (tiny_drafts.eagle3, {"window": 8}, "eagle3"),
    "eagle3-qwen": (tiny_drafts.eagle3, {"qwen": True}, "eagle3"),
    "p-eagle": (tiny_drafts.eagle3, {"depths": 3}, "eagle3"),
}  # fmt: skip


def ours(engine: Engine, ids: list[int], text: list[int], rounds: list[Round]) -> dict[str, Any]:
    """Our proposals where upstream made its own, on upstream's text."""
    target, draft = engine.target, engine.draft
    assert draft is not None
    whole, same, drafted, first = [*ids, *text], 0, 0, None
    features = list(target.prefill(whole))
    read = [Committed(r.ids, r.start, r.hidden, r.taps) for r in features]
    for turn in [r for r in rounds if r.drafted]:
        draft.reset()
        for r in read:
            n = max(0, min(len(r.ids), turn.position - r.start))
            if n:
                draft.commit(Committed(r.ids[:n], r.start, r.hidden[:n], r.taps[:n]))
        mine = draft.propose(turn.anchor, turn.position, len(turn.drafted), Sampler())
        equal = sum(a == b for a, b in zip(mine, turn.drafted, strict=False))
        same, drafted = same + equal, drafted + len(turn.drafted)
        if equal < len(turn.drafted) and first is None:
            first = {"at": turn.position, "ours": mine, "upstream": turn.drafted}
    return {"rounds": len(rounds), "drafted": drafted, "equal": same, "first_difference": first}


def one(upstream: Upstream, work: Path, name: str) -> dict[str, Any]:
    make, options, kind = DRAFTS[name]
    folder, file = work / name, work / f"{name}.gguf"
    make(folder, work / "target", **({"dtype": "F32"} | options))
    convert(folder, file, target=work / "target", type="f32")
    with GGUF(file) as g:
        module = of_gguf(g["general.architecture"], g.tensors)
        assert module is not None
        config = module.parse_gguf(g.kv, g.shapes())
    verdict = judge(module.LIMITS, config)
    out: dict[str, Any] = {"architecture": config.arch, "case": verdict.case,
                           "reasons": [r.what for r in verdict.reasons]}  # fmt: skip
    engine = Engine.load(work / "target.gguf", file, n_ctx=CTX)
    ids = engine.tokenizer.encode(PROMPT)
    (work / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    try:
        text, rounds = upstream.draft(
            work / "target.gguf", file, f"draft-{kind}", N_MAX, work / "prompt.txt", ids
        )
    except SystemExit as refused:
        lines = [x for x in str(refused).replace("\\n", "\n").splitlines() if "unknown model" in x]
        return out | {"upstream": "refuses it", "says": (lines or [str(refused)[-300:]])[0]}
    return out | {"upstream": "runs it"} | ours(engine, ids, text, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    env = os.environ.get("LLAMA_CPP_BIN")
    parser.add_argument("--bin", type=Path, default=env and Path(env))
    parser.add_argument("--only", nargs="+", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if not args.bin:
        raise SystemExit("give --bin DIR or set LLAMA_CPP_BIN to llama.cpp's programs")
    torch.set_num_threads(1)
    upstream = Upstream(args.bin, None)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result: dict[str, Any] = {"date": today, "llama.cpp": upstream.version(), "drafts": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        on = tiny.target(work / "target", nested=False, layers=6, period=3, window=16, vocab=512,
                         dtype="F32")  # fmt: skip
        convert(on, work / "target.gguf", type="f32")
        for name in args.only:
            result["drafts"][name] = found = one(upstream, work, name)
            print(f"{name:24} {found['architecture']:14} {found['case']:8} {found['upstream']:11}",
                  f"{found.get('equal', '-')}/{found.get('drafted', '-')}",
                  found.get("first_difference") or found.get("says") or "")  # fmt: skip
    out = args.out or Path(__file__).parent / "results" / f"{today}-llama-cpp-drafts.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
