"""Cycles that wait for nobody: the same cycles as the loop's, read at most once, and one late."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec import convert
from g4spec.ops.sampling import Sampler
from g4spec.runtime.cuda.step import cycle, screen
from g4spec.runtime.engine import Engine, Options, Run
from g4spec.runtime.length import Auto, Fixed
from tests import tiny, tiny_drafts
from tests.emulator import unseen
from tests.gpu.device import DEVICE, EMULATED
from tests.oracle import build

pytestmark = pytest.mark.gpu

WINDOW, VOCAB, CTX = 16, 512, 384
SHAPE: dict[str, Any] = {
    "hidden": 128, "inter": 128, "heads": 2, "kv": 1, "global_kv": 1, "head_dim": 64,
    "global_head_dim": 128, "window": WINDOW, "vocab": VOCAB, "layers": 2, "period": 2,
}  # fmt: skip
DRAFT: dict[str, Any] = {"heads": 2, "kv": 1, "head_dim": 64, "inter": 128, "taps": (1,)}
CHAIN: dict[str, Any] = {"heads_": 2, "kv": 1, "head_dim": 64, "inter": 128, "taps": (1, 2)}
MAKE: dict[str, Any] = {
    "zlab": lambda at, on: tiny.zlab_dflash(at, on, block=16, window=WINDOW, layers=1, **DRAFT),
    "speculators": lambda at, on: tiny.speculators_dflash(at, on, block=8, window=WINDOW, **DRAFT),
    "assistant": lambda at, on: tiny.assistant(at, on, layers=2, hidden=64, inter=64),
    "centroids": lambda at, on: tiny.assistant(at, on, layers=2, hidden=64, inter=64,
                                               centroids=16),
    "dspark-rnn": lambda at, on: tiny_drafts.speculators_dspark(at, on, head="rnn", **DRAFT),
    "dflash2": lambda at, on: tiny_drafts.zlab_dflash2(at, on, block=8, window=WINDOW, **DRAFT),
    "eagle3": lambda at, on: tiny_drafts.eagle3(at, on, **CHAIN),
    "eagle3-two": lambda at, on: tiny_drafts.eagle3(
        at, on, layers=2, window=WINDOW, draft_vocab=None, before_residual=False, norm_output=True,
        qwen=True, **CHAIN),
    "p-eagle": lambda at, on: tiny_drafts.eagle3(at, on, depths=6, window=WINDOW, before_fc=True,
                                                 **CHAIN),
}  # fmt: skip
GREEDY, HOT = Sampler(), Sampler(temperature=1.0, seed=3)
NARROW = Sampler(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, seed=4)
PROMPT = build.prompt(118, VOCAB, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("cycles")
    on = tiny.target(at / "target", **SHAPE)
    convert.convert(build.lively(on, 5.0), at / "target.gguf", type="q8_0")
    for name, make in MAKE.items():
        make(at / name, on)
        convert.convert(at / name, at / f"{name}.gguf", target=on, type="q8_0")
    return at


def load(folder: Path, draft: str = "zlab", **settings: Any) -> Engine:
    return Engine.load(folder / "target.gguf", folder / f"{draft}.gguf",
                       **({"n_ctx": CTX, "device": "cuda", "chunk": 64} | settings))  # fmt: skip


def cycles(
    engine: Engine, options: Options, *, parts: bool = False, prompt: list[int] = PROMPT
) -> tuple[Run, list[tuple[Any, ...]]]:
    """A finished run, and what its cycles did; with `parts` by the loop alone."""
    players = engine.player, engine.plain
    if parts:
        engine.player = engine.plain = None
    run = engine.generate(prompt, options)
    did = [(c.tokens, c.logits, c.drafted, c.accepted) for c in run]
    engine.player, engine.plain = players
    return run, did


def options(count: Any, n: int = 24, sampler: Sampler = GREEDY, **more: Any) -> Options:
    return Options(n, sampler, count, **{"ignore_eos": True, **more})


def help_out(engine: Engine, truth: list[int], every: int = 7) -> None:
    """Proposals begin with some of the `truth`: position * `every` % 16 of its tokens."""
    draft: Any = engine.draft
    propose, fill = type(draft).propose, type(draft).fill
    text = torch.tensor(truth + [0] * 64, device=DEVICE)
    index = torch.arange(16, device=DEVICE)

    def proposed(anchor: int, position: int, count: int, chooser: Any) -> list[int]:
        own = propose(draft, anchor, position, count, chooser)
        true = text[position + 1 : position + 1 + min(count, position * every % 16)].tolist()
        return [*true, *own[len(true) :]]

    def filled(ids: Any, positions: Any, count: int, pick: Any) -> torch.Tensor:
        own = fill(draft, ids, positions, count, pick)
        right = index[:count] < positions[:1] * every % 16
        return torch.where(right, text[positions[:1] + 1 + index[:count]], own)

    draft.propose, draft.fill = proposed, filled


@pytest.mark.parametrize("sampler,counts", [
    (GREEDY, tuple(range(1, 16))), (HOT, (4, 15)), (NARROW, (7,)),
], ids=["greedy", "hot", "narrow"])  # fmt: skip
def test_every_length_does_what_the_loop_does(
    folder: Path, sampler: Sampler, counts: tuple[int, ...]
) -> None:
    """Texts, logits, proposals and acceptance, over the ends of all rings."""
    engine = load(folder)
    plain, _ = cycles(engine, options(0, 16, sampler))
    assert len(set(plain.ids)) > 3 and len(PROMPT) < 128 < len(PROMPT) + len(plain.ids)
    help_out(engine, PROMPT + plain.ids)
    for count in counts[:: 7 if EMULATED else 1]:
        run, did = cycles(engine, options(count, 16, sampler))
        assert run.ids == plain.ids, count
    assert did == cycles(engine, options(count, 16, sampler), parts=True)[1]
    assert run.stats.accepted > 5


@pytest.mark.parametrize("sampler", [GREEDY, HOT, NARROW], ids=["greedy", "hot", "narrow"])
@pytest.mark.parametrize("draft", [None, "zlab"])
def test_plain_steps_do_what_the_loop_does(
    folder: Path, draft: str | None, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other without the host; to the end of the context, and up to a stop."""
    room, done = 20, list[str]()
    path = None if draft is None else folder / f"{draft}.gguf"
    engine = Engine.load(folder / "target.gguf", path, n_ctx=len(PROMPT) + room, device="cuda",
                         chunk=64)  # fmt: skip
    wanted, did = cycles(engine, options(0, 999, sampler), parts=True)
    for name in ("start", "result"):
        monkeypatch.setattr(cycle.Cycles, name, noted(getattr(cycle.Cycles, name), name, done))
    run, played = cycles(engine, options(0, 999, sampler))
    assert run.ids == wanted.ids and played == did and run.stats.stop_reason == "context"
    assert done == ["start"] + ["start", "result"] * (room - 1) + ["result"]
    engine.stop_ids = frozenset({wanted.ids[9]})
    for parts in (False, True, False):
        run, _ = cycles(engine, options(0, 999, sampler, ignore_eos=False), parts=parts)
        assert run.ids == wanted.ids[: wanted.ids.index(wanted.ids[9])]


@pytest.mark.parametrize("name", [n for n in MAKE if n != "zlab"])
def test_every_kind_does_what_the_loop_does(folder: Path, name: str) -> None:
    engine = load(folder, name)
    assert engine.player is not None
    plain, _ = cycles(engine, options(0, 14, HOT))
    help_out(engine, PROMPT + plain.ids, 5)
    run, did = cycles(engine, options(5, 14, HOT))
    assert run.ids == plain.ids and run.stats.accepted
    assert did == cycles(engine, options(5, 14, HOT), parts=True)[1]


def test_a_large_table_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proposed by the upper bits of a table is what the loop proposes by all of it, but for
    some tokens of a random model, whose logits are close; with noise all of it is read."""
    on = tiny.target(tmp_path / "target", **SHAPE | {"hidden": 256})
    convert.convert(build.lively(on, 5.0), tmp_path / "target.gguf", type="q6_k")
    MAKE["zlab"](tmp_path / "zlab", on)
    draft = build.lively(tmp_path / "zlab", 40.0, "o_proj|down_proj")
    convert.convert(draft, tmp_path / "zlab.gguf", target=on, type="q8_0")
    done = list[str]()
    monkeypatch.setattr(screen, "LEAST", VOCAB)
    monkeypatch.setattr(screen, "best", noted(screen.best, "best", done))
    engine = load(tmp_path)
    for sampler in (HOT, GREEDY):
        assert not done
        did, by_loop = (
            cycles(engine, options(15, 6, sampler), parts=parts, prompt=PROMPT[:24])[1]
            for parts in (False, True)
        )
        assert [c[:2] for c in did] == [c[:2] for c in by_loop]
        drafted = [[token for c in found for token in c[2]] for found in (did, by_loop)]
        others = sum(a != b for a, b in zip(*drafted, strict=True))
        assert len(set(drafted[0])) > 1 and others <= (0.05 * len(drafted[0]) if done else 0)
    assert done


class Turns(Fixed):
    """One number of tokens after the other."""

    def __init__(self, *counts: int) -> None:
        self._counts = itertools.cycle(counts)

    def next(self, most: int) -> int:
        return min(next(self._counts), most)

    def again(self, count: int, most: int) -> bool:
        return False


@pytest.mark.parametrize("name", ["eagle3", "eagle3-two", "p-eagle"])
def test_what_a_chain_keeps_is_what_the_loop_keeps(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of its caches and the feature that waits, when cycles and plain steps take turns."""
    engine, found = load(folder, name), []
    draft: Any = engine.draft
    plain, _ = cycles(engine, options(0, 24))
    help_out(engine, PROMPT + plain.ids, 3)
    monkeypatch.setattr(engine, "_length", lambda *args: Turns(3, 0, 5, 1, 0, 0, 2))
    for parts in (False, True):
        run, did = cycles(engine, options(5, 24), parts=parts)
        assert run.ids == plain.ids and 0 < run.stats.accepted < run.stats.drafted
        run._cycles.backlog.flush()
        last = len(PROMPT) + len(run.ids) - 3  # token `last` + 1 is the newest that was read
        seen = [kv.read(last + 1 - (kv.window or last + 1), last) for kv in draft.kv]
        found.append((did, torch.cat([x.flatten() for kv in seen for x in kv]).tolist(),
                      draft._waiting.tolist()))  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["zlab", "eagle3"])
def test_acceptance_may_be_forced(folder: Path, name: str) -> None:
    engine = load(folder, name)
    assert engine.draft is not None
    engine.draft.commit(engine.target.read(PROMPT[:20], 0))
    player = engine.target.ops.player(engine.target, engine.draft, forced=2)
    assert player is not None and player.ready(GREEDY)
    player.begin(7, 20)
    for _ in range(2):
        player.start(4)
    assert [player.result().cycle.accepted for _ in range(2)] == [2, 2]


def test_the_host_reads_once_a_cycle_and_one_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, done, waits = load(folder), list[str](), 0
    for name in ("start", "result"):
        monkeypatch.setattr(cycle.Cycles, name, noted(getattr(cycle.Cycles, name), name, done))
    event: Any = torch.cuda.Event
    wait = event.synchronize

    def synchronize(self: Any) -> None:
        nonlocal waits
        waits += 1
        wait(self)

    cycles(engine, options(3, 12))  # records
    done.clear()
    run = engine.generate(PROMPT, options(3, 12))
    for number, _ in enumerate(run):
        if number == 0:  # after the prompt
            monkeypatch.setattr(event, "synchronize", synchronize)
    assert done.count("result") == run.stats.cycles == waits
    assert done[:6] == ["start", "start", "result", "start", "result", "start"]


def noted(call: Any, name: str, done: list[str]) -> Any:
    """`call`, written down."""

    def noting(self: Any, *args: Any) -> Any:
        done.append(name)
        return call(self, *args)

    return noting


def test_a_stop_is_found_late_and_leaves_nothing_behind(folder: Path) -> None:
    engine = load(folder)
    plain, _ = cycles(engine, options(0))
    help_out(engine, PROMPT + plain.ids)
    for at in (6, 13):
        engine.stop_ids = frozenset({plain.ids[at]})
        first = plain.ids.index(plain.ids[at])
        run, did = cycles(engine, options(5, ignore_eos=False))
        assert run.ids == plain.ids[:first] and run.stats.stop_reason.startswith("stop token")
        assert did == cycles(engine, options(5, ignore_eos=False), parts=True)[1]
        engine.stop_ids = frozenset()
        run, _ = cycles(engine, options(5), prompt=PROMPT[:9])
        fresh, _ = cycles(load(folder), options(0), prompt=PROMPT[:9])
        assert run.ids == fresh.ids


def test_the_end_of_the_context(folder: Path) -> None:
    plain, _ = cycles(load(folder), options(0))
    for room in (1, 6, 17):
        engine = load(folder, n_ctx=len(PROMPT) + room)
        help_out(engine, PROMPT + plain.ids)
        for count in (2, 15):
            run, _ = cycles(engine, options(count, 999))
            assert run.ids == plain.ids[: room + 1] and run.stats.stop_reason == "context"


@pytest.mark.parametrize("cost", [1.0, 9.0])
def test_auto_runs_ahead_where_it_is_certain(
    folder: Path, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cycles that cost no more than plain steps, and of plain steps where drafts cost much."""
    engine, done = load(folder), list[str]()
    plain, _ = cycles(engine, options(0, 48))
    help_out(engine, PROMPT + plain.ids)
    monkeypatch.setattr(engine, "_measure", lambda *players: {0: 1.0, 1: cost, 15: cost})
    for name in ("start", "result"):
        monkeypatch.setattr(cycle.Cycles, name, noted(getattr(cycle.Cycles, name), name, done))
    run, _ = cycles(engine, options("auto", 48))
    assert run.ids == plain.ids
    assert bool(run.stats.drafted) == (cost == 1.0)
    if run.stats.drafted:
        assert ("start", "start") in itertools.pairwise(done)
    else:
        assert done == ["start"] + ["start", "result"] * (run.stats.cycles - 1) + ["result"]


@pytest.mark.parametrize("parts", [False, True])
def test_auto_measures_what_will_be_done(
    folder: Path, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles and plain steps as they are played, or parts; nothing of it is left behind."""
    engine, started = load(folder), list[int]()
    plain, _ = cycles(engine, options(0, 12))
    start = cycle.Cycles.start

    def noting(self: Any, count: int) -> None:
        started.append(count)
        start(self, count)

    monkeypatch.setattr(cycle.Cycles, "start", noting)
    players = (None, None) if parts else (engine.player, engine.plain)
    assert engine.player is not None and engine.player.ready(GREEDY)
    costs = engine._measure(*players)
    assert list(costs) == [0, 1, 15] and min(costs.values()) > 0
    assert started == ([] if parts else [0, 0, 1, 15] * 3)
    run, _ = cycles(engine, options("auto", 12), parts=parts)
    assert run.ids == plain.ids


def test_a_draft_is_brought_up_to_date_after_steps_that_ran_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps for which a draft is not asked, then cycles with it: as in parts."""
    engine = load(folder)
    plain, _ = cycles(engine, options(0))
    help_out(engine, PROMPT + plain.ids, 15)

    class Late(Auto):
        def _best(self, most: int, balance: float) -> int:
            return min(5, most) if len(answers) > 6 else 0

        def next(self, most: int) -> int:
            answers.append(super().next(most))
            return answers[-1]

    found = []
    for parts in (False, True):
        answers: list[int] = []
        late = Late({0: 1.0, 1: 1.0, 15: 1.0})
        monkeypatch.setattr(engine, "_length", lambda *args, late=late: late)
        run, did = cycles(engine, options("auto"), parts=parts)
        assert run.ids == plain.ids and run.stats.accepted and answers[:8] == [0] * 7 + [5]
        found.append(did)
    assert found[0] == found[1]


def test_a_draft_that_is_no_use_is_left_out(folder: Path) -> None:
    engine = load(folder)
    plain, _ = cycles(engine, options(0, 12))
    draft: Any = engine.draft
    draft.w["output_norm.weight"].fill_(torch.nan)
    run, _ = cycles(engine, options(4, 12))
    assert run.ids == plain.ids and "cannot be used" in run.notes[0]
    assert run.stats.drafted == 4


def test_what_cannot_be_recorded_is_done_in_parts(folder: Path) -> None:
    engine = load(folder)
    assert engine.player is not None
    assert not engine.player.ready(Sampler(temperature=1.0, top_p=0.9))
    assert engine.player.ready(GREEDY)
    assert load(folder, device="cpu").player is None
    assert Engine.load(folder / "target.gguf", "ngram", n_ctx=CTX, device="cuda").player is None


@pytest.mark.parametrize("read", [
    lambda x: x[0].item(), lambda x: int(x[1]), lambda x: bool(x[0] > 1), lambda x: x.tolist(),
    lambda x: x.cpu(), lambda x: x[x > 1], lambda x: x.nonzero(), lambda x: torch.tensor([1.0]),
    lambda x: x.index_put_((x > 1,), x[:1]),
])  # fmt: skip
def test_a_recording_that_looks_at_values_fails(read: Any) -> None:
    x = torch.arange(4, device=DEVICE)
    with pytest.raises(unseen.NotCapturable), unseen.capturing():
        read(x)
    with unseen.capturing():
        torch.where(x > 1, x[x], x * 2).masked_fill(x > 2, 0)
