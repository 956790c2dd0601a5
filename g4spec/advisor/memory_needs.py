"""Memory arithmetic for vLLM, SGLang, llama.cpp and g4spec, item by item.

need = weights + draft + cache of global layers + cache of sliding layers + the draft's cache +
working buffers + CUDA context. The facts hold the constants and published measurements; tests
compare the arithmetic with them. Sources: llama.cpp `llama-kv-cache-iswa.cpp` and
`tools/fit-params`, vLLM `SlidingWindowSpec` and `max_in_flight_tokens`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from g4spec.advisor.cache_sizes import (
    g4spec_slots,
    g4spec_token_bytes,
    llamacpp_slots,
    shapes_per_card,
    slot_bytes,
    token_bytes,
    vllm_cache,
    vllm_slots,
    window_of,
)
from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import FixedCostFact
from g4spec.advisor.layer_split import NO_SPLIT, LayerSplit, layer_sizes
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.ops.kv_size import pool_positions

NGRAM = "ngram"
"""Kind of draft that needs no memory."""
GGUF = ("llama.cpp", "g4spec")
"""Engines that load GGUF files."""
UNKNOWN_SIZE = "its size is not known"
"""`how` of an item that counts 0 bytes because the size is unknown."""
FITTED = "fitted to published readings"
OWN_SIZES = ("26b", "31b", "12b", "e4b", "e2b")  # the first takes most
LARGE = 36 << 30
"""Card memory in bytes from which g4spec prefills in chunks of more than 1,024 rows."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One item of the arithmetic: bytes per card, and how they are computed."""

    name: str
    nbytes: int
    how: str


@dataclass(frozen=True)
class CardMemoryPlan:
    """The memory that a run needs on one card.

    Attributes:
        context: tokens that the items are computed for.
        available: bytes that the engine may use on the card.
        ram: bytes of weights and cache that llama.cpp keeps in RAM instead.
        bytes_at: bytes on the card for a number of tokens, up to `most`, the model's context.
    """

    engine: str
    format: str
    kv: str
    context: int
    items: tuple[MemoryItem, ...]
    available: int
    ram: int
    bytes_at: Callable[[int], int] = field(repr=False, compare=False)
    most: int

    @functools.cached_property
    def largest(self) -> int:
        """Largest context in tokens that fits, up to the model's; 0 if 256 do not fit. Found by
        bisection over multiples of 256 tokens."""
        low, high = 0, self.most // 256
        if self.bytes_at(high * 256) <= self.available:
            return high * 256
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.bytes_at(middle * 256) <= self.available
            low, high = (middle, high) if fits else (low, middle)
        return low * 256

    @property
    def total(self) -> int:
        return sum(s.nbytes for s in self.items)

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def fixed_cost(facts: Facts, id: str, context: int = 0) -> int:
    """Return a cost in bytes; `context`: see `FixedCostFact.token`."""
    row = facts.get(FixedCostFact, id)
    return int(row.gib * GIB) + row.token * max(context - 8192, 0)


def _how(n: float, unit: str, count: int, what: str) -> str:
    return f"{n:,.0f} bytes per {unit} x {count:,} {what}"


class Calculator:
    """Computes memory plans for one machine and pair.

    Args:
        gpus: number of cards that share the model. `batched`: vLLM's max_num_batched_tokens.
        split: layers that llama.cpp keeps in RAM; no effect on other engines.
    """

    def __init__(
        self,
        facts: Facts,
        machine: Machine,
        target: TargetModel,
        draft: DraftModel | None,
        gpus: int,
        batched: int = 2048,
        split: LayerSplit = NO_SPLIT,
    ) -> None:
        self.facts, self.machine, self.target, self.draft = facts, machine, target, draft
        self.gpus, self.batched, self.split = max(gpus, 1), batched, split

    @property
    def util(self) -> float:
        return 0.80 if self.machine.unified else 0.92

    def available(self, engine: str) -> int:
        """Return the bytes of a card that an engine may use."""
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
        """Return the bytes of the draft's weights as the engine loads them."""
        if self.draft is None:
            return 0
        if engine in GGUF:
            return self.draft.gguf_bytes or (self.draft.nbytes * 17 // 32)
        return self.draft.nbytes

    def plan(self, engine: str, option: WeightFormat, kv: str, context: int) -> CardMemoryPlan:
        """Return the plan for one context."""

        def bytes_at(n: int) -> int:
            return sum(s.nbytes for s in self._items(engine, option, kv, n))

        return CardMemoryPlan(
            engine,
            option.format,
            kv,
            context,
            self._items(engine, option, kv, context),
            self.available(engine),
            self._ram(engine, option, kv, context),
            bytes_at,
            self.target.context,
        )

    def fits(self, engine: str, option: WeightFormat, kv: str, context: int) -> bool:
        """Return True if a context fits on the card."""
        items = self._items(engine, option, kv, context)
        return sum(s.nbytes for s in items) <= self.available(engine)

    def _items(
        self, engine: str, option: WeightFormat, kv: str, context: int
    ) -> tuple[MemoryItem, ...]:
        if engine in GGUF:
            return self._gguf(engine, option, kv, context)
        return self._vllm(option, kv, context)

    def _work(self, context: int) -> tuple[int, str]:
        """Return the bytes of g4spec's working buffers, and a note on the prefill chunk size."""
        large = (self.machine.memory or 0) >= LARGE
        size = self.target.size if self.target.size in OWN_SIZES else OWN_SIZES[0]
        how = f"prompts in chunks of up to {4096 if large else 1024}"
        return fixed_cost(self.facts, f"fixed-g4spec-{size}{'-large' * large}", context), how

    def _in_ram(self, engine: str, option: WeightFormat) -> tuple[int, int, int]:
        """Return the bytes of weights that llama.cpp keeps in RAM, the number of layers whose cache
        it keeps there, and the number of layers (1 if there is no split)."""
        sizes = layer_sizes(self.facts, self.target, option) if self.split else None
        if sizes is None or engine != "llama.cpp" or not self.machine.gpus:
            return 0, 0, 1
        return (
            self.split.weights_in_ram(sizes),
            self.split.layers_in_ram(sizes.layers),
            sizes.layers,
        )

    def _ram(self, engine: str, option: WeightFormat, kv: str, context: int) -> int:
        """Return the bytes of weights and cache that llama.cpp keeps in RAM."""
        weights, out, layers = self._in_ram(engine, option)
        caches, slots = self.target.caches, llamacpp_slots(self.target.caches, context)
        cache = token_bytes(caches, kv) * context + slot_bytes(caches, kv) * slots
        return int(weights + cache * out / layers)

    def _weights(self, engine: str, option: WeightFormat, n: int, share: str) -> MemoryItem:
        """Return one card's share of the weights; g4spec repacks some types on a GPU."""
        own = engine == "g4spec"
        held = option.own or option.nbytes if own and self.machine.gpus else option.nbytes
        how = " as the GPU holds them" if held != option.nbytes else ""
        moved, _, _ = self._in_ram(engine, option)
        how += f", {moved / 1e9:.2f} GB of them in RAM" if moved else ""
        text = f"{option.format}, {held / 1e9:.2f} GB{how}{share}"
        return MemoryItem("weights", (held - moved) // n, text)

    def _gguf(
        self, engine: str, option: WeightFormat, kv: str, context: int
    ) -> tuple[MemoryItem, ...]:
        """Return the items of llama.cpp or g4spec. llama.cpp splits by layer: weights and cache are
        divided by the number of cards, buffers are on every card."""
        n, caches = self.gpus, self.target.caches
        own = engine == "g4spec"
        slots = g4spec_slots(caches, context) if own else llamacpp_slots(caches, context)
        tokens = pool_positions(context) if own else context
        share = f" / {n} GPUs" if n > 1 else ""
        _, out, layers = self._in_ram(engine, option)
        cards = n * layers / (layers - out) if out < layers else math.inf
        part = f" x {layers - out} of {layers} layers" if out else ""
        per_token = (g4spec_token_bytes if own else token_bytes)(caches, kv)
        per_slot = slot_bytes(caches, kv)
        items = [
            self._weights(engine, option, n, share),
            MemoryItem(
                "global cache",
                int(per_token * tokens / cards),
                _how(per_token, "token", tokens, f"tokens{', one page spare' * own}")
                + part
                + share,
            ),
            MemoryItem(
                "sliding cache",
                int(per_slot * slots / cards),
                _how(per_slot, "slot", slots, "slots") + part + share,
            ),
        ]
        work, how = (
            self._work(context)
            if own
            else (fixed_cost(self.facts, "fixed-llamacpp-compute"), FITTED)
        )
        if self.draft is not None and self.draft.kind != NGRAM and not own:
            kind = "mtp" if self.draft.kind == "mtp" else "dflash"
            work += fixed_cost(self.facts, f"fixed-llamacpp-{kind}")
        items += self._gguf_draft(engine, context)
        items.append(MemoryItem("working buffers", work, how))
        if self.machine.gpus:
            items.append(
                MemoryItem(
                    "CUDA context", fixed_cost(self.facts, "fixed-cuda-context"), "on every GPU"
                )
            )
        return tuple(items)

    def _gguf_draft(self, engine: str, context: int) -> list[MemoryItem]:
        """Return the items of a draft in llama.cpp or g4spec; none without a draft."""
        draft = self.draft
        if draft is None or draft.kind == NGRAM:
            return []
        size, cached = self.draft_bytes(engine), draft.own_cache(context)
        how = "Q8_0, estimated from its 16-bit size" if size else UNKNOWN_SIZE
        cache_how = "reads the target's"
        if cached:
            cache_how = _how(draft.kv_token, "token", context, "tokens")
            cache_how += f" + {draft.kv_fixed / 2**20:.0f} MiB" if draft.kv_fixed else ""
        return [
            MemoryItem("draft", size, "Q8_0 file" if draft.gguf_bytes else how),
            MemoryItem("draft cache", cached, cache_how),
        ]

    def _vllm(self, option: WeightFormat, kv: str, context: int) -> tuple[MemoryItem, ...]:
        """Return the items of vLLM (an estimate for SGLang): tensor parallel, one full sequence."""
        tp, caches = self.gpus, self.target.caches
        share = f" / {tp} GPUs" if tp > 1 else ""
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
        if self.draft is not None and self.draft.kind != NGRAM:
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
