"""Compare converter and runtime with llama.cpp: tensor bytes, greedy text, draft proposals.

    python benchmarks/llama_cpp.py --bin LLAMA_BUILD/bin --source LLAMA_SOURCE [--family DIR]

A family is a folder of checkpoint folders: one target and any number of drafts. Without --family,
tiny random checkpoints are made. The result file has three comparisons:

- `bytes`: our GGUF and that of `convert_hf_to_gguf.py` for the same folder, tensor by tensor, and
  our Q8_0 and that of `llama-quantize`. Where upstream cannot convert, its message is kept.
- `text`: upstream's greedy text is fed to our target with the same F32 file; where our largest
  logit belongs to another token, the gap between the two logits is kept.
- `proposals`: `llama-speculative-simple` logs its drafts. Our draft, set to upstream's semantics,
  proposes at the same positions of the same text. These semantics are: the causality of the
  majority of layers applied to all, the window counted from each row, blocks of n_max + 1 rows, and
  a dense head. `committed_per_cycle` compares both semantics on the same prompts.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.upstream import CTX, NEW, Round, Upstream
from g4spec import convert
from g4spec.gguf import GGUF
from g4spec.models.dflash_backbone import shared_causality
from g4spec.runtime.engine import Engine, Options
from tests.support.one_sequence import SequenceDraft, SequenceTarget, single_sequence_with_draft

TYPES = ("f32", "bf16", "q8_0")
NEAR_TIE = 2e-3
"""Logits closer than this are not told apart: both sides round, in different orders."""

# No line break at the end: upstream drops one when it reads a prompt from a file.
PROMPTS = {
    "code": "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n\n\n"
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):",
    "text": "The list type has methods that change it in place, and the sorted function returns "
    "a new list. When the key argument is given, it is called once for each item. ",
    "sort": "def bubble_sort(items):\n    for i in range(len(items)):",
    "docs": "The following methods are defined:\n\n   append(x)\n      Add an item to the end of "
    "the list.\n\n   extend(iterable)",
    "class": "class Config:\n    def __init__(self, path=None):\n        self.path = path\n"
    "        self.values = {}\n\n    def load(self):",
    "long": "import os\nimport sys\n\n"
    + "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(40))
    + "def main():",
}


# ---- bytes


def reference(upstream: Upstream, folder: Path, out: Path, type: str, target: Path | None) -> str:
    """Convert with upstream's script. Return the last line of its output if it fails,
    otherwise ""."""
    assert upstream.source is not None
    args: list[str | Path] = [
        sys.executable,
        upstream.source / "convert_hf_to_gguf.py",
        folder,
        "--outfile",
        out,
        "--outtype",
        type,
    ]
    if target is not None:
        args += ["--target-model-dir", str(target)]
    env = os.environ | {"PYTHONPATH": str(upstream.source / "gguf-py")}
    done = subprocess.run(args, capture_output=True, text=True, check=False, env=env)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def plain(value: Any) -> Any:
    return (
        [round(v, 6) if isinstance(v, float) else v for v in value]
        if isinstance(value, list)
        else round(value, 6)
        if isinstance(value, float)
        else value
    )


def describe(file: GGUF, name: str) -> str:
    info = file.tensors[name]
    return f"{info.type} {info.shape}"


def same_bytes(mine: Path, theirs: Path) -> dict[str, Any]:
    """Return the differences of two files: tensors by type, shape and bytes; metadata by
    value."""
    with GGUF(mine) as a, GGUF(theirs) as b:
        both = [n for n in a.tensors if n in b.tensors]
        differ = [
            n
            for n in both
            if describe(a, n) != describe(b, n) or not np.array_equal(a.raw(n), b.raw(n))
        ]
        keys = [k for k in b.kv if not k.startswith("general.")]
        return {
            "tensors": len(both),
            "differ": {n: [describe(a, n), describe(b, n)] for n in differ},
            "only_ours": [n for n in a.tensors if n not in b.tensors],
            "only_upstream": [n for n in b.tensors if n not in a.tensors],
            "keys_only_upstream": [k for k in keys if k not in a.kv],
            "keys_only_ours": [
                k for k in a.kv if k not in b.kv and not k.startswith(("g4spec.", "general."))
            ],
            "values_differ": {
                k: [str(plain(a.kv[k]))[:80], str(plain(b.kv[k]))[:80]]
                for k in keys
                if k in a.kv and plain(a.kv[k]) != plain(b.kv[k])
            },
        }


def compare_bytes(
    upstream: Upstream, folders: dict[str, Path], target: str, work: Path
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, folder in folders.items():
        for type in TYPES:
            theirs = work / f"{name}-{type}-upstream.gguf"
            source = folder
            if "assistant" in name:  # upstream wants a tokenizer beside the checkpoint
                source = work / f"{name}-with-tokenizer"
                source.mkdir(exist_ok=True)
                for path in [*folders[target].glob("tokenizer*"), *folder.iterdir()]:
                    (source / path.name).write_bytes(path.read_bytes())
            said = reference(
                upstream, source, theirs, type, folders[target] if "dflash" in name else None
            )
            out[f"{name} {type}"] = (
                {"upstream": said} if said else same_bytes(work / f"{name}-{type}.gguf", theirs)
            )
        quantized = work / f"{name}-quantized.gguf"
        upstream.run("llama-quantize", "--pure", work / f"{name}-f32.gguf", quantized, "q8_0")
        ours = work / f"{name}-quantize.gguf"
        convert.quantize(work / f"{name}-f32.gguf", ours, "q8_0")
        out[f"{name} llama-quantize"] = same_bytes(ours, quantized)
    return out


# ---- text and proposals


def as_upstream(draft: Any, n_max: int) -> None:
    """Set our draft to the semantics of upstream for the same file."""
    config = draft.config
    if draft.name == "dflash":
        causal = shared_causality([s.causal for s in config.layers])
        draft.config = replace(
            config,
            layers=tuple(replace(s, causal=causal) for s in config.layers),
            window_from_anchor=False,
            block_size=n_max + 1,
        )
    elif draft.name == "gemma4-assistant":
        draft.centroids = None
    else:
        raise SystemExit(f"upstream's semantics of {draft.name} drafts are not written down here")


class RecordingChooser:
    """A greedy chooser that records the logits of each row."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def choose(self, logits: torch.Tensor, position: int) -> int:
        self.logits.append(logits)
        return int(logits.argmax())

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        return (self.choose(row, position + i) for i, row in enumerate(logits))


def replay(
    engine: Engine, ids: list[int], text: list[int], rounds: list[Round]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our choices, and our proposals, compared along upstream's text."""
    with single_sequence_with_draft(engine) as (target, draft):
        return replayed(target, draft, ids, text, rounds)


def replayed(
    target: SequenceTarget,
    draft: SequenceDraft,
    ids: list[int],
    text: list[int],
    rounds: list[Round],
) -> tuple[dict[str, Any], dict[str, Any]]:
    every = [*ids, *text]
    for read in target.prefill(ids[:-1]):
        draft.commit(read)
    choices: list[dict[str, Any]] = []
    proposals: list[dict[str, Any]] = []
    count = 0
    for r in rounds:
        if r.drafted:
            chooser = RecordingChooser()
            mine = draft.propose(r.anchor, r.position, len(r.drafted), chooser)
            count += len(r.drafted)
            proposals += first_difference(mine, r.drafted, chooser.logits, r.position + 1)
        step = target.step([r.anchor, *r.drafted], r.position)
        n = r.accepted + 1
        want = every[r.position + 1 : r.position + 1 + n]
        for j, (row, token) in enumerate(zip(step.logits, want, strict=False)):
            choices += first_difference([int(row.argmax())], [token], [row], r.position + 1 + j)
        draft.commit(step.read, n)
    return (
        {"tokens": len(text), **summary(choices)},
        {
            "rounds": len(rounds),
            "tokens": count,
            **summary(proposals),
            "accepted": sum(r.accepted for r in rounds),
            "committed_per_cycle_upstream": round(len(text) / len(rounds), 3),
        },
    )


def first_difference(
    mine: list[int], theirs: list[int], rows: list[torch.Tensor], position: int
) -> list[dict[str, Any]]:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a != b:
            gap = float(rows[i][a] - rows[i][b])
            return [{"position": position + i, "ours": a, "upstream": b, "our_gap": round(gap, 6)}]
    return []


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    real = [f for f in found if not f["our_gap"] < NEAR_TIE]
    return {"near_ties": len(found) - len(real), "different": len(real), "first": real[:3]}


def committed(engine: Engine, ids: list[int], n_max: int) -> float:
    run = engine.generate(ids, Options(n_predict=NEW, draft_max=n_max, ignore_eos=True))
    for _ in run:
        pass
    return round(run.stats.committed_per_cycle, 3)


def compare_drafts(
    upstream: Upstream, kinds: dict[str, str], target: str, work: Path, lengths: list[int]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    model = work / f"{target}-f32.gguf"
    for name, kind in kinds.items():
        draft = work / f"{name}-f32.gguf"
        for n_max in lengths:
            engine = Engine.load(model, draft, n_ctx=CTX)
            if engine.draft is None or n_max > engine.draft.max_tokens:
                continue
            for label, prompt in PROMPTS.items():
                path = work / "prompt.txt"
                path.write_text(prompt, encoding="utf-8")
                ids = engine.tokenizer.encode(prompt)
                assert ids == upstream.tokenize(model, path), "the two tokenizers disagree"
                ours = committed(engine, ids, n_max)
                text, rounds = upstream.draft(model, draft, kind, n_max, path, ids)
                drafter: Any = engine.draft
                trained = drafter.config
                as_upstream(drafter, n_max)
                said, proposed = replay(engine, ids, text, rounds)
                theirs = committed(engine, ids, n_max)
                drafter.config = trained
                if kind == "draft-mtp":
                    engine = Engine.load(model, draft, n_ctx=CTX)  # its head was replaced
                assert engine.draft is not None
                proposed |= {
                    "committed_per_cycle_ours": ours,
                    "committed_per_cycle_ours_as_upstream": theirs,
                }
                out[f"{name} n_max={n_max} {label} ({len(ids)} tokens)"] = {
                    "text": said,
                    "proposals": proposed,
                }
    return out


# ---- the family


def random_family(folder: Path) -> Path:
    """Make tiny random checkpoints, with drafts that upstream supports and drafts that it
    does not."""
    from tests.support import tiny

    target = tiny.target(folder / "target", nested=False, layers=6, period=3, window=16, vocab=512)
    draft: dict[str, Any] = {"layers": 3, "block": 8, "window": 16}
    tiny.zlab_dflash(folder / "zlab-dflash", target, **draft)
    tiny.zlab_dflash(
        folder / "zlab-dflash-non-causal",
        target,
        **draft,
        dflash_config={"mask_token_id": 4, "target_layer_ids": [0, 2, 4], "causal": False},
    )
    tiny.speculators_dflash(folder / "speculators-dflash", target, **draft)
    tiny.assistant(folder / "assistant", target)
    tiny.assistant(folder / "assistant-centroids", target, centroids=16)
    return folder


def convert_all(family: Path, work: Path) -> tuple[str, dict[str, Path], dict[str, str]]:
    """Convert every checkpoint. Return the target's name, folders by name, and draft types by
    name."""
    folders = {p.parent.name: p.parent for p in sorted(family.glob("*/config.json"))}
    kinds: dict[str, str] = {}
    target = next(n for n, p in folders.items() if convert.detect(p).is_target)
    for name, folder in folders.items():
        pair = None if name == target else folders[target]
        for type in TYPES:
            convert.convert(folder, work / f"{name}-{type}.gguf", target=pair, type=type)
        if pair:
            with GGUF(work / f"{name}-f32.gguf") as file:
                dflash = file.kv["general.architecture"] == "dflash"
            kinds[name] = "draft-dflash" if dflash else "draft-mtp"
    return target, folders, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    env = os.environ.get("LLAMA_CPP_BIN")
    parser.add_argument(
        "--bin", type=Path, default=env and Path(env), help="folder of its programs"
    )
    parser.add_argument("--source", type=Path, help="its source folder, for the byte comparison")
    parser.add_argument("--patches", nargs="+", default=[], help="what was changed in it: noted")
    parser.add_argument("--family", type=Path, help="folder of checkpoint folders")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if not args.bin:
        raise SystemExit("give --bin DIR or set LLAMA_CPP_BIN to llama.cpp's programs")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        family = args.family or random_family(work / "family")
        target, folders, kinds = convert_all(family, work)
        upstream = Upstream(args.bin, args.source, args.patches)
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        drafts = compare_drafts(upstream, kinds, target, work, args.lengths)
        result = {
            "date": today,
            "family": args.family.name if args.family else "tiny random",
            "checkpoints_sha256": {
                n: hashlib.sha256((p / "model.safetensors").read_bytes()).hexdigest()
                for n, p in folders.items()
            },
            "versions": {
                "llama.cpp": upstream.version(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "machine": platform.machine(),
            },
            "bytes": compare_bytes(upstream, folders, target, work) if args.source else "not run",
            "drafts": drafts,
        }
    result["tokens_a_cycle"] = cycles(drafts)
    label = "trained" if args.family else "random"
    out = args.out or Path(__file__).parent / "results" / f"{today}-llama-cpp-{label}.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(result, out)


def cycles(drafts: dict[str, Any]) -> dict[str, Any]:
    """Return the mean committed tokens per step by draft and n_max, with the draft's
    semantics and with upstream's."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, d in drafts.items():
        p = d["proposals"]
        found.setdefault(" ".join(name.split()[:2]), []).append(
            (p["committed_per_cycle_ours"], p["committed_per_cycle_ours_as_upstream"])
        )
    return {
        name: {
            "own": round(sum(a for a, _ in pairs) / len(pairs), 3),
            "as_upstream": round(sum(b for _, b in pairs) / len(pairs), 3),
        }
        for name, pairs in found.items()
    }


def report(result: dict[str, Any], out: Path) -> None:
    for name, found in result["drafts"].items():
        p, t = found["proposals"], found["text"]
        cycle = [
            p[f"committed_per_cycle_{who}"] for who in ("upstream", "ours", "ours_as_upstream")
        ]
        print(
            f"{name}: text {t['different']} of {t['tokens']} tokens differ, {t['near_ties']} "
            f"near-ties; proposals: {p['different']} of {p['rounds']} rounds, {p['near_ties']} "
            f"near-ties; tokens per step (upstream, ours, ours as upstream): {cycle}"
        )
    if isinstance(result["bytes"], dict):
        for name, f in result["bytes"].items():
            print(f"{name}:", f.get("upstream") or {k: v for k, v in f.items() if v})
    for name, means in result["tokens_a_cycle"].items():
        print(name, means)
    print(out)


if __name__ == "__main__":
    main()
