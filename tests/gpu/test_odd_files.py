"""Unusual targets and drafts without matching kernels run, and give right results."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4spec.runtime.engine import Engine
from tests.gpu import family, hostile
from tests.gpu.device import GPU
from tests.support import malformed
from tests.support.nvfp4_files import with_nvfp4
from tests.support.rewritten_files import Change, apart, fused, rewritten

pytestmark = pytest.mark.usefixtures("free_memory")


@pytest.mark.parametrize("kind", family.DRAFTS)
def test_a_draft_with_nan_blocks(tmp_path: Path, kind: str) -> None:
    """Such a draft gains nothing, and does not change the text."""
    target = hostile.write_target(tmp_path, hostile.KINDS["dense"])
    source = hostile.write_draft(tmp_path, family.DRAFTS[kind])
    name = malformed.blocks(source)[0]
    path = malformed.changed(source, tmp_path / "broken.gguf", name, malformed.bad_blocks)
    assert hostile.wrong_text(target, path) is None


@pytest.mark.parametrize("kind", hostile.ODD_TARGETS)
def test_an_unusual_target(tmp_path: Path, kind: str) -> None:
    target = hostile.write_target(tmp_path, hostile.ODD_TARGETS[kind])
    assert (
        hostile.wrong_text(
            target, None, hostile.CACHE.get(kind, "f16"), hostile.NEAR.get(kind, 0.05)
        )
        is None
    )


@pytest.mark.parametrize("shape", [{}, {"experts": 5, "top_k": 2, "expert_inter": 64}])
def test_nvfp4_weights_with_factors(tmp_path: Path, shape: dict[str, int]) -> None:
    plain = hostile.write_target(tmp_path, {"hidden": 128, "inter": 192, **shape}, "f32")
    target = with_nvfp4(plain, tmp_path / "nvfp4.gguf")
    assert hostile.wrong_text(target, None) is None
    draft = hostile.write_draft(tmp_path, family.DRAFTS["zlab"])
    assert hostile.wrong_text(target, draft) is None


@pytest.mark.parametrize("change", [fused, apart])
def test_projections_of_other_programs(tmp_path: Path, change: Change) -> None:
    """Queries, keys and values in one tensor, and gate and up projections of experts in two."""
    shape = {"hidden": 256, "inter": 256, "experts": 5, "top_k": 2, "expert_inter": 256}
    target = hostile.write_target(tmp_path, shape, "q4_k")
    other = rewritten(target, tmp_path / "other.gguf", change)
    with hostile.load_target(target) as engine, hostile.load_target(other) as again:
        assert hostile.text(engine, 0) == hostile.text(again, 0)


def test_a_confidence_head_in_16_bits(tmp_path: Path) -> None:
    target = hostile.write_target(tmp_path, {})
    source = hostile.write_draft(tmp_path, family.DRAFTS["dspark"])
    name = "conf_proj.weight"
    path = malformed.changed(source, tmp_path / "bf16.gguf", name, malformed.bfloat16)
    with Engine.load(target, path, n_ctx=hostile.CTX, device=GPU, draft_p_min=0.5) as engine:
        assert hostile.text(engine, 3) == hostile.text(engine, 0)


@pytest.mark.parametrize("kind", hostile.ODD_DRAFTS)
def test_an_unusual_draft(tmp_path: Path, kind: str) -> None:
    target = hostile.write_target(tmp_path, hostile.ON.get(kind, {}))
    draft = hostile.write_draft(tmp_path, hostile.ODD_DRAFTS[kind])
    assert hostile.wrong_text(target, draft) is None
