"""The device of the tests in this folder: the GPU, or the emulator if there is none."""

import os

import pytest
import torch

EMULATED = not torch.cuda.is_available()
GPU = os.environ.get("G4SPEC_TEST_GPU", "cuda")
EMULATE = os.environ.get("G4SPEC_EMULATE", "").split(",")
"""Modes of the emulator, which otherwise runs the last case of each test: `all`, `checked`."""
DEVICE = "cpu" if EMULATED else GPU

needs_gpu = pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
