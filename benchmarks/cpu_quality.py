"""Measure the quality of each weight type and cache type on the trained family (`docs/quality.md`).

    python benchmarks/cpu_quality.py [--tool LLAMA_BUILD/bin/llama-quantize] [--page]
    python benchmarks/cpu_quality.py --types q5_1 --earlier RESULT.json --page

Writes the target in each type, with and without an importance matrix, and compares it with the F32
file on held-out texts of the family's corpus, as `g4spec perplexity --against` does. The imatrix is
collected on other held-out texts. With --tool, files of llama-quantize with the same type and
imatrix are measured too, by our runtime (`quantize.py` compares error and time). --earlier keeps
the rows of types that are not measured again and, without --tool, the figures of llama-quantize's
files. The result is written as dated JSON; --page regenerates the page. The exit code is 1 if a
mean KL divergence exceeds that of llama-quantize's file by more than two of the larger standard
errors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parent), str(ROOT.parent / "examples" / "tiny")]

import corpus  # noqa: E402
from watch import today, write_result  # noqa: E402

from g4spec.convert import convert, quantize  # noqa: E402
from g4spec.gguf import imatrix  # noqa: E402
from g4spec.measure import importance, perplexity, text_chunks  # noqa: E402
from g4spec.quant import policy  # noqa: E402
from g4spec.runtime.cuda.cache.cache_types import KINDS  # noqa: E402
from g4spec.runtime.engine import Engine  # noqa: E402

TARGET = ROOT.parent / "examples" / "tiny" / "target"
PAGE = ROOT.parent / "docs" / "quality.md"
ALONE = ("q3_k", "q4_k", "q5_k")
"""Types that are asked for as mixes: alone they are no others, or llama-quantize has them not."""
CACHES = "cache types"
"""Their name among the types with their day."""
READ = 3000
"""Characters of each held-out file."""


def texts() -> tuple[str, str]:
    """Return a text to measure on and one to collect the imatrix on: halves of the held-out
    files."""
    found = corpus.load()
    names = sorted(n for n in found if corpus.held_out(n))
    one, other = ("".join(found[n][:READ] + "\n" for n in names[i::2]) for i in range(2))
    return one, other


class Meter:
    """Compares files with one base, whose logits of each chunk are computed once."""

    def __init__(self, base: Path, text: str, count: int) -> None:
        self.base = Engine.load(base, n_ctx=text_chunks.SIZE)
        self.parts = text_chunks.split_text(self.base.tokenizer, text, chunks=count)
        self._read = {id(ids): text_chunks.read_chunk(self.base, ids) for ids in self.parts}

    def read(self, engine: Engine, ids: list[int]) -> Any:
        return self._read[id(ids)] if engine is self.base else text_chunks.read_chunk(engine, ids)

    def measure(self, path: Path, **options: Any) -> dict[str, Any]:
        """Return the figures of a file, in the form of `g4spec perplexity --json`."""
        with Engine.load(path, n_ctx=text_chunks.SIZE, **options) as engine:
            found = perplexity.measure(engine, self.parts, self.base, read=self.read)
        return found.json()


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of every type, by name."""
    found: dict[str, Any] = {}
    plain, weighted = folder / "f32.gguf", folder / "imatrix.gguf"
    convert(TARGET, plain, type="f32")
    text, calibration = texts()
    meter = Meter(plain, text, args.chunks)
    with Engine.load(plain, n_ctx=text_chunks.SIZE) as engine:
        parts = text_chunks.split_text(engine.tokenizer, calibration, chunks=args.calibration)
        imatrix.save(weighted, importance.collect(engine, parts, "held-out texts"))
    weights = imatrix.read(weighted)
    names = [n for n in policy.names() if n not in (*ALONE, "f32")]
    for name in args.types or names:
        row = found[name] = {}
        for kind in ("plain", "imatrix"):
            if kind == "imatrix" and not policy.parse_type(name).base.weighted:
                continue
            ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
            size = quantize(
                plain, ours, name, importance=weights if kind == "imatrix" else None
            ).nbytes
            row[kind] = {"bytes": size, **meter.measure(ours)}
            if args.tool and kind == "imatrix" and name not in ALONE:
                line = [args.tool, "--imatrix", weighted, plain, theirs, name.upper(), "1"]
                subprocess.run(list(map(str, line)), check=True, capture_output=True)
                row[kind]["llama_cpp"] = {"bytes": theirs.stat().st_size, **meter.measure(theirs)}
            print(name, kind, told(row[kind]), flush=True)
    caches = {kind: meter.measure(plain, cache_type=kind) for kind in KINDS}
    return {
        "types": found,
        "caches": caches,
        "f32_bytes": plain.stat().st_size,
        "chunks": len(meter.parts),
    }


def joined(earlier: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the rows of an earlier one that it does not have, and with the earlier
    figures of llama-quantize's files in rows that it has without them."""
    for name, row in result["types"].items():
        kept = earlier["types"].get(name, {}).get("imatrix", {}).get("llama_cpp")
        if kept and "llama_cpp" not in row["imatrix"]:
            row["imatrix"]["llama_cpp"] = kept
    dates = earlier["measured"] | result["measured"]
    types = {**earlier["types"], **result["types"]}
    return {**result, "tool": earlier["tool"], "types": types, "measured": dates}


def when(result: dict[str, Any]) -> str:
    """Return which types were measured on which day; "" if all were on the day of the result."""
    days: dict[str, list[str]] = {}
    for name, day in result["measured"].items():
        days.setdefault(day, []).append(name if name == CACHES else name.upper())
    if [*days] == [result["date"]]:
        return ""
    lines = [f"{', '.join(names)} on {day}" for day, names in sorted(days.items(), reverse=True)]
    return (
        f" Measured: {'; '.join(lines)}. A type that was measured "
        "again without llama-quantize keeps the figure of its file."
    )


def told(row: dict[str, Any]) -> str:
    """Return the KL divergence as text, with llama-quantize's."""
    sides = [row, *([row["llama_cpp"]] if "llama_cpp" in row else [])]
    return " beside ".join(f"{s['against']['divergence']['value']:.6f}" for s in sides)


def worse(row: dict[str, Any]) -> bool:
    """Return whether the divergence exceeds llama-quantize's by more than the noise."""
    if "llama_cpp" not in row:
        return False
    mine, its = (side["against"]["divergence"] for side in (row, row["llama_cpp"]))
    return bool(mine["value"] - its["value"] > 2 * max(mine["error"], its["error"]))


def figures(row: dict[str, Any]) -> list[str]:
    a = row["against"]
    return [
        f"{a['ratio']['value']:.4f} ± {a['ratio']['error']:.4f}",
        f"{a['divergence']['value']:.5f} ± {a['divergence']['error']:.5f}",
        f"{a['divergences']['99']:.4f}",
        f"{a['divergences']['99.9']:.4f}",
        f"{100 * a['same_top']['value']:.2f} ± {100 * a['same_top']['error']:.2f}",
    ]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def type_row(name: str, row: dict[str, Any], size: int) -> list[str]:
    theirs = row.get("llama_cpp")
    its = f"{theirs['against']['divergence']['value']:.5f}" if theirs else ""
    return [name, f"{row['bytes'] / size:.3f}", *figures(row), its]


def page(result: dict[str, Any]) -> str:
    """Return the text of `docs/quality.md`."""
    names = sorted(result["types"], key=lambda n: -result["types"][n]["plain"]["bytes"])
    size = result["f32_bytes"]
    rows = []
    for name in names:
        found = result["types"][name]
        rows.append(type_row(name.upper(), found["plain"], size))
        if "imatrix" in found:
            rows.append(type_row(f"{name.upper()}, imatrix", found["imatrix"], size))
    shown = [
        "perplexity over F32's",
        "mean KL divergence",
        "99 % below",
        "99.9 % below",
        "same likeliest token, %",
    ]
    head = ["type", "size of F32's", *shown, "mean KL of llama-quantize's file"]
    first = result["types"][names[0]]["plain"]
    caches = [[kind.upper(), *figures(row)] for kind, row in result["caches"].items()]
    return "\n".join(
        [
            "# What a type costs",
            "",
            "Written by `benchmarks/cpu_quality.py`, "
            f"[result](../benchmarks/results/{result['date']}-cpu-quality.json)."
            + when(result)
            + (f" {result['note']}." if "note" in result else ""),
            "",
            "`g4spec perplexity -m MODEL --against BASE TEXT` measures these figures for any "
            "model: of "
            "chunks of 512 tokens, BOS first, the second half is predicted, as `llama-perplexity "
            "--kl-divergence` does. The base's distributions are kept whole, there they are cut "
            "off 16 "
            'nats below the likeliest token: its "PPL(base)" differs in the third digit, '
            "everything "
            "else only by rounding in the forward pass. `--chunks N` takes the first N. Both "
            "models "
            "are loaded at once.",
            "",
            "`g4spec imatrix -m MODEL TEXT -o imatrix.gguf` collects an importance matrix, on the "
            "CPU; "
            "`g4spec quantize --imatrix FILE` uses one, llama-imatrix's too. Columns whose inputs "
            "are "
            "large then get the smaller errors. It helps most below 5 bits; take text of the kind "
            "that "
            "the model is used for, and 100,000 tokens or more for a real model.",
            "",
            f"The trained family (`examples/tiny`) on {first['tokens']:,} predicted tokens of "
            f"held-out "
            f"files, {result['chunks']} chunks; F32 has perplexity "
            f"{first['against']['base']['value']:.4f} ± {first['against']['base']['error']:.4f}. "
            f"The "
            "imatrix is of other held-out files. It is a model of 7 million weights, whose rows "
            "are "
            "short and which falls back to larger types in one of seven matrices: read the order "
            "of the types here, and measure your own model. Its weights are BF16, so BF16 is "
            "exact.",
            "",
            *table(head, rows),
            "",
            "## Cache types",
            "",
            "Keys and values rounded as the type stores them, weights in F32.",
            "",
            *table(["type", *shown], caches),
            "",
        ]
    )


def main() -> int:
    """Measure, write the result, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", type=Path)
    parser.add_argument("--types", nargs="*", choices=policy.names())
    parser.add_argument("--earlier", type=Path, help="result to join with")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--calibration", type=int, default=16, help="chunks of the imatrix")
    parser.add_argument("--page", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measured(args, Path(temporary))
    found = {"tool": args.tool.name if args.tool else None, **found}
    found["measured"] = dict.fromkeys([*found["types"], CACHES], today())
    if args.earlier:
        found = joined(json.loads(args.earlier.read_text(encoding="utf-8")), found)
    result = write_result(args.out, "cpu-quality", found)
    if args.page:
        PAGE.write_text(page(result), encoding="utf-8")
    bad = [
        f"{name}, {kind}"
        for name, found in result["types"].items()
        for kind, row in found.items()
        if worse(row)
    ]
    print(f"larger than llama-quantize's: {bad}" if bad else "none larger than llama-quantize's")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
