"""How kernels are launched, without a GPU: what would be handed to the driver."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec.runtime.cuda.build import launch, nvrtc


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configuration of each launch."""
    found: list[dict[str, Any]] = []
    core = SimpleNamespace(
        LaunchConfig=lambda **config: config,
        launch=lambda stream, config, handle, *values: found.append(config),
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
    )
    monkeypatch.setattr(launch, "_core", lambda: core)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda i: SimpleNamespace(cuda_stream=7))
    return found


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
def test_kernels_overlap_in_graphs_alone(
    capability: tuple[int, int],
    captured: bool,
    pdl: bool,
    given: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    resources = nvrtc.Resources(registers=32, spill=0, stack=0, shared=0)
    kernel = launch.Kernel("a.cu: b", 0, SimpleNamespace(arguments_info=[]), resources)
    for capturing in (not captured, captured, captured):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        kernel(1, 32, pdl=pdl)
    overlaps = [config["programmatic_stream_serialization"] for config in given]
    may = pdl and capability >= (9, 0)
    assert overlaps == [may and not captured, may and captured, may and captured]
