"""An engine on the second GPU: the first one and the caller's current device are left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from g4spec.core import Cycle
from g4spec.measure import perplexity
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from tests.gpu import family
from tests.oracle import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

GPUS = "cuda:0", "cuda:1"
PROMPTS = [build.prompt(n, family.VOCAB, n) for n in (3, 2 * family.WINDOW + 5, 40)]
SAMPLERS = [Sampler(), Sampler(temperature=0.8, seed=3), Sampler()]
TOKENS = 24
Text = tuple[list[int], list[float]]
"""Tokens and their logits."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return family.trained(tmp_path_factory.mktemp("trained"), family.TYPES[0])


@pytest.fixture(autouse=True)
def first_gpu_is_current() -> Iterator[None]:
    with torch.cuda.device(0):
        yield
        assert torch.cuda.current_device() == 0


def load(files: dict[str, Path], device: str) -> Engine:
    return Engine.load(
        files["target"], files["dflash"], n_ctx=family.CTX, device=device, parallel=len(PROMPTS)
    )


def submit(engine: Engine) -> list[Request]:
    return [
        engine.submit(ids, Options(n_predict=TOKENS, ignore_eos=True, sampler=sampler))
        for ids, sampler in zip(PROMPTS, SAMPLERS, strict=True)
    ]


def text(cycles: Iterable[Cycle | None]) -> Text:
    read = [c for c in cycles if c is not None]
    return [t for c in read for t in c.tokens], [x for c in read for x in c.logits]


def test_it_uses_no_memory_of_the_first(files: dict[str, Path]) -> None:
    torch.empty(1, device="cuda:0")  # its context
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(0)[0], torch.cuda.memory_reserved(0)
    with load(files, "cuda:1") as engine:
        assert all(len(text(r)[0]) >= TOKENS for r in submit(engine))
        assert torch.cuda.memory_allocated(1) > 0
        assert (torch.cuda.mem_get_info(0)[0], torch.cuda.memory_reserved(0)) == before
    assert torch.empty(1, device="cuda").device.index == 0


def test_two_engines_in_turn(files: dict[str, Path]) -> None:
    """Steps of both alternate in one thread."""
    with load(files, GPUS[0]) as a, load(files, GPUS[1]) as b:
        for pair in zip(submit(a), submit(b), strict=True):
            one, other = (text(cycles) for cycles in zip(*zip_longest(*pair), strict=True))
            assert one == other and len(one[0]) >= TOKENS


def test_two_engines_at_once(files: dict[str, Path]) -> None:
    with load(files, GPUS[0]) as engine:
        wanted = [text(r) for r in submit(engine)]
    found: dict[str, list[Text]] = {}
    with load(files, GPUS[0]) as a, load(files, GPUS[1]) as b:
        for engine in (a, b):
            engine.start()

        def read(device: str, engine: Engine) -> None:
            for _ in range(3):
                found[device] = [text(r) for r in submit(engine)]

        threads = [
            threading.Thread(target=read, args=pair) for pair in zip(GPUS, (a, b), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {GPUS[0]: wanted, GPUS[1]: wanted}


def test_perplexity_of_one_against_the_other(files: dict[str, Path]) -> None:
    parts = [build.prompt(64, family.VOCAB, i) for i in range(3)]
    with load(files, GPUS[0]) as a, load(files, GPUS[1]) as b:
        found = perplexity.measure(b, parts, base=a).against
        assert found is not None and found.divergence.value == 0 and found.same_top.value == 1
