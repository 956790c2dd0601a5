"""Two engines in one process, on one GPU or two; the caller's current device stays as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.gpu.device import needs_gpu
from tests.oracle import build

pytestmark = [pytest.mark.gpu, needs_gpu]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PAIRS = [("cuda:0", "cuda:0"), pytest.param(("cuda:0", "cuda:1"), marks=needs_two)]
PROMPTS = [build.prompt(n, family.VOCAB, n) for n in (3, 2 * family.WINDOW + 5, 40)]
SAMPLERS = [Sampler(), Sampler(temperature=0.8, seed=3), Sampler(repetition_penalty=1.1)]
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


@needs_two
def test_the_first_gpu_is_left_alone(files: dict[str, Path]) -> None:
    torch.empty(1, device="cuda:0")  # its context
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(0)
    with load(files, "cuda:1") as engine:
        assert all(len(text(r)[0]) >= TOKENS for r in submit(engine))
        assert torch.cuda.memory_allocated(1) > 0
        assert torch.cuda.memory_reserved(0) == before
    assert torch.empty(1, device="cuda").device.index == 0


@pytest.mark.parametrize("devices", PAIRS)
def test_two_engines_in_turn(files: dict[str, Path], devices: tuple[str, str]) -> None:
    """Steps of both alternate in one thread."""
    with load(files, devices[0]) as a, load(files, devices[1]) as b:
        for pair in zip(submit(a), submit(b), strict=True):
            one, other = (text(cycles) for cycles in zip(*zip_longest(*pair), strict=True))
            assert one == other and len(one[0]) >= TOKENS


@pytest.mark.parametrize("devices", PAIRS)
def test_two_engines_at_once(files: dict[str, Path], devices: tuple[str, str]) -> None:
    """Each records its steps while the other one allocates memory and waits for results."""
    with load(files, devices[0]) as engine:
        wanted = [text(r) for r in submit(engine)]
    with load(files, devices[0]) as a, load(files, devices[1]) as b, ThreadPoolExecutor() as pool:
        for engine in (a, b):
            engine.start()
        found = pool.map(lambda engine: [text(r) for r in submit(engine)], [a, b] * 3)
        assert all(texts == wanted for texts in found)


def test_current_streams_of_the_caller_change_nothing(files: dict[str, Path]) -> None:
    """Each step runs in another stream, while the cycle of the one before it may still run."""
    streams = [torch.cuda.Stream("cuda:0") for _ in range(2)]
    with load(files, "cuda:0") as engine:
        wanted = [text(r) for r in submit(engine)]
    with torch.cuda.stream(streams[0]), torch.inference_mode():
        engine = load(files, "cuda:0")
    with engine:
        with torch.cuda.stream(streams[1]), torch.inference_mode():
            requests, turn = submit(engine), 0
        while not all(r.done for r in requests):
            turn += 1
            with torch.cuda.stream(streams[turn % 2]):
                engine.step()
                assert torch.cuda.current_stream() == streams[turn % 2]
        assert [text(r) for r in requests] == wanted


def test_a_program_that_allocates_meanwhile(files: dict[str, Path]) -> None:
    done = threading.Event()

    def work() -> int:
        count = 0
        while not done.is_set():
            x = torch.zeros(1 << 20, device="cuda:0")
            x.sum().item()
            del x
            torch.cuda.empty_cache()
            count += 1
        return count

    with ThreadPoolExecutor() as pool, load(files, "cuda:0") as engine:
        counted = pool.submit(work)
        try:
            texts = [text(r) for r in submit(engine)]
        finally:
            done.set()
        assert all(len(ids) >= TOKENS for ids, _ in texts) and counted.result() > 0


@needs_two
def test_perplexity_of_one_against_the_other(files: dict[str, Path]) -> None:
    parts = [build.prompt(64, family.VOCAB, i) for i in range(3)]
    with load(files, "cuda:0") as a, load(files, "cuda:1") as b:
        found = perplexity.measure(b, parts, base=a).against
        assert found is not None and found.divergence.value == 0 and found.same_top.value == 1
