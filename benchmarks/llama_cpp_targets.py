"""Compare targets of every size, and their assistants, with llama.cpp.

    python benchmarks/llama_cpp_targets.py --bin LLAMA_BUILD/bin --source LLAMA_SOURCE

The checkpoints are tiny and random: experts (as in the 26B-A4B), per-layer embeddings with shared
keys and values (as in E2B and E4B, also with the unused tensors of published files), and the key
names of the 12B. llama.cpp and g4spec convert each target and its assistant; the tensors are
compared byte for byte. llama.cpp then drafts with the pair, and our assistant proposes at the same
positions of the same text. Its centroid head is disabled, because llama.cpp scores every token.
Quantized checkpoints are compared by dequantized values, because llama.cpp's converter dequantizes
types that g4spec keeps.

On the CPU llama.cpp computes GELU with a float16 table; where proposals differ, ours are compared
again with GELU rounded in this way. `llama_cpp_exact_gelu.patch` removes the table from llama.cpp.
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

from benchmarks.llama_cpp_drafts import PROMPT, compare_proposals, remark
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
QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
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


def convert_with_llama_cpp(source: Path, folder: Path, type: str) -> Path:
    """Convert a checkpoint folder with the converter in llama.cpp's source folder."""
    out = folder.parent / f"{folder.name}-llama-cpp.gguf"
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
    """Return the tensors that differ between two files: in bytes, or with `values` in dequantized
    values."""
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


def compare_target(upstream: Upstream, source: Path, work: Path, name: str) -> dict[str, Any]:
    """Convert one of TARGETS and its assistant with both converters; compare tensors and
    proposals."""
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
            other = convert_with_llama_cpp(source, folder, type)
            out["differing"][f"{folder.name} {type}"] = differing(other, mine)
    files = work / f"{name}.gguf", work / f"{name}-assistant.gguf"
    engine = Engine.load(*files, n_ctx=CTX)
    vars(engine.draft)["centroids"] = None  # upstream scores every token
    (work / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    ids = engine.tokenizer.encode(PROMPT)
    text, rounds = upstream.draft(*files, "draft-mtp", 4, work / "prompt.txt", ids)
    return out | compare_proposals(engine, ids, text, rounds)


def compare_quantized(source: Path, work: Path, name: str) -> list[str]:
    """Convert one of QUANTIZED with both converters; return the tensors whose values differ."""
    make, options = QUANTIZED[name]
    folder = tiny.target(work / name, dtype="F32", layers=6, inter=128)
    make(folder, **options)
    path = folder / "config.json"
    convert(folder, work / "mine.gguf", type="f32")
    # llama.cpp knows auto-round's format by the name of GPTQ.
    path.write_text(path.read_text().replace('"auto-round"', '"gptq"'))
    return differing(convert_with_llama_cpp(source, folder, "f32"), work / "mine.gguf", values=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, what in (
        ("bin", "folder of llama.cpp's programs"),
        ("source", "llama.cpp's source folder"),
    ):
        env = os.environ.get(f"LLAMA_CPP_{name.upper()}")
        parser.add_argument(
            f"--{name}", type=Path, default=env and Path(env), required=not env, help=what
        )
    parser.add_argument(
        "--patches",
        nargs="+",
        default=[],
        help="names of patches in this build of llama.cpp, for the result file",
    )
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
            result["targets"][name] = found = compare_target(
                upstream, args.source, Path(folder), name
            )
            odd = {k: v for k, v in found["differing"].items() if v}
            print(
                f"{name:16} proposals equal {found['equal']}/{found['drafted']}",
                odd or "all tensors equal",
                remark(found),
            )
        for name in QUANTIZED:
            found_ = result["quantized, differing"][name] = compare_quantized(
                args.source, Path(folder), name
            )
            print(f"{name:16} {found_ or 'all values equal'}")
    out = args.out or Path(__file__).parent / "results" / f"{today}-llama-cpp-targets.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
