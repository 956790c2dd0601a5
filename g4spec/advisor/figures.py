"""Facts that hold numbers: memory costs, published measurements, speeds, draft lengths.

Some are constants of the memory and speed arithmetic; tests check it against the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.schema import Fact, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCostFact(Fact):
    """A memory cost in GiB that is known without the model's shape.

    Attributes:
        token: bytes more for each token of the context beyond 8,192.
    """

    engine: str
    what: str
    gib: float
    per: str = ""
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTableFact(Fact):
    """Published cache sizes that tests compare with the formula: bytes per token and per slot of
    one model size, or GiB at several contexts."""

    engine: str
    model: str
    kv: str
    tp: int = 1
    global_token: int = 0
    sliding_slot: int = 0
    unwindowed: int = 0
    batched: int = 0
    contexts: tuple[int, ...] = ()
    gib: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFitFact(Fact):
    """Published largest contexts, in units of 1024 tokens, on cards of several memory sizes.

    Attributes:
        cards: memory in GiB. `f16`, `q8_0`: one entry per card; 0 = does not fit, -1 = the
            model's maximum, -2 = not stated.
    """

    model: str
    format: str
    draft: str
    cards: tuple[int, ...]
    f16: tuple[int, ...]
    q8_0: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReadingFact(Fact):
    """A published memory measurement.

    Attributes:
        check: the formula that must reproduce it: `total` (a llama.cpp process, GiB), `slope`
            (GiB between two contexts), `pool` (GiB of one sequence), `token` (bytes), `tokens` (in
            a pool), `pages`, `unwindowed` (bytes per token with sliding layers stored in full),
            `unwindowed-tokens`, `full-sliding` (GiB of that), `card` (GiB on one card); empty if
            no formula covers it.
        kv_v: type of the values, where it differs. `tp`: cards. `batched`: vLLM's
            max_num_batched_tokens. `pool_gib`, `tokens`: size of the cache pool. `util`: vLLM's
            gpu-memory-utilization.
        value: the measured value. `tolerance`: relative.
    """

    engine: str
    check: str = ""
    model: str = ""
    draft: str = ""
    draft_gb: float = 0.0
    kv: str = ""
    kv_v: str = ""
    context: int = 0
    context_to: int = 0
    tp: int = 1
    batched: int = 2048
    pool_gib: float = 0.0
    tokens: int = 0
    weights_gb: float = 0.0
    util: float = 0.0
    value: float = 0.0
    tolerance: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFact(Fact):
    """A published speed. `base`: tokens/s without a draft; `best`: range with a draft."""

    hardware: str
    engine: str = ""
    cards: tuple[str, ...] = ()
    gpus: int = 0
    model: str = ""
    draft: str = ""
    n: int = 0
    base: float = 0.0
    best: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyFact(Fact):
    """Speed of plain decoding, as fractions of the GPU's nominal bandwidth (`low` to `high`), and
    the cost of a cycle with a draft in plain steps (`cycle_*`; 0 = not published).

    Attributes:
        bandwidth: range of nominal bandwidths, in GB/s, that it is for.
        read: fraction of the nominal bandwidth that a sum over memory reads on these GPUs; `low`
            and `high` divided by it are fractions of a measured bandwidth.
    """

    moe: bool
    bandwidth: Range
    low: float
    high: float
    read: float
    cycle_low: float = 0.0
    cycle_high: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLengthFact(Fact):
    """Recommended draft lengths: for code, for chat, and with 4 to 8 concurrent requests.

    Attributes:
        quant: part of the target's weight format that it is for; "" for every format.
        experts_in_ram: True if it is for llama.cpp's -ncmoe.
    """

    model: str
    kind: str
    maker: str = ""
    quant: str = ""
    experts_in_ram: bool = False
    code: int
    chat: int
    streams: int
    engine: tuple[str, ...] = ()
    cc: Range = ""
    limit: str = ""
