"""How llama.cpp splits a model between GPU and RAM: its options -ngl and -ncmoe."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.facts import Facts
from g4spec.advisor.named_models import TargetModel, WeightFormat
from g4spec.advisor.runtime_support import VOCABULARY
from g4spec.advisor.schema import SizeFact

EXPERTS_USED = 8 / 128
"""Fraction of the experts of the 26B-A4B that one token reads."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a model's layers, which are assumed to be equally large.

    Attributes:
        layers: number of layers.
        layer: bytes of the weights of one layer.
        experts: bytes of the experts of one layer; 0 without experts.
    """

    layers: int
    layer: int
    experts: int


def layer_sizes(facts: Facts, target: TargetModel, option: WeightFormat) -> LayerSizes | None:
    """Return the sizes of a target's layers in a weight format; None if its size is not known.
    Embedding tables are not part of a layer."""
    size = facts.find(SizeFact, target.size)
    if size is None:
        return None
    layers = size.sliding + size.full
    idle = option.nbytes * (1 - target.active)
    experts = idle / (1 - EXPERTS_USED) if target.moe else 0.0
    tables = option.nbytes * VOCABULARY * size.hidden / (size.params * 1e9)
    tables += 0 if target.moe else idle  # tables of per-layer embeddings
    return LayerSizes(layers, int((option.nbytes - tables) / layers), int(experts / layers))


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Options of llama.cpp that put a part of the model in RAM.

    Attributes:
        n_gpu_layers: `-ngl`: number of layers on the GPU, the last ones; the output layer counts as
            one. None for all.
        n_cpu_moe: `-ncmoe`: number of layers whose experts are in RAM, the first ones.
    """

    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None

    def __bool__(self) -> bool:
        return self.n_gpu_layers is not None or self.n_cpu_moe is not None

    @property
    def flags(self) -> str:
        """Command-line options, each preceded by a space."""
        flags = (("-ngl", self.n_gpu_layers), ("-ncmoe", self.n_cpu_moe))
        return "".join(f" {flag} {n}" for flag, n in flags if n is not None)

    def layers_in_ram(self, layers: int) -> int:
        """Return how many of `layers` layers, the first ones, are in RAM with their KV cache."""
        if self.n_gpu_layers is None:
            return 0
        return min(max(layers + 1 - self.n_gpu_layers, 0), layers)

    def weights_in_ram(self, sizes: LayerSizes) -> int:
        """Return the bytes of the weights in RAM."""
        whole = self.layers_in_ram(sizes.layers)
        only_experts = max(min(self.n_cpu_moe or 0, sizes.layers) - whole, 0)
        return whole * sizes.layer + only_experts * sizes.experts


def split_of(
    facts: Facts, target: TargetModel, n_gpu_layers: int | None, n_cpu_moe: int | None
) -> LayerSplit:
    """Build a split of a target. As in llama.cpp, `n_cpu_moe` may exceed the number of layers to
    mean all of them; the split then has their number."""
    size = facts.find(SizeFact, target.size)
    if n_cpu_moe is not None and size is not None:
        n_cpu_moe = min(n_cpu_moe, size.sliding + size.full)
    return LayerSplit(n_gpu_layers, n_cpu_moe)


NO_SPLIT = LayerSplit()
"""The whole model on the GPU."""
