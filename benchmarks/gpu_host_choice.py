"""Time cycles whose tokens the host chooses, with the shapes of Gemma 4 on a GPU (random weights).

    python benchmarks/gpu_host_choice.py [--model 31b] [--tokens 0 7 15] [--cycles 10]

For penalties, log-probabilities and a mask over the vocabulary: milliseconds of each cycle of one
request with 600 tokens of context, and of the last one's draft and step. The first cycles of a
shape run op by op; then the step is a CUDA graph. Each prompt is read anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.core import PAGE, PROMPT_BLOCK, Draft, Sequence, Work
from g4spec.measure import run_record, synthetic
from g4spec.ops.sampling import Sampler
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target

PROMPT, N_CTX = 600, 2048


def choices(vocab: int) -> dict[str, Options]:
    """Return options that a GPU cannot apply, by name."""
    allowed = torch.arange(vocab) % 3 != 0
    return {
        "penalties": Options(sampler=Sampler(repetition_penalty=1.1)),
        "log-probabilities": Options(logprobs=5),
        "mask": Options(mask=lambda ids: allowed),
    }


def cycles(
    target: Target, draft: Draft, runner: Any, options: Options, tokens: int, count: int
) -> dict[str, Any]:
    """Run `count` cycles of `tokens` drafted tokens after a prompt; return their milliseconds."""
    backend: Any = target.backend
    vocab = target.config.n_vocab
    ids = [5 + 7 * i * i % (vocab - 5) for i in range(PROMPT)]
    rows = backend.read(target, 0, ids, 0)
    draft.begin(0)
    backend.commit(draft, rows)
    pages = list(range(1, N_CTX // PAGE + 1))
    sequence = Sequence(0, [*ids, 7], PROMPT, PROMPT, pages, drafting=tokens > 0)
    chooser = RequestChooser(options, ids, vocab, backend)
    took = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner.start([Work(sequence, tokens, chooser)])
        (cycle,) = runner.result()
        torch.cuda.synchronize()
        took.append(round((time.perf_counter() - begin) * 1e3, 2))
        sequence.ids += cycle.tokens
        sequence.n_read += len(cycle.tokens)
    return {
        "tokens": tokens,
        "ms": took,
        "draft_ms": round(cycle.draft_seconds * 1e3, 2),
        "step_ms": round(cycle.step_seconds * 1e3, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="31b")
    parser.add_argument("--tokens", type=int, nargs="*", default=[0, 7, 15])
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    backend = CudaBackend(0, "q8_0")
    target = synthetic.make_target(args.model, "q4_k_m", backend, N_CTX)
    target.chunk = 2 * PROMPT_BLOCK
    target.space.assign(0, range(1, target.space.n_pages + 1))
    draft: Draft = synthetic.make_draft(args.model, "q8_0", target)
    target.taps = draft.taps
    runner = backend.runners(target, draft)[-1]
    found = []
    for name, options in choices(target.config.n_vocab).items():
        for tokens in args.tokens:
            result = cycles(target, draft, runner, options, tokens, args.cycles)
            print(name, *(f"{k} {v}" for k, v in result.items()), flush=True)
            found.append({"choice": name} | result)
    head = {"model": args.model, "overridden_ops": run_record.overridden(target.ops)}
    watch.write_result(args.out, "gpu-host-choice", {**head, "results": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
