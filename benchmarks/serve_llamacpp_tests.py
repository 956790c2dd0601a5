"""Run llama.cpp's server tests against `g4spec serve`.

    python benchmarks/serve_llamacpp_tests.py LLAMA_CPP [-k EXPRESSION] [--log FILE]

LLAMA_CPP is a source folder of llama.cpp: `pip download --no-binary :all: --no-deps
llama-cpp-python==0.3.36` contains one in `vendor/`; the tests need pytest, openai, requests,
filelock and wget. `serve_llamacpp_shim.py` replaces llama-server and its model by `g4spec serve`
and the bundled family. A function passes if it passes with all its parameters. Functions that
cannot pass are listed with the reason. Writes dated JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from watch import keep

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
)
"""Their files about what `g4spec serve` offers."""

WHY = {
    "test_server_multiple_addresses": "one address a server",
    "test_server_slots": "/slots shows no text and cannot be switched off",
    "test_metrics_disabled": "/metrics is always there",
    "test_server_model_aliases_and_tags": "models have no tags",
    "test_chat_completion_cached_tokens": "token counts of their model, and hits of single tokens: "
    "ours are whole blocks of 512, after which a text has the bits it has cold",
    "test_metrics_prompt_processed_and_cached": "a hit on a prompt shorter than a block",
    "test_return_progress": "prompts are read in blocks of 512 rows, whatever n_batch is",
    "test_metrics_prometheus_format": "a counter whose name does not end in _total",
    "test_chat_template": "the BOS of their model, and their own copy of a template",
    "test_chat_template_assistant_prefill": "a last message of the assistant's is continued only "
    "where continue_final_message says so",
    "test_invalid_chat_completion_req": "two messages of the assistant's in a row are taken",
    "test_tokenize_with_bos": "the BOS of their model",
    "test_ctx_shift_disabled_short_prompt": "token counts of their model",
    "test_ctx_shift_disabled_long_prompt": "token counts of their model: the prompt fits here",
    "test_n_probs_post_sampling": "probabilities after the filters are refused by name",
    "test_access_static_assets_without_api_key": "files of their page",
    "test_cors_options": "no origin is let in unless --cors-origin says so",
}
"""Reasons of those that fail, where it is known and not to be changed."""


def family(folder: Path) -> None:
    """Write the target with a template that supports tools and reasoning, whole and split,
    and a draft."""
    source = folder / "source"
    shutil.copytree(TINY / "target", source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "tests" / "server" / "template.jinja", source / "chat_template.jinja")
    convert.convert(source, folder / "target.gguf")
    convert.convert(source, folder / "split.gguf", split_max_size=6 << 20)
    convert.convert(TINY / "dflash", folder / "dflash.gguf", target=folder / "target.gguf")


def main() -> int:
    """Run the tests and write the sorted results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("-k", dest="only", default="")
    parser.add_argument("--log", type=Path, help="what pytest prints")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    tests = args.source.resolve() / "tools" / "server" / "tests"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family(folder)
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
        lines = (folder / "report.jsonl").read_text().splitlines()
    found = sort([json.loads(line) for line in lines])
    for kind, functions in found.items():
        print(f"{kind}: {len(functions)}")
    keep(
        args.out,
        "serve-llamacpp-tests",
        {
            "source": "llama.cpp as vendored in llama-cpp-python 0.3.36",
            **found,
            "seconds": round(time.perf_counter() - began),
        },
    )
    return 0


def sort(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Sort functions by the results of all their parameters."""
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        by[report["test"].removeprefix("unit/").split("[")[0]].append(report)
    passed, words, failed, out = [], [], {}, {}
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
        elif any(run["words"] for run in runs):
            words.append(name)
        else:
            passed.append(name)
    return {
        "passed": passed,
        "passed but for words of their model": words,
        "failed": failed,
        "out of scope": out,
    }


if __name__ == "__main__":
    sys.exit(main())
