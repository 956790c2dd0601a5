"""Run SGLang's tests of determinism, stop strings and Anthropic's API against the server.

    pip download --no-deps sglang==0.5.23
    python benchmarks/serve_sglang_kits.py sglang-0.5.23-*.whl [--trials 20] [--tokens 100]

Serves the bundled family over HTTP, eight requests at a time, with a DFlash draft and the prefix
cache. `test_deterministic` (modes single, prefix and radix_cache), `MatchedStopMixin` and
`AnthropicMessagesMixin` are read from the wheel and run unchanged; an adapter translates their HTTP
requests: `/generate` becomes `/completion`, a batch becomes as many concurrent requests with one
seed and different draft lengths; `/flush_cache` clears the engine's prefix cache; token ids beyond
our vocabulary are wrapped into it; `matched_stop` is read from the answer. The prompts of
radix_cache are shorter than our blocks, so that mode runs twice, the second time with 1,024 tokens
before each prompt. Writes dated JSON.
"""

import argparse
import contextlib
import importlib
import io
import json
import random
import sys
import tempfile
import time
import types
import unittest
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import requests
import torch
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.runtime.engine import Engine
from g4spec.server.settings import Settings
from tests.server.running_server import Served

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
FILES = (
    "test_deterministic.py",
    "long_prompt.txt",
    "kits/anthropic_messages_kit.py",
    "kits/matched_stop_kit.py",
)
WHY = {
    "test_finish_stop_regex_str": "stop_regex is not offered; it is refused by name",
    "test_finish_stop_eos": "words of their model: the family has not ended after 1,000 tokens",
    "test_tool_result_image_content_conversion": "calls SGLang's own classes, not the server",
}
"""Reasons of those that fail, where it is known and not to be changed."""

POST = requests.post


class Adapter:
    """Translates between SGLang's tests and the server.

    Attributes:
        lead: token ids before every prompt of ids. hits: prompts that began with a kept prefix.
    """

    def __init__(self, served: Served, seed: int = 1) -> None:
        self._served, self._rng = served, random.Random(seed)
        self._vocabulary = served.engine.config.n_vocab
        self.lead: list[int] = []
        self.hits = self.texts = 0

    def post(self, url: str, json: Any = None, **more: Any) -> Any:
        """Send a request as `requests.post` does."""
        if url.endswith("/flush_cache"):
            self._served.engine.prefix.clear()
            return types.SimpleNamespace(status_code=200)
        if url.endswith("/generate"):
            return self._generate(json)
        response = POST(url, json=json, **more)
        if url.endswith("completions") and response.status_code == 200:
            return types.SimpleNamespace(status_code=200, json=lambda: self._told(json, response))
        return response

    def _generate(self, body: dict[str, Any]) -> Any:
        prompts = body["input_ids"] if "input_ids" in body else body["text"]
        single = isinstance(prompts, str) or isinstance(prompts[0], int)
        asked = [self._asked(body, prompt) for prompt in ([prompts] if single else prompts)]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(self._one, asked))
        return types.SimpleNamespace(
            status_code=200, json=lambda: answers[0] if single else answers
        )

    def _asked(self, body: dict[str, Any], prompt: str | list[int]) -> dict[str, Any]:
        if not isinstance(prompt, str):
            least = self._vocabulary - 200
            prompt = [*self.lead, *(i if i < self._vocabulary else 200 + i % least for i in prompt)]
        given = body["sampling_params"]
        return {
            "prompt": prompt,
            "n_predict": given["max_new_tokens"],
            "return_tokens": True,
            "temperature": given["temperature"],
            "seed": given["sampling_seed"],
            "frequency_penalty": given["frequency_penalty"],
            "presence_penalty": given["presence_penalty"],
            "n_probs": 1,
            "ignore_eos": not isinstance(prompt, str),  # they count on two tokens
            "draft_max": self._rng.choice(["auto", 0, 1, 3, 8]),
        }

    def _one(self, asked: dict[str, Any]) -> dict[str, Any]:
        response = POST(f"{self._served.url}/completion", json=asked)
        assert response.status_code == 200, response.text
        told = response.json()
        self.texts += 1
        self.hits += told["timings"]["cache_n"] > 0
        tokens = told.get("completion_probabilities", [])  # not there where there is no token
        pairs = [[p["logprob"], p["id"], None] for p in tokens]
        return {
            "text": told["content"],
            "output_ids": told["tokens"],
            "meta_info": {"output_token_logprobs": pairs},
        }

    def _told(self, body: dict[str, Any], response: requests.Response) -> Any:
        """Add `matched_stop`: the stop string, or the first stop token id of the model at the
        end of a text."""
        answer = response.json()
        for choice in answer["choices"]:
            ended = choice["finish_reason"] == "stop"
            choice["matched_stop"] = (body.get("stop") or 2) if ended else None
        return answer


def extracted(wheel: Path, folder: Path) -> None:
    """Extract the tests so that they can be imported without the rest of SGLang."""
    with zipfile.ZipFile(wheel) as file:
        for name in FILES:
            file.extract(f"sglang/test/{name}", folder)
    sys.path.insert(0, str(folder))
    for name, value in (
        ("sglang.profiler", "run_profile"),
        ("sglang.srt.entrypoints.anthropic.protocol", "AnthropicMessagesRequest"),
        ("sglang.srt.entrypoints.anthropic.serving", "AnthropicServing"),
    ):
        module = types.ModuleType(name)
        setattr(module, value, None)  # imported by their tests, called by none of the server's
        sys.modules[name] = module


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Serve the family with a draft."""
    target, draft = folder / "target.gguf", folder / "dflash.gguf"
    convert.convert(TINY / "target", target)
    convert.convert(TINY / "dflash", draft, target=target)
    with Engine.load(
        target, draft, n_ctx=6144, parallel=8, pool=16384, prefix_cache=128 << 20
    ) as engine:
        served = Served(engine, Settings("tiny", time_limit=36_000, send_limit=36_000))
        yield served
        served.stop()


def deterministic(adapter: Adapter, url: str, trials: int, tokens: int) -> dict[str, Any]:
    """Run the modes of `test_deterministic`. Return the number of unique texts per prompt."""
    module = importlib.import_module("sglang.test.test_deterministic")
    out = {}
    for mode, temperature, lead in (
        ("single", 0.0, 0),
        ("single", 0.5, 0),
        ("prefix", 0.0, 0),
        ("prefix", 0.5, 0),
        ("radix_cache", 0.0, 0),
        ("radix_cache", 0.0, 1024),
        ("radix_cache", 0.5, 1024),
    ):
        adapter.lead = [random.Random(3).randrange(200, 500) for _ in range(lead)]
        adapter.hits, adapter.texts, began = 0, 0, time.perf_counter()
        host, port = url.removeprefix("http://").split(":")
        args = module.BenchArgs(
            host=host,
            port=int(port),
            test_mode=mode,
            n_trials=trials,
            temperature=temperature,
            max_new_tokens=tokens,
        )
        if mode == "prefix":  # as their `test_prefix_with_logprobs` has it
            args.n_start, args.n_trials, args.return_logprob = 10, max(1, trials // 2), True
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            found = module.test_deterministic(args)
        name = f"{mode}, temperature {temperature}" + (f", {lead} tokens before" if lead else "")
        different = said.getvalue().count("mismatch")
        out[name] = {
            "results": found,
            "passed": set(found) == {1} and not different,
            "texts": adapter.texts,
            "after a prefix hit": adapter.hits,
            "seconds": round(time.perf_counter() - began),
        }
        print(name, json.dumps(out[name]), flush=True)
    return out


def mixin(module: str, name: str, url: str) -> dict[str, str]:
    """Run the tests of a mixin and return their results."""
    kit = getattr(importlib.import_module(f"sglang.test.kits.{module}"), name)
    case = type(
        name, (kit, unittest.TestCase), {"base_url": url, "model": "tiny", "api_key": "none"}
    )
    out = {}
    for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
        assert isinstance(test, unittest.TestCase)
        result = unittest.TestResult()
        with contextlib.redirect_stdout(io.StringIO()):
            test.run(result)
        called = test.id().rpartition(".")[2]
        bad = [text for _, text in result.failures + result.errors]
        out[called] = "passed" if not bad else bad[0].strip().splitlines()[-1][:300]
        if bad and called in WHY:
            out[called] = f"because: {WHY[called]}"
        print(f"{called}: {out[called]}", flush=True)
    return out


def main() -> int:
    """Serve the family, run everything, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--trials", type=int, default=20, help="batches of single, twice prefix")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens of each text")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as served:
        extracted(args.wheel, Path(name))
        adapter = Adapter(served)
        with mock.patch("requests.post", adapter.post):
            found: dict[str, Any] = {
                "MatchedStopMixin": mixin("matched_stop_kit", "MatchedStopMixin", served.url),
                "AnthropicMessagesMixin": mixin(
                    "anthropic_messages_kit", "AnthropicMessagesMixin", served.url
                ),
            }
            found["test_deterministic"] = deterministic(
                adapter, served.url, args.trials, args.tokens
            )
    write_result(
        args.out,
        "serve-sglang-kits",
        {"wheel": args.wheel.name, "trials": args.trials, "tokens": args.tokens, **found},
    )
    wrong = [
        name
        for kit in ("MatchedStopMixin", "AnthropicMessagesMixin")
        for name, what in found[kit].items()
        if what != "passed" and name not in WHY
    ]
    wrong += [name for name, run in found["test_deterministic"].items() if not run["passed"]]
    print(f"failed: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
