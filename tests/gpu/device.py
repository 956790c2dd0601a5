"""The device of the tests in this folder: the GPU, or the emulator if there is none."""

import pytest
import torch

EMULATED = not torch.cuda.is_available()
DEVICE = "cpu" if EMULATED else "cuda"

needs_gpu = pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
