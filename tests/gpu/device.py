"""Where the tests of this folder run: on the GPU, or on a machine without one in the emulator."""

import pytest
import torch

EMULATED = not torch.cuda.is_available()
DEVICE = "cpu" if EMULATED else "cuda"

needs_gpu = pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
