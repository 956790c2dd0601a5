"""Run llama.cpp's server tests against `g4spec serve`.

    python benchmarks/serve_llamacpp_tests.py LLAMA_CPP [-k EXPRESSION] [--reports FILE]

LLAMA_CPP is a source folder of llama.cpp: `pip download --no-binary :all: --no-deps
llama-cpp-python==0.3.36` contains one in `vendor/`; the tests need pytest, openai, requests,
filelock, aiohttp and wget. `serve_llamacpp_shim.py` replaces llama-server and its model by
`g4spec serve` and the bundled family; constants of their model are replaced (`FACTS`). A function
passes if it passes with all its parameters. Functions that fail, and those of features that
`g4spec serve` does not have, are listed with the reason. Writes dated JSON.

--reports continues a run: FILE keeps the outcome of each test, and those in it are not run again.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from watch import write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from g4spec import convert  # noqa: E402

TINY = ROOT / "examples" / "tiny"
FILES = (
    "basic",
    "chat_completion",
    "completion",
    "compat_anthropic",
    "compat_oai_responses",
    "stream",
    "security",
    "metrics",
    "tokenize",
    "template",
    "speculative",
    "tool_call",
    "ctx_shift",
    "ignore_eos",
    "router",
    "sleep",
)
"""Test files about features of `g4spec serve`."""

OTHER_FILES = {
    "compat_gcp": "Google's prediction route",
    "embedding": "embeddings: a target of Gemma 4 generates text",
    "infill": "fill-in-the-middle: Gemma 4 has no tokens for it",
    "kv_keep_only_active": "lines of llama.cpp's log about its slots; the prefix cache is another",
    "lora": "LoRA adapters",
    "mcp_servers": "MCP clients inside the server",
    "proxy": "requests through an HTTP proxy to their hub",
    "rerank": "reranking: a target of Gemma 4 generates text",
    "slot_save": "slots saved to files; the prefix cache keeps what can be reused",
    "tools_builtin": "tools that the server runs",
    "vision_api": "images",
}
"""The other test files, and their features."""

FACTS = {
    "test_chat_template": ("<s> <|start", "<bos><|start", "text of BOS"),
    "test_completion_response_fields": ('"<s> " + prompt', '"<bos>" + prompt', "text of BOS"),
    "test_tokenize_with_bos": ("bosId = 1", "bosId = 2", "id of BOS"),
    "test_completion_prompt_cache": (
        "(40 + r)*5 + 2",
        "FACTS.prompt(prompt)",
        "number of prompt tokens",
    ),
    "test_ctx_shift_disabled_short_prompt": (
        "(-1, 248, True)",
        '(-1, 256 - FACTS.prompt("Hi how are you"), True)',
        "number of prompt tokens",
    ),
    "test_ctx_shift_disabled_long_prompt": (
        "LONG_TEXT,",
        "LONG_TEXT * 2,",
        "a text that is longer than the context",
    ),
    "test_slot_ctx_not_exceeded": (
        '"Hello " * 248',
        'FACTS.repeated("Hello ", 250)',
        "a text that nearly fills the context",
    ),
}
"""Constants of their model that are replaced in functions: (old, new, description)."""

WHY = {
    "test_responses_stream_with_llama_telemetry": "a response that reaches max_output_tokens ends "
    "with response.incomplete, as in OpenAI's API, not with response.completed",
    "test_chat_completion_cached_tokens": "hits of single tokens: ours are whole blocks of 512, "
    "after which a text has the bits that it has without the cache",
    "test_metrics_prompt_processed_and_cached": "a hit on a prompt shorter than a block",
    "test_return_progress": "prompts are read in blocks of 512 rows, whatever n_batch is",
    "test_chat_template_assistant_prefill": "text parts of a message are joined by one newline; "
    "llama.cpp joins those of the last message by two",
    "test_access_static_assets_without_api_key": "files of llama.cpp's page",
    "test_cors_options": "with * no origin is named and no credentials are allowed: API keys do "
    "not need them; allowed headers are named, since * does not cover Authorization",
    "test_anthropic_tool_result_with_image": "an image is an invalid request (400), not a failure "
    "of the server (500)",
    "test_anthropic_vision_format_accepted": "an image is an invalid request (400), not a failure "
    "of the server (500)",
    "test_anthropic_empty_messages": "a request without messages is invalid, as in Anthropic's API",
    "test_date_inside_prompt": "date_string and datetime are variables that llama.cpp defines for "
    "templates of other models; transformers has strftime_now, as here",
}
"""Reasons of functions that fail and are not to be changed."""


def family(folder: Path) -> None:
    """Write the target with a template that supports tools and reasoning, whole and split,
    and a draft.

    <eos> is the only stop token: upstream's test model generates until the limit.
    """
    source = folder / "source"
    shutil.copytree(TINY / "target", source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("config.json", "generation_config.json"):
        text = (source / name).read_text()
        (source / name).write_text(re.sub(r'("eos_token_id": )(\[[^]]*\]|\d+)', r"\g<1>1", text))
    shutil.copy(ROOT / "tests" / "server" / "template.jinja", source / "chat_template.jinja")
    convert.convert(source, folder / "target.gguf")
    convert.convert(source, folder / "split.gguf", split_max_size=6 << 20)
    convert.convert(TINY / "dflash", folder / "dflash.gguf", target=folder / "target.gguf")


def copy_tests(source: Path, folder: Path) -> Path:
    """Copy their tests to `folder`, with the replacements of `FACTS`; return their folder."""
    tests = folder / "llama.cpp" / "tools" / "server" / "tests"
    shutil.copytree(source / "tools" / "server" / "tests", tests)
    (tests / "tmp").mkdir(exist_ok=True)
    (folder / "llama.cpp" / "models").symlink_to(source / "models")
    for path in sorted((tests / "unit").glob("test_*.py")):
        text = path.read_text()
        for name, (old, new, _) in FACTS.items():
            if f"def {name}(" in text:
                assert old in text, (name, old)
                text = text.replace(old, new)
        head = "from serve_llamacpp_shim import FACTS\n" if "FACTS" in text else ""
        path.write_text(head + text)
    return tests


def main() -> int:
    """Run the tests and write the sorted results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("-k", dest="only", default="")
    parser.add_argument("--log", type=Path, help="what pytest prints")
    parser.add_argument("--reports", type=Path, help="keeps outcomes; its tests are not run again")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = args.source.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family(folder)
        tests = copy_tests(source, folder)
        report = folder / "report.jsonl"
        parts = {}
        if args.reports and args.reports.exists():
            shutil.copy(args.reports, report)
            parts = {"parts": "outcomes of several runs; the commit is that of the last one"}
        paths = [f"unit/test_{each}.py" for each in FILES]
        env = {
            **os.environ,
            "G4SPEC_FAMILY": name,
            "PORT": os.environ.get("PORT", "18391"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
        }
        env.setdefault("OMP_NUM_THREADS", "1")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "serve_llamacpp_shim",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "-q",
            *paths,
        ]
        command += ["-k", args.only] if args.only else []
        with (args.log or folder / "log").open("w") as log:
            subprocess.run(command, cwd=tests, env=env, stdout=log, stderr=log, check=False)
        lines = report.read_text().splitlines()
        if args.reports:
            shutil.copy(report, args.reports)
    runs = [json.loads(line) for line in lines]
    found = sort(runs)
    for kind, functions in found.items():
        print(f"{kind}: {len(functions)}")
    others = {}
    for name, about in OTHER_FILES.items():
        text = (source / "tools" / "server" / "tests" / "unit" / f"test_{name}.py").read_text()
        others[f"test_{name}.py"] = f"{len(re.findall('(?m)^def test_', text))} functions: {about}"
    write_result(
        args.out,
        "serve-llamacpp-tests",
        {
            "source": "llama.cpp as vendored in llama-cpp-python 0.3.36",
            **parts,
            **found,
            "files out of scope": others,
            "slow": "tests that llama.cpp marks as slow want models of other makers: all of "
            "test_tool_call.py, and two others",
            "seconds": round(sum(run["seconds"] for run in runs)),
        },
    )
    return 0


def sort(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Sort functions by the results of all their parameters."""
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        by[report["test"].removeprefix("unit/").split("[")[0]].append(report)
    passed, words, facts, failed, out = [], [], {}, {}, {}
    for name, runs in by.items():
        bad = [run for run in runs if run["outcome"] == "failed"]
        lacking = sorted({run["not offered"] for run in runs if run["not offered"]})
        if lacking and all(run["not offered"] for run in bad):
            out[name] = "needs " + ", ".join(lacking)
        elif bad:
            why = WHY.get(name.partition("::")[2])
            failed[name] = [f"because: {why}"] if why else []
            failed[name] += [
                f"{run['test'].partition('[')[2].rstrip(']')} {run['line']} {run['error']}".strip()
                for run in bad
            ]
        elif all(run["outcome"] == "skipped" for run in runs):
            out[name] = "skipped by llama.cpp itself"
        elif name.partition("::")[2] in FACTS:
            facts[name] = FACTS[name.partition("::")[2]][2]
        elif any(run["words"] for run in runs):
            words.append(name)
        else:
            passed.append(name)
    return {
        "passed": passed,
        "passed but for words of their model": words,
        "passed with a fact of our model": facts,
        "failed": failed,
        "out of scope": out,
    }


if __name__ == "__main__":
    sys.exit(main())
