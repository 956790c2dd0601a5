"""Run files of the trained family in every type in both programs: llama.cpp's here, ours there.

    python benchmarks/llama_cpp_types.py --bin LLAMA_BUILD/bin [--types Q4_0 ...] [--cases 2]

Build with CMake the targets llama-quantize, llama-perplexity, llama-speculative-simple and
llama-tokenize of a source folder of llama.cpp, `-DLLAMA_BUILD_EXAMPLES=ON`.

Files of llama-quantize, each type: whether logits of a text equal, bit for bit, those of the same
file dequantized to F32 by the package gguf; perplexity of ours over that of llama-perplexity;
`verify` with each draft. Files of our `quantize`, each type: the same perplexities of the target,
and tokens per step of each draft in llama-speculative-simple, with the target in F32. The result is
written as dated JSON. The exit code is 1 if logits differ, a perplexity differs by more than 0.5 %,
a draft changes a text, or llama.cpp does not open a file or accepts nothing of a draft.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

import gguf  # noqa: E402
import numpy as np  # noqa: E402
from cpu_quality import texts  # noqa: E402
from llama_cpp import PROMPTS  # noqa: E402
from upstream import Upstream  # noqa: E402
from watch import write_result  # noqa: E402

from g4spec import convert  # noqa: E402
from g4spec.errors import G4Error  # noqa: E402
from g4spec.gguf import GGUF, TensorData, imatrix, write  # noqa: E402
from g4spec.measure import importance, perplexity, prompts, text_chunks, verify  # noqa: E402
from g4spec.quant import policy  # noqa: E402
from g4spec.runtime.engine import Engine  # noqa: E402

FAMILY = ROOT.parent / "examples" / "tiny"
DRAFTS = {
    "dflash": "draft-dflash",
    "dflash-speculators": "draft-dflash",
    "assistant": "draft-mtp",
}
"""Drafts, and what llama.cpp calls their kind."""
DRAFTED = 7
"""Tokens that llama.cpp drafts in a step."""
OFFERED = re.compile(r"^ *\d+ +or +(\S+) +:(?! alias)", re.M)
"""A type in the help of llama-quantize."""
TOLERANCE = 0.005
"""Largest relative difference of the perplexities: llama.cpp rounds activations to 8 bits."""


def dequantized(path: Path, to: Path) -> Path:
    """Write a file with all tensors in F32, computed by the package gguf."""
    reader = gguf.GGUFReader(path)
    with GGUF(path) as file:
        kv = {key: file.value(key) for key in file}
        data = []
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            shape = file.tensors[tensor.name].shape
            data.append(
                TensorData(tensor.name, shape, 0, [np.ascontiguousarray(values, np.float32)])
            )
        write(to, kv, data)
    return to


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    with Engine.load(path, n_ctx=text_chunks.SIZE) as engine:
        return text_chunks.read_chunk(engine, ids)


def verified(target: Path, drafts: dict[str, Path], cases: int) -> dict[str, Any]:
    """Return the verdict of `verify` for each draft."""
    found: dict[str, Any] = {}
    for name, draft in drafts.items():
        with Engine.load(target, draft, n_ctx=2048) as engine:
            assert engine.draft is not None
            todo = verify.cases(prompts.prompts(engine.tokenizer), cases, engine.draft.max_tokens)
            verdict = verify.verify(engine, todo, 32)
        found[name] = {
            "ok": verdict.mismatch is None,
            "tokens": verdict.tokens,
            "accepted": verdict.accepted,
            "drafted": verdict.drafted,
        }
    return found


class Comparison:
    """The trained target in F32, its imatrix, drafts and texts in a folder."""

    def __init__(self, tools: Path, folder: Path, chunks: int, cases: int) -> None:
        self.tools, self.folder, self.cases = tools, folder, cases
        self.plain, self.imatrix = folder / "f32.gguf", folder / "imatrix.gguf"
        self.text, self.prompt = folder / "text.txt", folder / "prompt.txt"
        self.upstream = Upstream(tools, None)
        convert.convert(FAMILY / "target", self.plain, type="f32")
        self.drafts = {name: folder / f"{name}.gguf" for name in DRAFTS}
        for name, path in self.drafts.items():
            convert.convert(FAMILY / name, path, target=FAMILY / "target")
        text, calibration = texts()
        self.text.write_text(text, encoding="utf-8")
        self.prompt.write_text(PROMPTS["code"], encoding="utf-8")
        self.prompt_ids = self.upstream.tokenize(self.plain, self.prompt)
        with Engine.load(self.plain, n_ctx=text_chunks.SIZE) as engine:
            self.parts = text_chunks.split_text(engine.tokenizer, text, chunks=chunks)
            parts = text_chunks.split_text(engine.tokenizer, calibration, chunks=8)
            imatrix.save(self.imatrix, importance.collect(engine, parts, "held-out texts"))

    def run(self, program: str, *args: object) -> str:
        line = list(map(str, (self.tools / program, *args)))
        done = subprocess.run(line, capture_output=True, text=True, check=False, errors="replace")
        if done.returncode:
            raise SystemExit(f"{program}: exit {done.returncode}\n{done.stderr[-1500:]}")
        return done.stdout + done.stderr

    def types(self) -> list[str]:
        """Return the types that llama-quantize offers."""
        done = subprocess.run(
            [self.tools / "llama-quantize", "--help"], capture_output=True, check=False
        )
        found = [name for name in OFFERED.findall(done.stdout.decode()) if ":" not in name]
        assert found, done.stderr[-1500:]
        return found

    def perplexity(self, path: Path) -> float:
        """Return the perplexity that llama-perplexity prints. At its end the program loses lines
        of its log that are still waiting, so it may need several runs."""
        options = ("-c", 512, "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", 1)
        chunks = "--chunks", len(self.parts)
        for _ in range(5):
            said = self.run("llama-perplexity", "-m", path, "-f", self.text, *options, *chunks)
            match = re.search(r"Final estimate: PPL = ([\d.]+)", said)
            if match is not None:
                return float(match[1])
        raise SystemExit(f"llama-perplexity: no final estimate\n{said[-1500:]}")

    def perplexities(self, path: Path) -> dict[str, float]:
        """Return the perplexity of a file in both programs."""
        with Engine.load(path, n_ctx=text_chunks.SIZE) as engine:
            ours = perplexity.measure(engine, self.parts).perplexity.value
        theirs = self.perplexity(path)
        return {"perplexity": ours, "llama_perplexity": theirs, "ratio": ours / theirs}

    def compare(self, type: str) -> dict[str, Any]:
        """Return the figures of llama-quantize's file of one type."""
        path, found = self.folder / "quantized.gguf", {}
        self.run("llama-quantize", "--imatrix", self.imatrix, self.plain, path, type, 1)
        try:
            found["types"] = kinds(path)
            own = logits(path, self.parts[0])
        except G4Error as e:
            return {**found, "refused": str(e).replace(f"{self.folder}/", "")}
        other = logits(dequantized(path, self.folder / "dequantized.gguf"), self.parts[0])
        return {
            **found,
            "logits_equal": torch.equal(own, other),
            **self.perplexities(path),
            "verify": verified(path, self.drafts, self.cases),
        }

    def quantized(self, plain: Path, type: str) -> Path:
        """Return an F32 file in a type of our `quantize`."""
        out = self.folder / f"our-{plain.name}"
        if type == "f32":
            return plain
        convert.quantize(plain, out, type)
        return out

    def compare_ours(self, type: str) -> dict[str, Any]:
        """Return the figures of our files of one type in llama.cpp."""
        path = self.quantized(self.plain, type)
        found: dict[str, Any] = {
            "types": kinds(path),
            **self.perplexities(path),
            "tokens_per_step": {},
        }
        for name, kind in DRAFTS.items():
            plain = self.folder / f"{name}-f32.gguf"
            convert.convert(FAMILY / name, plain, type="f32", target=FAMILY / "target")
            draft = self.quantized(plain, type)
            text, rounds = self.upstream.draft(
                self.plain, draft, kind, DRAFTED, self.prompt, self.prompt_ids
            )
            found["tokens_per_step"][name] = len(text) / len(rounds)
        return found


def kinds(path: Path) -> list[str]:
    """Return the names of the types of a file's tensors."""
    with GGUF(path) as file:
        return sorted({t.format.name for t in file.tensors.values()})


def near(found: dict[str, Any]) -> bool:
    """Return True if the perplexities agree."""
    return bool(abs(found["ratio"] - 1) <= TOLERANCE)


def good(found: dict[str, Any]) -> bool:
    """Return True if nothing differs; a type that is refused counts as good."""
    if "refused" in found:
        return True
    return found["logits_equal"] and near(found) and all(v["ok"] for v in found["verify"].values())


def main() -> int:
    """Compare all types and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bin", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--types", nargs="*", metavar="TYPE", help="of both programs; default: all")
    parser.add_argument("--version", help="text that says which llama.cpp it is")
    parser.add_argument("--chunks", type=int, default=2, help="chunks of 512 tokens of the text")
    parser.add_argument("--cases", type=int, default=2, help="cases of `verify` for each draft")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the result")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(args.bin, Path(folder), args.chunks, args.cases)
        for type in comparison.types():
            if type in (args.types or [type]):
                found[type] = comparison.compare(type)
                print(type, found[type], flush=True)
        for type in policy.names():
            if type.upper() in (args.types or [type.upper()]):
                ours[type] = comparison.compare_ours(type)
                print("ours:", type, ours[type], flush=True)
    figures = {"llama_cpp": args.version, "chunks": args.chunks, "cases": args.cases}
    write_result(args.out, "llama-cpp-types", {**figures, "types": found, "ours": ours})
    bad = [type for type, of in found.items() if not good(of)]
    bad += [
        f"ours: {type}"
        for type, of in ours.items()
        if not near(of) or min(of["tokens_per_step"].values()) <= 1
    ]
    print(f"different: {bad}" if bad else "nothing differs")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
