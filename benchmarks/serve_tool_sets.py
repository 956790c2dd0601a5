"""Validate tool calls for the tools of bfcl-eval against their schemas.

    pip download --no-deps bfcl-eval==2026.3.23
    pip install --target DIR hypothesis-jsonschema==0.23.1 hypothesis==6.112.0; PYTHONPATH=DIR:.
    python benchmarks/serve_tool_sets.py bfcl_eval-*.whl [--sets 300] [--limit 96] [--schemas 200]
        [--workers 16]

Uses every tool set in the wheel's data (single, multiple, parallel, live, Java, JavaScript,
multi-turn, memory and web search), with types as JSON Schema writes them. Equal sets count once.

- All: the grammar of `tool_choice: "required"` is built and compiled, and a text is drawn from it
  without a model; its calls must be valid against their schemas (jsonschema).
- `--sets` of them, chosen at random (0: all): the bundled model writes a call at temperature 1,
  without a draft and with each, eight requests at once, with a logit bias towards the tokens that
  end strings and calls, because it is too small to end them soon. Calls must be valid and the same
  with each draft. Outputs cut by the token limit are counted separately; their tokens are compared.
- `--schemas` schemas drawn by hypothesis-jsonschema from a meta-schema of JSON Schema, if it is
  installed (it does not support newer versions of hypothesis): as strict tools, each is refused
  with a reason or its calls are valid.

Writes dated JSON; the exit code is 1 if a check fails.
"""

import argparse
import ast
import json
import random
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch
from watch import write_result
from workers import spread

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.errors import G4Error
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server import grammar
from g4spec.server.call_grammar import Function
from g4spec.server.grammar import Grammar, Vocabulary
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Marks, Parser
from tests.server.random_texts import random_text

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
DRAFTS = (None, "dflash", "assistant", "dflash-speculators", "ngram")
ENDS_BIAS = 26.0
"""Added to the logits of the tokens that end strings and calls. Up to 14 changes no output of the
bundled model; at 36 free strings are empty."""

TYPES = {
    "dict": "object",
    "hashmap": "object",
    "hashtable": "object",
    "float": "number",
    "double": "number",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "queue": "array",
    "stack": "array",
    "set": "array",
    "bool": "boolean",
    "byte": "integer",
    "short": "integer",
    "long": "integer",
    "bigint": "integer",
    "char": "string",
}
"""JSON Schema's names of types of Python, Java and JavaScript; `any` is no type at all."""

Tools = list[dict[str, Any]]


def tool_sets(wheel: Path) -> tuple[list[Tools], int]:
    """Return the distinct tool sets, and the number of all."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        place = file.read("bfcl_eval/constants/executable_backend_config.py").decode()
        where = next(
            ast.literal_eval(node.value)
            for node in ast.parse(place).body
            if isinstance(node, ast.Assign)
            and "FUNC_DOC" in str(getattr(node.targets[0], "id", ""))
        )
        docs = {
            name: lines(file.read(f"bfcl_eval/data/multi_turn_func_doc/{each}"))
            for name, each in where.items()
        }
        docs["MemoryAPI"] = docs["MemoryAPI_kv"]
        rows = [
            row
            for name in names
            if name.startswith("bfcl_eval/data/BFCL_v4_") and "format_sensitivity" not in name
            for row in lines(file.read(name))
        ]
    found: dict[str, Tools] = {}
    for row in rows:
        classes = row.get("involved_classes", [])  # of conversations; others list functions
        tools = row.get("function", [f for name in classes for f in docs[name]])
        if not tools:
            continue
        found.setdefault(
            json.dumps(tools), [{**tool, "parameters": typed(tool["parameters"])} for tool in tools]
        )
    return list(found.values()), len(rows)


def lines(text: bytes) -> list[Any]:
    """Parse a file with one JSON value per line."""
    return [json.loads(line) for line in text.decode().splitlines()]


def typed(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace the types of a schema by those of JSON Schema."""
    out = dict(schema)
    kind = str(out.pop("type", "any"))
    if kind.lower() != "any":
        out["type"] = TYPES.get(kind.lower(), kind.lower())
    if "properties" in out:
        out["properties"] = {key: typed(value) for key, value in out["properties"].items()}
    if "items" in out:
        out["items"] = typed(out["items"])
    return out


def functions(tools: Tools) -> list[Function]:
    """Return the tools of a set, each name once."""
    named = {tool["name"].replace(" ", "_"): tool["parameters"] for tool in tools}
    return [Function(name, parameters=schema) for name, schema in named.items()]


def checked(
    tokenizer: Tokenizer, marks: Marks, ids: Sequence[int], offered: Sequence[Function]
) -> tuple[int, list[str]]:
    """Count the calls of a complete output and return what is invalid."""
    parser, said = Parser(tokenizer, marks), []
    for event in [*parser.push(ids), *parser.finish()]:
        if isinstance(event, CallEvent):
            said.append([event.name, ""])
        elif isinstance(event, ArgumentEvent):
            said[-1][1] += event.json
        else:
            return 0, [f"{event!r} is no call"]
    schemas, wrong = {f.name: f.parameters for f in offered}, []
    for name, text in said:
        try:
            jsonschema.Draft202012Validator(schemas[name] or {}).validate(json.loads(text))
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            wrong.append(f"{name}{text[:200]}: {str(error).splitlines()[0]}")
    return len(said), wrong or ([] if said else ["no call"])


class Made:
    """Grammars of functions, and texts drawn from them.

    Attributes:
        counts: sets compiled, refused, calls drawn, texts cut. wrong: what was not valid.
    """

    def __init__(self, engine: Engine) -> None:
        marks = Marks.of(engine.tokenizer)
        assert marks is not None
        self.marks, self.tokenizer = marks, engine.tokenizer
        self.vocabulary = Vocabulary(engine.tokenizer, engine.config.n_vocab)
        wanted = ['"', "}", "]", '"}', '"]', ":"]
        ids = range(engine.config.n_vocab)
        closing = [i for i in ids if self.tokenizer.piece(i).decode(errors="replace") in wanted]
        self._ends = [marks.call_end, marks.delimiter, *self.tokenizer.stop_ids, *closing]
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []

    def grammar(self, offered: Sequence[Function], most: int | None = None) -> Grammar | None:
        """Build and compile the grammar of `required`. Return None if it is refused."""
        try:
            made = grammar.whole_text(self.marks, calls=offered, most=most)
            self.vocabulary.compile(made.text)
        except G4Error as error:
            self.counts["refused"] += 1
            self.counts[f"refused: {str(error)[:60]}"] += 1
            return None
        self.counts["compiled"] += 1
        return made

    def drawn(self, made: Grammar, offered: Sequence[Function], seed: str) -> None:
        """Draw a text from a grammar and check its calls."""
        try:
            ids = random_text(self.vocabulary.mask(made), random.Random(seed), self._ends)
        except AssertionError:  # longer than a walk may be
            self.counts["walks cut"] += 1
            return
        count, wrong = checked(self.tokenizer, self.marks, ids, offered)
        self.counts["calls drawn"] += count
        self.wrong += wrong


def written(
    engine: Engine, made: Made, asked: Sequence[tuple[Sequence[Function], Grammar]], limit: int
) -> Iterator[tuple[list[int], bool]]:
    """Let a model write a call for each grammar, eight at once. Return tokens, and whether
    each ended."""
    prompt = engine.tokenizer.encode("<|turn>user\nHelp me.<turn|>\n<|turn>model\n")
    for at in range(0, len(asked), 8):
        requests = []
        for i, (_, wanted) in enumerate(asked[at : at + 8]):
            ends = ((made.marks.delimiter, ENDS_BIAS), (made.marks.call_end, ENDS_BIAS))
            sampler = Sampler(temperature=1.0, seed=at + i, logit_bias=ends)
            drafted = 0 if engine.draft is None else 4
            options = Options(limit, sampler, drafted, mask=made.vocabulary.mask(wanted))
            requests.append(engine.submit(prompt, options))
        for request in requests:
            list(request)
            ended = request.stats.stop_reason != "length"
            yield list(request.ids), ended


def meta(depth: int) -> dict[str, Any]:
    """Return a meta-schema of JSON Schema without references: schemas nest `depth` deep."""
    kind = {"enum": ["array", "boolean", "integer", "null", "number", "object", "string"]}
    if not depth:
        return {
            "type": "object",
            "properties": {"type": kind},
            "required": ["type"],
            "additionalProperties": False,
        }
    inner, size = meta(depth - 1), {"type": "integer", "minimum": 0, "maximum": 4}
    several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
    name = {"type": "string", "minLength": 1, "maxLength": 4}
    named = {
        "type": "object",
        "propertyNames": name,
        "additionalProperties": inner,
        "maxProperties": 3,
    }
    number = {"type": "integer", "minimum": -50, "maximum": 50}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "type": {
                "anyOf": [
                    kind,
                    {"type": "array", "items": kind, "minItems": 1, "uniqueItems": True},
                ]
            },
            "enum": {"type": "array", "minItems": 1, "maxItems": 4},
            "const": True,
            **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), number),
            "multipleOf": {"type": "integer", "minimum": 1, "maximum": 9},
            **dict.fromkeys(
                (
                    "minLength",
                    "maxLength",
                    "minItems",
                    "maxItems",
                    "minProperties",
                    "maxProperties",
                ),
                size,
            ),
            "uniqueItems": {"type": "boolean"},
            "items": inner,
            "prefixItems": several,
            "contains": inner,
            "properties": named,
            "patternProperties": named,
            "required": {"type": "array", "items": name, "uniqueItems": True, "maxItems": 2},
            "additionalProperties": {"anyOf": [{"type": "boolean"}, inner]},
            "propertyNames": inner,
            "not": inner,
            "if": inner,
            "then": inner,
            **dict.fromkeys(("allOf", "anyOf", "oneOf"), several),
        },
    }


def schemas(count: int) -> list[dict[str, Any]]:
    """Draw tool schemas with hypothesis-jsonschema; return none without the package."""
    try:
        from hypothesis import HealthCheck, given, settings
        from hypothesis_jsonschema import from_schema
    except ImportError:
        return []
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(from_schema(meta(2)))
    def draw(schema: Any) -> None:
        found.append({"type": "object", "properties": {"a": schema}, "required": ["a"]})

    draw()
    return found


def main() -> int:
    """Compile all sets, draw calls from their grammars, and let the model call them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--sets", type=int, default=300, help="sets the family calls; 0: all")
    parser.add_argument("--limit", type=int, default=96, help="new tokens of a text")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the sets")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="I N: every N-th set")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.workers > 1:
        return share(args)
    torch.set_num_threads(1)
    began = time.perf_counter()
    found, rows = tool_sets(args.wheel)
    found = found[args.part[0] :: args.part[1]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert.convert(TINY / "target", folder / "target.gguf")
        engine = Engine.load(folder / "target.gguf", None, n_ctx=1024, parallel=8)
        made = Made(engine)
        usable = []
        for i, tools in enumerate(found):
            offered = functions(tools)
            if (wanted := made.grammar(offered)) is not None:
                made.drawn(wanted, offered, str(i))
                usable.append(offered)
            if i % 250 == 0:
                print(f"{i} of {len(found)} sets, {time.perf_counter() - began:.0f} s", flush=True)
        engine.close()
        result: dict[str, Any] = {
            "wheel": args.wheel.name,
            "rows": rows,
            "sets": len(found),
            "drawn": dict(made.counts),
            "wrong": list(made.wrong),
        }
        made.counts.clear()
        result["schemas of hypothesis-jsonschema"] = drawn_schemas(made, args.schemas)
        write_result(args.out, "serve-tool-sets", result)
        chosen = random.Random(7).sample(usable, min(args.sets or len(usable), len(usable)))
        asked = [(o, grammar.whole_text(made.marks, calls=o, most=1)) for o in chosen]
        result |= {"limit": args.limit, "called": len(asked), "drafts": {}}
        alone: list[Any] = []
        for draft in DRAFTS:
            texts = called(folder, draft, made, asked, args.limit)
            told = judged(made, asked, texts, alone or texts)
            alone = alone or texts
            result["drafts"][draft or "none"] = told
            print(draft, json.dumps({k: v for k, v in told.items() if k != "wrong"}), flush=True)
            result["seconds"] = round(time.perf_counter() - began)
            write_result(args.out, "serve-tool-sets", result)
    bad = len(made.wrong) + sum(
        len(d["wrong"]) + d["other than without"] for d in result["drafts"].values()
    )
    print(f"{bad} wrong")
    return 1 if bad else 0


def share(args: argparse.Namespace) -> int:
    """Run in several processes, each with a part of the sets; the first one draws the
    schemas."""
    began, many = time.perf_counter(), args.workers
    found, failed = spread(
        __file__,
        [
            [
                args.wheel,
                "--part",
                i,
                many,
                "--limit",
                args.limit,
                "--sets",
                -(-args.sets // many),
                "--schemas",
                0 if i else args.schemas,
            ]
            for i in range(many)
        ],
    )
    drawn = "schemas of hypothesis-jsonschema"
    write_result(
        args.out,
        "serve-tool-sets",
        {
            **{
                key: value
                for key, value in found.items()
                if key not in ("date", "machine", "commit")
            },
            "rows": tool_sets(args.wheel)[1],
            "limit": args.limit,
            "workers": many,
            "failed workers": failed,
            "seconds": round(time.perf_counter() - began),
        },
    )
    print(f"{found.get('called', 0)} sets called, {found.get(drawn)}, {failed} workers failed")
    return 1 if failed else 0


def drawn_schemas(made: Made, count: int) -> Any:
    """Check calls of strict tools with schemas drawn by hypothesis-jsonschema."""
    drawn = schemas(count) if count else []
    if not drawn:
        return {} if not count else {"not installed": True}
    before = len(made.wrong)
    for i, schema in enumerate(drawn):
        offered = [Function("f", parameters=schema, strict=True)]
        if (wanted := made.grammar(offered)) is not None:
            made.drawn(wanted, offered, f"schema {i}")
    counts = {key: n for key, n in made.counts.items() if ":" not in key}
    return {"schemas": len(drawn), **counts, "wrong": made.wrong[before:]}


def called(
    folder: Path, draft: str | None, made: Made, asked: Sequence[Any], limit: int
) -> list[tuple[list[int], bool]]:
    """Return the model's outputs with a draft."""
    path: Path | str | None = draft
    if draft not in (None, "ngram"):
        path = folder / f"{draft}.gguf"
        convert.convert(TINY / str(draft), path, target=folder / "target.gguf")
    with Engine.load(folder / "target.gguf", path, n_ctx=1024, parallel=8) as engine:
        return list(written(engine, made, asked, limit))


def judged(made: Made, asked: Any, texts: Any, alone: Any) -> dict[str, Any]:
    """Count outputs that are valid, cut, or different from those without a draft."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for (offered, _), (ids, ended) in zip(asked, texts, strict=True):
        if not ended:
            counts["cut by the limit"] += 1
            continue
        count, bad = checked(made.tokenizer, made.marks, ids, offered)
        counts["calls"] += count
        wrong += bad
    different = sum(a != b for a, b in zip(texts, alone, strict=True))
    return {"texts": len(texts), **counts, "other than without": different, "wrong": wrong}


if __name__ == "__main__":
    sys.exit(main())
