"""The device of the tests in this folder: the GPU, or the emulator if there is none."""

import os

import pytest
import torch

EMULATED = not torch.cuda.is_available()
GPU = os.environ.get("G4SPEC_TEST_GPU", "cuda")
DEVICE = "cpu" if EMULATED else GPU

needs_gpu = pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
