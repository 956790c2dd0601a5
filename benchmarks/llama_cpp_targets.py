"""Compare targets of every size, and their assistants, with llama.cpp.

    python benchmarks/llama_cpp_targets.py --bin LLAMA_BUILD/bin --source LLAMA_SOURCE

Tiny random checkpoints: experts (as the 26B-A4B), per-layer embeddings with shared keys and values
(as E2B and E4B, also with the unused tensors of published files), and the key names of the 12B.
Both converters write each target and its assistant; tensors are compared byte for byte. llama.cpp
then drafts with the pair; our assistant, which scores every token like upstream's instead of
centroids first, proposes at the same positions of its text. Quantized checkpoints are compared
numerically: llama.cpp's converter dequantizes what we keep.

On the CPU llama.cpp computes GELU with a float16 table; where proposals differ, ours are compared
again with GELU rounded like that. `llama_cpp_exact_gelu.patch` removes the table from llama.cpp.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.llama_cpp_drafts import PROMPT, ours, shown
from benchmarks.upstream import CTX, Upstream
from g4spec.convert import convert
from g4spec.gguf import GGUF
from g4spec.runtime.engine import Engine
from tests.support import tiny, tiny_quantized

SHARED: dict[str, Any] = {"ple": 32, "shared": 6, "k_eq_v": False}
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": ({"experts": 8, "expert_inter": 32}, {}),
    "per-layer": (SHARED, {"centroids": 16}),
    "per-layer-spare": (SHARED | {"spare": True}, {"shared": 0}),
    "unified": (
        {"unified": True, "vision": True, "suppress": [7, 9]},
        {"unified": True, "shared": 0},
    ),
}
QUANTIZED = {
    "w4a16": (tiny_quantized.compressed, {}),
    "w4a16-zeros": (tiny_quantized.compressed, {"symmetric": False}),
    "w8a16": (tiny_quantized.compressed, {"bits": 8}),
    "gptq": (tiny_quantized.autoround, {}),
    "gptq-order": (tiny_quantized.autoround, {"shuffled": True}),
    "fp8-rows": (tiny_quantized.fp8, {}),
    "fp8-blocks": (tiny_quantized.fp8, {"block": (48, 48)}),
}
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def theirs(source: Path, folder: Path, type: str) -> Path:
    """Convert a folder with llama.cpp."""
    out = folder.parent / f"{folder.name}-theirs.gguf"
    script = source / "convert_hf_to_gguf.py"
    done = subprocess.run(
        [sys.executable, script, folder, "--outtype", type, "--outfile", out],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} {folder}: {done.stderr[-1000:]!r}")
    return out


def differing(a: Path, b: Path, values: bool = False) -> list[str]:
    """Return the tensors whose bytes, or dequantized values, differ between the files."""
    with GGUF(a) as x, GGUF(b) as y:
        read = GGUF.array if values else GGUF.raw
        return sorted(
            n
            for n in {*x.tensors, *y.tensors}
            if n not in x.tensors
            or n not in y.tensors
            or x.shapes()[n] != y.shapes()[n]
            or not np.array_equal(read(x, n), read(y, n))
        )


def size(upstream: Upstream, source: Path, work: Path, name: str) -> dict[str, Any]:
    """Compare one target and its assistant."""
    shape, head = TARGETS[name]
    target = tiny.target(work / name, dtype="F32", **shape)
    draft = tiny.assistant(work / f"{name}-assistant", target, dtype="F32", **head)
    for file in TOKENIZER:
        shutil.copy(target / file, draft / file)
    out: dict[str, Any] = {"differing": {}}
    for type in ("bf16", "f32"):
        for folder in (target, draft):
            mine = work / f"{folder.name}.gguf"
            convert(folder, mine, target=target if folder is draft else None, type=type)
            its = theirs(source, folder, type)
            out["differing"][f"{folder.name} {type}"] = differing(its, mine)
    files = work / f"{name}.gguf", work / f"{name}-assistant.gguf"
    engine = Engine.load(*files, n_ctx=CTX)
    vars(engine.draft)["centroids"] = None  # upstream scores every token
    (work / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    ids = engine.tokenizer.encode(PROMPT)
    text, rounds = upstream.draft(*files, "draft-mtp", 4, work / "prompt.txt", ids)
    return out | ours(engine, ids, text, rounds)


def quantized(source: Path, work: Path, name: str) -> list[str]:
    """Return the tensors of a quantized checkpoint whose values differ between both
    conversions."""
    make, options = QUANTIZED[name]
    folder = tiny.target(work / name, dtype="F32", layers=6, inter=128)
    make(folder, **options)
    path = folder / "config.json"
    convert(folder, work / "mine.gguf", type="f32")
    path.write_text(path.read_text().replace('"auto-round"', '"gptq"'))  # the name they know
    return differing(theirs(source, folder, "f32"), work / "mine.gguf", values=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name in ("bin", "source"):
        env = os.environ.get(f"LLAMA_CPP_{name.upper()}")
        parser.add_argument(f"--{name}", type=Path, default=env and Path(env), required=not env)
    parser.add_argument("--patches", nargs="+", default=[], help="what was changed in it: noted")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    upstream = Upstream(args.bin, args.source, args.patches)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result: dict[str, Any] = {
        "date": today,
        "llama.cpp": upstream.version(),
        "targets": {},
        "quantized, differing": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in TARGETS:
            result["targets"][name] = found = size(upstream, args.source, Path(folder), name)
            odd = {k: v for k, v in found["differing"].items() if v}
            print(
                f"{name:16} proposals equal {found['equal']}/{found['drafted']}",
                odd or "all tensors equal",
                shown(found),
            )
        for name in QUANTIZED:
            found_ = result["quantized, differing"][name] = quantized(
                args.source, Path(folder), name
            )
            print(f"{name:16} {found_ or 'all numbers equal'}")
    out = args.out or Path(__file__).parent / "results" / f"{today}-llama-cpp-targets.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
