"""What torch's allocator does with free memory."""

import pytest
import torch

from g4spec.runtime import devices
from g4spec.runtime.cuda.gpu_memory import SETTINGS
from tests.gpu.device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def joined() -> bool:
    """Whether free memory around a new tensor is put together."""
    devices.select("cuda")
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    (found,) = [
        s
        for s in torch.cuda.memory_snapshot()
        if 0 <= x.data_ptr() - s["address"] < s["total_size"]
    ]
    return bool(found["is_expandable"])


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch):
    """As torch starts with it."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield
    torch.cuda.empty_cache()


def test_free_memory_is_joined(allocator: None) -> None:
    assert joined()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_what_the_user_set_is_kept(
    allocator: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "expandable_segments:False")
    assert not joined()
