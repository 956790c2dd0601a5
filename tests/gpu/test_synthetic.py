"""`bench --synthetic`: models of random weights, in shapes small enough to be fast."""

from __future__ import annotations

from typing import Any

import pytest

from g4spec.measure import synthetic
from g4spec.measure import synthetic_bench as steps
from g4spec.runtime.cuda.backend import CudaBackend
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu

SMALL: dict[str, dict[str, Any]] = {
    "31b": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "intermediate_size": 512,
    },
    "26b-a4b": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "intermediate_size": 128,
        "num_experts": 16,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "e2b": {
        "hidden_size": 256,
        "num_hidden_layers": 10,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": 1,
        "intermediate_size": 256,
        "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 5,
    },
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        layers = synthetic.TARGETS[name]["layer_types"][: size["num_hidden_layers"]]
        shape = synthetic.TARGETS[name] | size | {"layer_types": layers, "vocab_size": 2048}
        if "vocab_size_per_layer_input" in shape:
            shape["vocab_size_per_layer_input"] = 2048
        monkeypatch.setitem(synthetic.TARGETS, name, shape)
        if name in synthetic.DRAFTS:
            monkeypatch.setitem(synthetic.DRAFTS, name, (8, 512))
        if name in synthetic.ASSISTANTS:
            monkeypatch.setitem(synthetic.ASSISTANTS, name, (256, 4, 512))
    monkeypatch.setattr(synthetic, "VOCAB", 2048)
    monkeypatch.setattr(synthetic, "CENTROIDS", 64)


@pytest.mark.parametrize("name", SMALL)
def test_measures_steps_and_cycles(name: str) -> None:
    config = steps.SyntheticConfig(contexts=(64,), times=2, accept_length=3, streams=(1, 3))
    result = steps.measure(name, CudaBackend(DEVICE), config)
    (row,) = result["rows"]
    assert all(row[f"step_{n}_ms"] > 0 for n in steps.ROWS)
    assert row["streams_1_ms"] > 0 and row["streams_3_ms"] > 0
    assert row["sustained_ms"] > 0 and row["cycle_ms"] > row["draft_ms"] > 0
    assert result["draft"] == ("assistant" if name == "e2b" else "dflash")
    shape = SMALL[name]
    dense = 3 * shape["hidden_size"] * shape["intermediate_size"] * shape["num_hidden_layers"] / 2
    head = 2048 * shape["hidden_size"] * 6.5625 / 8
    assert result["weight_bytes"] > dense + head
    assert (result["step_bytes"] < result["weight_bytes"]) == ("num_experts" in shape)
    # The projection of the per-layer inputs stays float32.
    assert ("linear (float32)" in result["ops_without_kernel"]) == (name == "e2b")


def test_an_assistant_drafts_as_many_tokens_as_a_cycle_commits() -> None:
    backend = CudaBackend(DEVICE)
    config = steps.SyntheticConfig(draft="assistant", contexts=(64, 200), times=2, accept_length=3)
    result = steps.measure("31b", backend, config)
    assert result["draft"] == "assistant" and not result["ops_without_kernel"]
    for row in result["rows"]:
        assert 0 < row["draft_ms"] < row["cycle_ms"]
