"""How torch's allocator is configured to coalesce free memory."""

import pytest
import torch

from g4spec.runtime import devices
from g4spec.runtime.cuda.gpu_memory import SETTINGS
from tests.gpu.device import GPU, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def coalesced() -> bool:
    """Return True if free memory around a new tensor is coalesced."""
    devices.select(GPU)
    x = torch.empty(64 << 20, dtype=torch.uint8, device=GPU)
    (found,) = [
        s
        for s in torch.cuda.memory_snapshot()
        if 0 <= x.data_ptr() - s["address"] < s["total_size"]
    ]
    return bool(found["is_expandable"])


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch):
    """Reset the allocator to torch's defaults."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield
    torch.cuda.empty_cache()


def test_free_memory_is_coalesced(allocator: None) -> None:
    assert coalesced()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_settings_of_the_user_are_kept(
    allocator: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "expandable_segments:False")
    assert not coalesced()
