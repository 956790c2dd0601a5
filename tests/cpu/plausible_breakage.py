"""For each rule about plausible values: a file that makes the rule fail."""

from __future__ import annotations

import numpy as np

from g4spec.convert import provenance
from g4spec.convert.tokenizer import STOP_IDS
from g4spec.gguf import ValueType
from tests.cpu.gguf_breakage import MERGES, Break, both, copy_tensor, drop, number, put, table
from tests.cpu.gguf_fixtures import File, string

PATTERN = "gemma4.attention.sliding_window_pattern"


def times(name: str, factor: float) -> Break:
    """Multiply a vector or a BF16 matrix."""

    def change(f: File, t: File) -> None:
        entry = f.tensors[name]
        if len(entry.shape) == 1:
            entry.set(entry.numbers("<f4") * np.float32(factor))
        else:
            x = (entry.numbers("<u2").astype("<u4") << 16).view("<f4") * np.float32(factor)
            entry.set((x.view("<u4") >> 16).astype("<u2"))

    return change


def pattern(*full: int) -> Break:
    """Make these layers of twelve full ones."""
    return put(PATTERN, ValueType.ARRAY, [i not in full for i in range(12)], ValueType.BOOL)


def first_type(f: File, t: File) -> None:
    f.kv["tokenizer.ggml.token_type"].data[2] = 1


PLAUSIBLE: dict[str, tuple[str, Break]] = {
    "G4-KEY-013": ("target", pattern(4, 11)),
    "G4-KEY-014": ("zlab", put("dflash.rope.freq_base", ValueType.F32, 2e6)),
    "G4-KEY-015": ("target", number("gemma4.attention.sliding_window", 9)),
    "G4-KEY-016": ("zlab", put("general.type", ValueType.STRING, "adapter")),
    "G4-KEY-017": ("target", put(provenance.WEIGHTS, ValueType.STRING, "rows-sha256:12")),
    "G4-KEY-018": (
        "zlab",
        both(
            put(provenance.VERSIONS, ValueType.STRING, "g4spec 1"), drop(provenance.TARGET_LAYERS)
        ),
    ),
    "G4-KEY-019": ("target", put("general.sampling.top_p", ValueType.F32, 1.9)),
    "G4-LAY-003": ("target", put("gemma4.final_logit_softcapping", ValueType.F32, 60.0)),
    "G4-BLK-016": ("zlab", number("dflash.block_size", 15)),
    "G4-PAIR-017": (
        "zlab",
        put("tokenizer.ggml.scores", ValueType.ARRAY, [-999.0] * 512, ValueType.F32),
    ),
    "G4-PAIR-018": ("zlab", number("dflash.context_length", 8192)),
    "G4-PAIR-019": ("zlab", put("dflash.final_logit_softcapping", ValueType.F32, 60.0)),
    "G4-PAIR-020": ("speculators", table(lambda x: 2 * x)),
    "G4-VAL-011": ("target", times("blk.3.attn_q.weight", 2)),
    "G4-VAL-012": ("target", copy_tensor("blk.0.attn_norm.weight", "blk.2.attn_norm.weight")),
    "G4-VAL-013": ("target", times("blk.0.attn_norm.weight", -1)),
    "G4-VOC-016": ("target", first_type),
    "G4-VOC-017": ("target", put(MERGES, ValueType.ARRAY, ["w 10", "w x"], ValueType.STRING)),
    "G4-VOC-018": ("target", number("tokenizer.ggml.unknown_token_id", 9)),
    "G4-VOC-019": ("target", put(STOP_IDS, ValueType.ARRAY, [1, 49], ValueType.I32)),
    "G4-VOC-020": (
        "target",
        lambda f, t: f.kv.update({"tokenizer.chat_template": string("{{ bos_token }}{% if %}")}),
    ),
}
