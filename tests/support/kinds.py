"""The table of draft kinds: checkpoints of every kind, for each use that tests make of them.

A new kind needs an entry in each of `TABLES`; tests/arch/test_kinds.py names the missing ones. The
tests of conversion, of the cases of `validate --upstream`, of unusable files, of fuzzing, of GPU
engines and of recorded cycles then run with it. Models in memory are in memory_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import tiny, tiny_drafts

Make = Callable[[Path, Path], Path]
"""Makes a checkpoint folder of a draft for the target in another folder."""

DSPARK, EAGLE3 = tiny_drafts.speculators_dspark, tiny_drafts.eagle3

CONVERSION: dict[str, tuple[Any, dict[str, Any]]] = {
    "zlab": (tiny.zlab_dflash, {}),
    "zlab newer": (tiny.zlab_dflash, {"nested_rope": True, "layers": 3}),
    "speculators": (tiny.speculators_dflash, {}),
    "speculators full": (tiny.speculators_dflash, {"draft_vocab": None}),
    "speculators sliding": (tiny.speculators_dflash, {"window": 8, "non_causal": True}),
    "assistant": (tiny.assistant, {}),
    "assistant centroids": (tiny.assistant, {"centroids": 16}),
    "dflash from the anchor": (tiny.speculators_dflash, {"sample_from_anchor": True}),
    "dspark": (tiny_drafts.speculators_dspark, {}),
    "dspark gated": (tiny_drafts.speculators_dspark, {"head": "gated", "draft_vocab": None}),
    "dspark rnn": (tiny_drafts.speculators_dspark, {"head": "rnn", "confidence": "hidden"}),
    "deepspec": (tiny_drafts.deepspec_dspark, {"alias": True}),
    "dflash2": (tiny_drafts.speculators_dflash2, {}),
    "dflash2 zlab": (tiny_drafts.zlab_dflash2, {}),
    "eagle3": (tiny_drafts.eagle3, {}),
    "specforge": (tiny_drafts.eagle3, {"layout": "specforge", "embed": False}),
    "eagle3 norms": (tiny_drafts.eagle3, {"fc_norm": True, "qwen": True, "norm_output": True}),
    "p-eagle": (tiny_drafts.eagle3, {"depths": 4, "layers": 2, "before_fc": True, "window": 8}),
}
"""Maker and options: every layout of a checkpoint that `convert` reads."""

UPSTREAM: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dspark": (DSPARK, {}, "same"),
    "dspark-window": (DSPARK, {"window": 8}, "differs"),
    "dspark-gated": (DSPARK, {"head": "gated"}, "refused"),
    "dspark-hidden-confidence": (DSPARK, {"confidence": "hidden"}, "refused"),
    "dspark-no-heads": (DSPARK, {"rank": 0, "confidence": "none"}, "refused"),
    "deepspec-softcap": (tiny_drafts.deepspec_dspark, {}, "differs"),
    "deepspec": (tiny_drafts.deepspec_dspark, {"softcap": None}, "same"),
    "dflash": (tiny.speculators_dflash, {}, "same"),
    "dflash-anchor": (tiny.speculators_dflash, {"sample_from_anchor": True}, "refused"),
    "zlab": (tiny.zlab_dflash, {}, "differs"),
    "dflash2": (tiny_drafts.speculators_dflash2, {}, "same"),
    "dflash2-wide": (tiny_drafts.speculators_dflash2, {"top_k": 8}, "refused"),
    "eagle3": (EAGLE3, {}, "same"),
    "eagle3-window": (EAGLE3, {"window": 8}, "differs"),
    "eagle3-four": (EAGLE3, {"taps": (1, 2, 3, 4)}, "refused"),
    "eagle3-norms": (EAGLE3, {"fc_norm": True}, "refused"),
    "p-eagle": (EAGLE3, {"depths": 3}, "refused"),
    "assistant": (tiny.assistant, {}, "same"),
    "assistant-centroids": (tiny.assistant, {"centroids": 16}, "differs"),
}
"""Maker, options, and the case of `validate --upstream` that it is in."""

HOSTILE: dict[str, Make] = {
    "dflash": tiny.zlab_dflash,
    "dflash-reduced": tiny.speculators_dflash,
    "assistant": lambda to, on: tiny.assistant(to, on, centroids=16),
    "dspark": tiny_drafts.speculators_dspark,
    "eagle3": tiny_drafts.eagle3,
    "p-eagle": lambda to, on: tiny_drafts.eagle3(to, on, depths=4),
    "dflash2": tiny_drafts.speculators_dflash2,
}
"""Drafts whose files are made unusable, tensor by tensor."""

COMMANDS: dict[str, Make] = {
    "Z": partial(tiny.zlab_dflash, inter=32),
    "S": partial(tiny.speculators_dflash, inter=32),
    "A": partial(tiny.assistant, hidden=16, centroids=16, inter=32),
    "P": partial(tiny_drafts.speculators_dspark, inter=32),
    "E": partial(tiny_drafts.eagle3, inter=32),
    "D": partial(tiny_drafts.zlab_dflash2, inter=32),
}
"""Folders of the fuzzed command lines. Recorded cases in tests/fuzz/corpus choose from this list by
index: an entry more changes what they mean."""

READERS: dict[str, Make] = {
    "zlab": COMMANDS["Z"],
    "spec": COMMANDS["S"],
    "asst": COMMANDS["A"],
    "dspark": COMMANDS["P"],
    "deepspec": partial(tiny_drafts.deepspec_dspark, inter=32),
    "eagle3": COMMANDS["E"],
    "dflash2": COMMANDS["D"],
}
"""Seeds of the fuzzed file readers."""

GPU_WINDOW = 64
DRAFT: dict[str, Any] = {"heads": 4, "kv": 2, "head_dim": 64, "inter": 384}
CHAIN: dict[str, Any] = {"heads_": 4, "kv": 2, "head_dim": 64, "inter": 384}
GPU: dict[str, Make] = {
    "zlab": lambda at, on: tiny.zlab_dflash(at, on, block=16, window=GPU_WINDOW, layers=3, **DRAFT),
    "speculators": lambda at, on: tiny.speculators_dflash(
        at, on, block=8, window=GPU_WINDOW, **DRAFT
    ),
    "assistant": tiny.assistant,
    "centroids": lambda at, on: tiny.assistant(at, on, centroids=16),
    "eagle3": lambda at, on: tiny_drafts.eagle3(at, on, **CHAIN),
    "eagle3-window": lambda at, on: tiny_drafts.eagle3(
        at, on, window=GPU_WINDOW, layers=2, qwen=True, draft_vocab=None, **CHAIN
    ),
    "p-eagle": lambda at, on: tiny_drafts.eagle3(at, on, depths=5, **CHAIN),
    "dspark": lambda at, on: tiny_drafts.speculators_dspark(at, on, **DRAFT),
    "dspark-rnn": lambda at, on: tiny_drafts.speculators_dspark(at, on, head="rnn", **DRAFT),
    "deepspec": lambda at, on: tiny_drafts.deepspec_dspark(
        at, on, heads_=2, head_dim=512, inter=512
    ),
    "dflash2": lambda at, on: tiny_drafts.zlab_dflash2(at, on, block=8, window=GPU_WINDOW, **DRAFT),
}
"""Drafts of the GPU's engine, in shapes that its kernels support."""

CYCLE_WINDOW = 8
CYCLES: dict[str, Make] = {
    "zlab": lambda at, on: tiny.zlab_dflash(at, on, block=16, window=CYCLE_WINDOW, taps=(1,)),
    "assistant": lambda at, on: tiny.assistant(at, on, layers=2),
    "dspark-rnn": lambda at, on: tiny_drafts.speculators_dspark(at, on, head="rnn", taps=(1,)),
    "dflash2": lambda at, on: tiny_drafts.zlab_dflash2(at, on, block=8, taps=(1,)),
    "eagle3": lambda at, on: tiny_drafts.eagle3(at, on, taps=(1, 2)),
    "p-eagle": lambda at, on: tiny_drafts.eagle3(at, on, depths=6, taps=(1, 2), before_fc=True),
}
"""Drafts of recorded cycles, as small as possible: they run on the emulator."""

RUNNER_WINDOW = 16
_BLOCK: dict[str, Any] = {"heads": 2, "kv": 1, "head_dim": 64, "inter": 128, "taps": (1,)}
_CHAIN: dict[str, Any] = {"heads_": 2, "kv": 1, "head_dim": 64, "inter": 128, "taps": (1, 2)}
RUNNER: dict[str, Make] = {
    "zlab": partial(tiny.zlab_dflash, block=16, window=RUNNER_WINDOW, layers=1, **_BLOCK),
    "speculators": partial(tiny.speculators_dflash, block=8, window=RUNNER_WINDOW, **_BLOCK),
    "assistant": partial(tiny.assistant, layers=2, hidden=64, inter=64),
    "centroids": partial(tiny.assistant, layers=2, hidden=64, inter=64, centroids=16),
    "dspark-rnn": partial(tiny_drafts.speculators_dspark, head="rnn", **_BLOCK),
    "dflash2": partial(tiny_drafts.zlab_dflash2, block=8, window=RUNNER_WINDOW, **_BLOCK),
    "eagle3-two": partial(
        tiny_drafts.eagle3,
        layers=2,
        window=RUNNER_WINDOW,
        draft_vocab=None,
        before_residual=False,
        norm_output=True,
        qwen=True,
        **_CHAIN,
    ),
    "p-eagle": partial(
        tiny_drafts.eagle3, depths=6, window=RUNNER_WINDOW, before_fc=True, **_CHAIN
    ),
    "eagle3": partial(tiny_drafts.eagle3, **_CHAIN),
}
"""Drafts whose cycles are compared with the engine on the CPU."""

TABLES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "CONVERSION": list(CONVERSION.values()),
    "UPSTREAM": [(make, options) for make, options, _ in UPSTREAM.values()],
    **{
        name: [(make, {}) for make in table.values()]
        for name, table in {
            "HOSTILE": HOSTILE,
            "COMMANDS": COMMANDS,
            "READERS": READERS,
            "GPU": GPU,
            "CYCLES": CYCLES,
            "RUNNER": RUNNER,
        }.items()
    },
}
"""Maker and options of each checkpoint, by use."""
