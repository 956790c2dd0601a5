"""Memory arithmetic for the engines people have, step by step.

need = weights + draft + cache of global layers + cache of sliding layers + the draft's cache +
working buffers + CUDA context. The facts hold the constants and published readings; tests hold
the arithmetic against them. Sources: llama.cpp `llama-kv-cache-iswa.cpp` and `tools/fit-params`,
vLLM `SlidingWindowSpec` and `max_in_flight_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import FixedCostFact
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.core import CacheShape
from g4spec.ops.kv_size import pool_positions
from g4spec.runtime.cuda.cache.cuda_kv_size import ROTARY_PAIRS, SLACK, capacity, row_columns

BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "fp8": 8.0,
    "int8": 8.1,
    "nvfp4": 4.5,
}
"""Bits a cached value takes, block scales included."""

GGUF = ("llama.cpp", "g4spec")
"""Engines that load GGUF files."""
LLAMACPP_KV = ("f16", "q8_0", "q4_0")
VLLM_KV = ("bf16", "fp8")
BLOCK = 16
"""Tokens of a vLLM cache block."""
UNKNOWN_SIZE = "its size is not known"
"""How a step reads that counts nothing."""
FITTED = "fitted to published readings"
OWN_SIZES = ("26b", "31b", "12b", "e4b", "e2b")  # the first takes most
LARGE = 36 << 30
"""Bytes of a card from which our runtime reads prompts in chunks of more than 1,024."""
UBATCH = 512
"""llama.cpp's default micro-batch."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the arithmetic: bytes a card, and how they come about."""

    name: str
    nbytes: int
    how: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run needs on one card.

    Attributes:
        available: bytes that the engine may use there.
        largest: most tokens that fit, at most the model's context; 0 = not even 256.
    """

    engine: str
    format: str
    kv: str
    context: int
    items: tuple[MemoryItem, ...]
    available: int
    largest: int

    @property
    def total(self) -> int:
        return sum(s.nbytes for s in self.items)

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def token_bytes(caches: Sequence[CacheShape], kv: str, kv_v: str | None = None) -> float:
    """Bytes of keys and values that global layers add for one token. `kv_v`: type of values."""
    bits = BITS[kv] + BITS[kv_v or kv]
    return sum(c.n_kv * c.head_dim for c in caches if c.window is None) * bits / 8


def g4spec_token_bytes(caches: Sequence[CacheShape], kv: str) -> float:
    """As `token_bytes`, of our runtime on a GPU. Global layers whose KV heads are not as many as
    those of sliding layers are the ones whose values are their keys (`attention_k_eq_v`); there it
    keeps of the keys only what turns."""
    others = {c.n_kv for c in caches if c.window is not None}
    pairs = [
        replace(c, rotary_pairs=0 if c.n_kv in others else ROTARY_PAIRS)
        for c in caches
        if c.window is None
    ]
    return sum(map(row_columns, pairs)) * BITS[kv] / 8


def slot_bytes(caches: Sequence[CacheShape], kv: str, kv_v: str | None = None) -> float:
    """Bytes of one position in all sliding layers."""
    bits = BITS[kv] + BITS[kv_v or kv]
    return sum(c.n_kv * c.head_dim for c in caches if c.window is not None) * bits / 8


def window_of(caches: Sequence[CacheShape]) -> int:
    return max((c.window for c in caches if c.window is not None), default=0)


def llamacpp_slots(caches: Sequence[CacheShape], context: int, sequences: int = 1) -> int:
    """Positions that llama.cpp keeps in sliding layers, padded to 256."""
    wanted = min(context, window_of(caches) * sequences + UBATCH)
    return -(-wanted // 256) * 256


def g4spec_slots(caches: Sequence[CacheShape], context: int) -> int:
    """Positions that our runtime keeps there on a GPU: prompts go around the rings."""
    return capacity(context, window_of(caches), SLACK)


def vllm_slots(window: int, batched: int, context: int, batches: int = 2) -> int:
    """Positions that vLLM keeps in sliding layers for one sequence of at most `context` tokens;
    `batches` in flight (2 with asynchronous scheduling)."""
    blocks = math.ceil((window - 1 + batches * batched) / BLOCK) + 1
    return min(blocks, math.ceil(context / BLOCK)) * BLOCK


def vllm_pages(caches: Sequence[CacheShape], context: int, batched: int) -> int:
    """Pages of one sequence: vLLM puts as many layers into a group as there are global ones; a
    page holds 16 sliding tokens or as many global ones as take the same bytes."""
    groups = sum(c.window is not None for c in caches) / sum(c.window is None for c in caches)
    sliding = next(c for c in caches if c.window is not None)
    full = next(c for c in caches if c.window is None)
    ratio = sliding.n_kv * sliding.head_dim / (full.n_kv * full.head_dim)
    per_page = int(BLOCK * ratio)
    blocks = vllm_slots(window_of(caches), batched, context) // BLOCK
    return math.ceil(context / per_page) + int(groups) * blocks


def heads_per_card(n_kv: int, tp: int) -> float:
    """KV heads on one card: divided, but never less than one."""
    return max(n_kv / tp, 1.0)


def shapes_per_card(caches: Sequence[CacheShape], tp: int) -> tuple[CacheShape, ...]:
    """Cache shapes on one card of a tensor-parallel group."""
    return tuple(
        CacheShape(math.ceil(heads_per_card(c.n_kv, tp)), c.head_dim, c.window) for c in caches
    )


def vllm_cache(
    caches: Sequence[CacheShape], context: int, kv: str, tp: int, batched: int
) -> tuple[int, int]:
    """Bytes a card for one sequence: global layers, sliding layers."""
    mine = shapes_per_card(caches, tp)
    slots = vllm_slots(window_of(caches), batched, context)
    return int(token_bytes(mine, kv) * context), int(slot_bytes(mine, kv) * slots)


def fixed_cost(facts: Facts, id: str) -> int:
    """A fixed cost in bytes."""
    return int(facts.get(FixedCostFact, id).gib * GIB)


def _how(n: float, unit: str, count: int, what: str) -> str:
    return f"{n:,.0f} bytes a {unit} x {count:,} {what}"


class Calculator:
    """Plans for one machine and pair.

    Args:
        gpus: cards that share the model. `batched`: vLLM's max_num_batched_tokens.
        util: vLLM's gpu-memory-utilization.
    """

    def __init__(
        self,
        facts: Facts,
        machine: Machine,
        target: TargetModel,
        draft: DraftModel | None,
        gpus: int,
        batched: int = 2048,
    ) -> None:
        self.facts, self.machine, self.target, self.draft = facts, machine, target, draft
        self.gpus, self.batched = max(gpus, 1), batched

    @property
    def util(self) -> float:
        return 0.80 if self.machine.unified else 0.92

    def available(self, engine: str) -> int:
        """Bytes of a card that an engine may fill."""
        if engine in GGUF:
            reserve = (
                8 * GIB if self.machine.unified else fixed_cost(self.facts, "fixed-llamacpp-margin")
            )
            return max((self.machine.free or 0) - reserve, 0)
        total = self.machine.memory or 0
        free = self.machine.free
        left = total if free is None else free
        wanted = int(total * self.util)
        if self.machine.unified:
            return min(wanted, left)
        return max(wanted - (total - left), 0)

    def draft_bytes(self, engine: str) -> int:
        """Weights of the draft as the engine loads it."""
        if self.draft is None:
            return 0
        if engine in GGUF:
            return self.draft.gguf_bytes or (self.draft.nbytes * 17 // 32)
        return self.draft.nbytes

    def plan(self, engine: str, option: WeightFormat, kv: str, context: int) -> MemoryPlan:
        """The arithmetic for one context, and the largest context that fits."""
        items = self._items(engine, option, kv, context)
        available = self.available(engine)
        return MemoryPlan(
            engine,
            option.format,
            kv,
            context,
            items,
            available,
            self._largest(engine, option, kv, available),
        )

    def _largest(self, engine: str, option: WeightFormat, kv: str, available: int) -> int:
        """By bisection over multiples of 256."""

        def fits(n: int) -> bool:
            return sum(s.nbytes for s in self._items(engine, option, kv, n * 256)) <= available

        low, high = 0, self.target.context // 256
        if fits(high):
            return high * 256
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * 256

    def _items(
        self, engine: str, option: WeightFormat, kv: str, context: int
    ) -> tuple[MemoryItem, ...]:
        if engine in GGUF:
            return self._gguf(engine, option, kv, context)
        return self._vllm(option, kv, context)

    def _work(self) -> tuple[int, str]:
        """What our runtime takes beside weights and caches, and why so much."""
        large = (self.machine.memory or 0) >= LARGE
        size = self.target.size if self.target.size in OWN_SIZES else OWN_SIZES[0]
        how = f"prompts in chunks of up to {4096 if large else 1024}"
        return fixed_cost(self.facts, f"fixed-g4spec-{size}{'-large' * large}"), how

    def _weights(self, option: WeightFormat, own: bool, n: int, share: str) -> MemoryItem:
        """A card's share of the weights; our runtime rewrites some types for a GPU."""
        held = option.own or option.nbytes if own and self.machine.gpus else option.nbytes
        how = " as the GPU holds them" if held != option.nbytes else ""
        return MemoryItem("weights", held // n, f"{option.format}, {held / 1e9:.2f} GB{how}{share}")

    def _gguf(
        self, engine: str, option: WeightFormat, kv: str, context: int
    ) -> tuple[MemoryItem, ...]:
        """llama.cpp splits by layer: weights and cache are shared, buffers are on every card."""
        n, caches = self.gpus, self.target.caches
        own = engine == "g4spec"
        slots = g4spec_slots(caches, context) if own else llamacpp_slots(caches, context)
        tokens = pool_positions(context) if own else context
        share = f" / {n} cards" if n > 1 else ""
        per_token = (g4spec_token_bytes if own else token_bytes)(caches, kv)
        per_slot = slot_bytes(caches, kv)
        items = [
            self._weights(option, own, n, share),
            MemoryItem(
                "global cache",
                int(per_token * tokens) // n,
                _how(per_token, "token", tokens, f"tokens{', one page spare' * own}") + share,
            ),
            MemoryItem(
                "sliding cache",
                int(per_slot * slots) // n,
                _how(per_slot, "slot", slots, "slots") + share,
            ),
        ]
        work, how = (
            self._work() if own else (fixed_cost(self.facts, "fixed-llamacpp-compute"), FITTED)
        )
        if self.draft is not None:
            size = self.draft_bytes(engine)
            if not own:
                chain = self.draft.kind == "mtp"
                work += fixed_cost(self.facts, f"fixed-llamacpp-{'mtp' if chain else 'dflash'}")
            items.append(
                MemoryItem(
                    "draft",
                    size,
                    "Q8_0 file"
                    if self.draft.gguf_bytes
                    else "Q8_0, estimated from its 16-bit size"
                    if size
                    else UNKNOWN_SIZE,
                )
            )
            cached = self.draft.own_cache(context)
            items.append(
                MemoryItem(
                    "draft cache",
                    cached,
                    "reads the target's"
                    if not cached
                    else _how(self.draft.kv_token, "token", context, "tokens")
                    + (f" + {self.draft.kv_fixed / 2**20:.0f} MiB" if self.draft.kv_fixed else ""),
                )
            )
        items.append(MemoryItem("working buffers", work, how))
        if self.machine.gpus:
            items.append(
                MemoryItem(
                    "CUDA context", fixed_cost(self.facts, "fixed-cuda-context"), "on every card"
                )
            )
        return tuple(items)

    def _vllm(self, option: WeightFormat, kv: str, context: int) -> tuple[MemoryItem, ...]:
        """vLLM (and, as an estimate, SGLang): tensor parallel, cache for one full sequence."""
        tp, caches = self.gpus, self.target.caches
        share = f" / {tp} cards" if tp > 1 else ""
        slots = vllm_slots(window_of(caches), self.batched, context)
        mine = shapes_per_card(caches, tp)
        whole, sliding = vllm_cache(caches, context, kv, tp, self.batched)
        overhead = fixed_cost(self.facts, "fixed-vllm-overhead") + int(self.util * 1e9)
        overhead += fixed_cost(self.facts, "fixed-vllm-tp") * (tp - 1)
        items = [
            MemoryItem(
                "weights",
                option.nbytes // tp,
                f"{option.format}, {option.nbytes / 1e9:.2f} GB{share}",
            ),
            MemoryItem(
                "global cache", whole, _how(token_bytes(mine, kv), "token", context, "tokens")
            ),
            MemoryItem(
                "sliding cache",
                sliding,
                _how(slot_bytes(mine, kv), "slot", slots, "slots")
                + f" (max_num_batched_tokens {self.batched})",
            ),
        ]
        if self.draft is not None:
            size = self.draft_bytes("vllm") // tp
            items.append(
                MemoryItem(
                    "draft",
                    size,
                    f"{self.draft.nbytes / 1e9:.2f} GB{share}"
                    if self.draft.nbytes
                    else UNKNOWN_SIZE,
                )
            )
            own = self.draft.own_cache(context) // tp
            items.append(
                MemoryItem(
                    "draft cache",
                    own,
                    "reads the target's"
                    if self.draft.kind == "mtp"
                    else _how(self.draft.kv_token / tp, "token", context, "tokens"),
                )
            )
        items.append(
            MemoryItem(
                "overhead",
                overhead,
                "0.5 GB + utilization" + (f" + 0.3 GB x {tp - 1}" if tp > 1 else ""),
            )
        )
        items.append(
            MemoryItem(
                "activations",
                fixed_cost(self.facts, "fixed-vllm-activation"),
                "peak while vLLM measures itself",
            )
        )
        return tuple(items)
