"""Activations, per-layer inputs and the softcap, compared with the reference."""

from __future__ import annotations

import math

import pytest
import torch

from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.step import elementwise, packed_layout
from tests.gpu.device import DEVICE
from tests.gpu.test_rows import check_rows, close

pytestmark = pytest.mark.gpu

REF = Ops("cpu")


@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize("count", [1, 8, 9, 16])
@pytest.mark.parametrize("width", [64, 704, 21504])
def test_gated(activation: elementwise.Activation, count: int, width: int) -> None:
    torch.manual_seed(width + count)
    both = torch.randn(count, 2 * width, device=DEVICE) * 8.0
    gate, up = both[:, :width], both[:, width:]
    act = REF.gelu_tanh if activation == "gelu_tanh" else REF.silu
    want = act(gate.double().cpu()) * up.double().cpu()
    close(elementwise.gated(gate, up, activation), want, 1e-6)
    packed = elementwise.gated_rows(gate, up, activation)
    assert packed.scale is not None and bool((packed.scale == 64.0).all())
    check_rows(packed, want)
    alone = packed_layout.unpack(elementwise.gated_rows(gate[:1], up[:1], activation))[0][0]
    assert torch.equal(packed_layout.unpack(packed)[0][0], alone)


@pytest.mark.parametrize("size", [16, 256])
def test_per_layer_inputs(size: int) -> None:
    torch.manual_seed(size)
    y, tokens, weight = torch.randn(5, 7 * size), torch.randn(5, 7 * size), torch.randn(size)
    context = REF.rms_norm((y / math.sqrt(1536)).view(5, 7, size), weight, 1e-6)
    want = (context + tokens.view(5, 7, size)) * math.sqrt(0.5)
    got = elementwise.per_layer_inputs(
        y.to(DEVICE), tokens.to(DEVICE), weight.to(DEVICE), 1536, 1e-6
    )
    close(got, want, 1e-6)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_softcap(cap: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 1003) * 50.0
    want = 0.7 * x.double()
    want = cap * torch.tanh(want / cap) if cap else want
    close(elementwise.softcap(x.to(DEVICE), cap, 0.7), want, 1e-6)
