"""Values of Q6_K from the upper bits only (`g4spec.runtime.cuda.step.screen`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from g4spec import quant
from g4spec.quant.formats import q6_k


def tables(raw: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of Q6_K rows, and the values by the upper bits of codes and scales."""
    exact = quant.get("q6_k").dequantize(raw).reshape(len(raw), -1)
    blocks = raw.view(q6_k.DTYPE).reshape(len(raw), -1)
    d, scale = blocks["d"].astype(np.float32)[..., None], blocks["scale"].astype(np.float32)
    both = d * scale, d * (scale // 4) * 4
    step, upper = (np.repeat(x, 16, axis=2).reshape(exact.shape) for x in both)
    code = np.rint(exact / np.where(step == 0, 1, step)) + 32
    coarse = (upper * (code // 16 * 16 - 24)).astype(np.float32)
    return torch.from_numpy(exact), torch.from_numpy(coarse)
