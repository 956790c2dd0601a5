"""For each rule of `validate`: a healthy file, and a single change that makes the rule fail.

Rules about plausible values (`rules/plausible.py`, `outliers.py`, `prompts.py`) are in
`plausible_breakage.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from g4spec.convert import provenance
from g4spec.convert.tokenizer import STOP_IDS
from g4spec.gguf import ValueType
from g4spec.models.assistant import CENTROIDS, ORDERING, TOP_K
from tests.cpu.gguf_fixtures import N_DRAFT, Entry, File, H, V, array, d2t_ids, string, target

Break = Callable[[File, File], Any]
"""Changes the examined file and its target in place."""

TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
CAUSAL = "g4spec.dflash.layer_causal"


def put(key: str, type: ValueType, data: Any, item: ValueType | None = None) -> Break:
    return lambda f, t: f.set(key, type, data, item)


def number(key: str, value: int) -> Break:
    return put(key, ValueType.U32, value)


def drop(key: str) -> Break:
    return lambda f, t: f.kv.pop(key)


def attr(name: str, value: Any) -> Break:
    return lambda f, t: setattr(f, name, value)


def no_tensor(name: str) -> Break:
    return lambda f, t: f.tensors.pop(name)


def entry(name: str, attribute: str, value: Any) -> Break:
    return lambda f, t: setattr(f.tensors[name], attribute, value)


def taps(*ids: int) -> Break:
    """Set the layer ids, and an fc of the matching width."""

    def change(f: File, t: File) -> None:
        f.set("dflash.target_layers", ValueType.ARRAY, list(ids), ValueType.I32)
        shape = (H, len(ids) * H)
        f.tensors["fc.weight"] = Entry(shape, 0, np.arange(H * shape[1], dtype="<f4").tobytes())

    return change


def map_(change: Callable[[np.ndarray], np.ndarray]) -> Break:
    """Change d2t."""

    def apply(f: File, t: File) -> None:
        values = change(f.tensors["d2t"].numbers("<i8"))
        f.tensors["d2t"] = Entry(values.shape, 27, values.astype("<i8").tobytes())

    return apply


def cell(name: str, dtype: str, index: int, value: Any) -> Break:
    """Set one number in a tensor's data, e.g. the scale of a Q8_0 block at an even byte."""

    def change(f: File, t: File) -> None:
        values = f.tensors[name].numbers(dtype)
        values[index] = value
        f.tensors[name].set(values)

    return change


def fill(name: str, dtype: str, value: float) -> Break:
    def change(f: File, t: File) -> None:
        values = f.tensors[name].numbers(dtype)
        f.tensors[name].set(np.full_like(values, value))

    return change


def token(key: str, index: int, text: str) -> Break:
    def change(f: File, t: File) -> None:
        f.kv[key].data[index] = text

    return change


def both(*changes: Break) -> Break:
    return lambda f, t: [change(f, t) for change in changes]


def in_target(change: Break) -> Break:
    """Apply the change to the target instead of the draft."""
    return lambda f, t: change(t, t)


def commits(mine: str, its: str) -> Break:
    """Let draft and target name the same repository, with these commits."""
    name = both(
        put(provenance.TARGET_SOURCE, ValueType.STRING, "org/model"),
        in_target(put(provenance.SOURCE, ValueType.STRING, "org/model")),
    )
    return both(
        name,
        put(provenance.TARGET_REVISION, ValueType.STRING, mine * 40),
        in_target(put(provenance.REVISION, ValueType.STRING, its * 40)),
    )


def ordering(change: Callable[[np.ndarray], np.ndarray]) -> Break:
    def apply(f: File, t: File) -> None:
        f.kv[ORDERING] = array(ValueType.I32, change(np.array(f.kv[ORDERING].data)).tolist())

    return apply


def centroids(count: int, value: float = 1.0) -> Break:
    return lambda f, t: f.set(CENTROIDS, ValueType.ARRAY, [value] * count, ValueType.F32)


def replace(values: np.ndarray, index: int, value: int) -> np.ndarray:
    values = values.copy()
    values[index] = value
    return values


def copy_tensor(a: str, b: str) -> Break:
    return lambda f, t: setattr(f.tensors[b], "data", f.tensors[a].data)


def extra(name: str) -> Break:
    return lambda f, t: f.extra_tensors.append((name, Entry((32,), 0, bytes(range(128)))))


def rename(old: str, new: str) -> Break:
    """Change the architecture name, and the keys that begin with it."""

    def change(f: File, t: File) -> None:
        f.kv = {
            k.replace(f"{old}.", f"{new}.", 1) if k.startswith(f"{old}.") else k: v
            for k, v in f.kv.items()
        }
        f.kv["general.architecture"] = string(new)

    return change


def repeated_key(f: File, t: File) -> None:
    f.extra_keys.append(("general.architecture", string("dflash")))


def repeated_tensor(f: File, t: File) -> None:
    f.extra_tensors.append(("fc.weight", f.tensors["fc.weight"]))


def no_tensors(f: File, t: File) -> None:
    f.tensors.clear()


def lost_scale(f: File, t: File) -> None:
    """Set the scales of eight Q8_0 blocks to zero and keep their codes."""
    for block in range(8):
        cell("fc.weight", "<u2", 17 * block, 0)(f, t)


def norms_plus(value: float) -> Break:
    """Add the same number to every norm."""

    def change(f: File, t: File) -> None:
        for name in f.tensors:
            if "norm" in name:
                f.tensors[name].set(f.tensors[name].numbers("<f4") + np.float32(value))

    return change


def table(change: Callable[[np.ndarray], np.ndarray]) -> Break:
    """Change a token embedding of F16 rows."""

    def apply(f: File, t: File) -> None:
        x = f.tensors["token_embd.weight"].numbers("<f2").reshape(V, -1)
        f.tensors["token_embd.weight"].set(change(x).astype("<f2"))

    return apply


def inverse_ordering(f: File, t: File) -> None:
    """Write an embedding whose clusters consist of similar rows, and the inverse ordering (token to
    slot)."""
    order = np.array(f.kv[ORDERING].data)
    rng = np.random.default_rng(5)
    x = np.repeat(rng.standard_normal((16, 32)), V // 16, 0) + rng.standard_normal((V, 32)) / 2
    rows = np.empty((V, 32), "<f4")
    rows[order] = x
    f.tensors["token_embd.weight"].set(rows)
    f.kv[ORDERING] = array(ValueType.I32, np.argsort(order).tolist())


def half_empty(f: File, t: File) -> None:
    for name in [n for n in f.tensors if n.startswith("blk.")]:
        del f.tensors[name]


def sixty_layers(f: File, t: File) -> None:
    """Give the target as many layers as the 31B has."""
    deep = target(60)
    t.kv, t.tensors = deep.kv, deep.tensors


def raw(old: bytes, new: bytes) -> Break:
    """Replace the first occurrence of `old` in the written bytes."""
    return lambda f, t: f.edits.append((old, new))


GGUF: dict[str, tuple[str, Break]] = {
    "G4-GGUF-001": ("zlab", attr("magic", b"<htm")),
    "G4-GGUF-002": ("zlab", attr("version", 1)),
    "G4-GGUF-003": ("zlab", attr("cut", 300)),
    "G4-GGUF-004": ("zlab", repeated_key),
    "G4-GGUF-005": ("zlab", repeated_tensor),
    "G4-GGUF-006": ("zlab", entry("fc.weight", "type", 44)),
    "G4-GGUF-007": ("zlab", entry("fc.weight", "shape", (64, 190))),
    "G4-GGUF-008": ("zlab", number("general.alignment", 24)),
    "G4-GGUF-009": ("zlab", entry("output_norm.weight", "offset", 0)),
    "G4-GGUF-010": ("zlab", attr("cut", -64)),
    "G4-GGUF-011": ("zlab", attr("tail", bytes(100))),
    "G4-GGUF-012": ("zlab", no_tensors),
    "G4-GGUF-013": ("zlab", put("split.count", ValueType.U16, 2)),
    "G4-GGUF-014": ("zlab", put("general.alignment", ValueType.U64, 32)),
    "G4-GGUF-015": ("zlab", put("general.architecture", ValueType.STRING, "gemma4-dflash-draft")),
}
GGUF["G4-GGUF-016"] = ("zlab", raw(b"w300", b"w\xff00"))
KEYS: dict[str, tuple[str, Break]] = {
    "G4-KEY-001": ("assistant", drop("gemma4-assistant.nextn_predict_layers")),
    "G4-KEY-002": ("zlab", put("dflash.block_size", ValueType.I32, 4)),
    "G4-KEY-003": (
        "target",
        put("gemma4.attention.head_count_kv", ValueType.ARRAY, [2, 1], ValueType.I32),
    ),
    "G4-KEY-004": ("zlab", put("dflash.rope.freq_base", ValueType.F32, 0.0)),
    "G4-KEY-005": ("zlab", number("dflash.attention.value_length", 32)),
    "G4-KEY-006": ("zlab", number("dflash.attention.head_count_kv", 3)),
    "G4-KEY-007": ("target", number("gemma4.rope.dimension_count", 8)),
    "G4-KEY-008": ("zlab", number("general.file_type", 32)),
    "G4-KEY-010": (
        "target",
        put(
            "gemma4.attention.sliding_window_pattern", ValueType.ARRAY, [True] * 12, ValueType.BOOL
        ),
    ),
    "G4-KEY-011": ("target", extra("blk.0.attn_qkv.weight")),
    "G4-KEY-012": ("zlab", number("dflash.block_count", 83886082)),
    "G4-KEY-009": ("zlab", put(CAUSAL, ValueType.STRING, "no array")),
}
TENSORS: dict[str, tuple[str, Break]] = {
    "G4-TNS-001": ("zlab", no_tensor("blk.1.attn_v.weight")),
    "G4-TNS-002": ("zlab", extra("t2d")),
    "G4-TNS-003": ("zlab", entry("blk.0.attn_q.weight", "shape", (32, 128))),
    "G4-TNS-004": (
        "zlab",
        lambda f, t: f.tensors.update(
            {"output_norm.weight": Entry((H,), 1, np.ones(H, "<f2").tobytes())}
        ),
    ),
    "G4-TNS-005": ("assistant", entry("nextn.post_projection.weight", "type", 26)),
    "G4-TNS-007": (
        "zlab",
        lambda f, t: f.tensors.update(
            {"fc.weight": Entry((64, 192), 9, bytes(64 * 192 // 32 * 36))}
        ),
    ),
    "G4-VAL-001": ("target", cell("token_embd.weight", "<u2", 70, 0x7FC0)),
    "G4-VAL-002": ("zlab", cell("fc.weight", "<u2", 17, 0x7C00)),
    "G4-VAL-003": ("target", fill("blk.3.layer_output_scale.weight", "<f4", 0)),
    "G4-VAL-004": ("assistant", fill("nextn.pre_projection.weight", "<f4", 0.5)),
    "G4-VAL-005": ("zlab", copy_tensor("blk.0.attn_q.weight", "blk.2.attn_q.weight")),
    "G4-VAL-006": ("zlab", lost_scale),
    "G4-VAL-008": ("zlab", cell("fc.weight", "<u2", 17, 0x7000)),
    "G4-VAL-009": ("target", norms_plus(-1)),
    "G4-VAL-010": ("zlab", norms_plus(1)),
    "G4-TNS-006": ("zlab", half_empty),
    "G4-VAL-007": ("target", fill("rope_freqs.weight", "<f4", 1)),
}
TAPS: dict[str, tuple[str, Break]] = {
    "G4-TAP-001": ("zlab", put("dflash.target_layers", ValueType.ARRAY, [2, 6], ValueType.I32)),
    "G4-TAP-002": ("zlab", taps(2, 6, 6)),
    "G4-TAP-003": ("zlab", taps(6, 2, 10)),
    "G4-TAP-004": ("zlab", taps(2, 6, 12)),
    "G4-TAP-005": ("zlab", taps(1, 12, 23, 35, 46, 57)),
    "G4-TAP-006": ("zlab", both(taps(3, 9, 22, 31, 50, 58), sixty_layers)),
    "G4-TAP-007": ("zlab", both(taps(2, 7, 12, 18, 23, 28), sixty_layers)),
    "G4-TAP-008": ("zlab", both(taps(8, 17, 25, 34, 42, 51), sixty_layers)),
}
D2T: dict[str, tuple[str, Break]] = {
    "G4-D2T-001": (
        "speculators",
        lambda f, t: f.tensors.update(d2t=Entry((N_DRAFT,), 26, d2t_ids().astype("<i4").tobytes())),
    ),
    "G4-D2T-002": ("speculators", map_(lambda d: d[:-1])),
    "G4-D2T-003": ("speculators", map_(lambda d: d - np.arange(len(d)))),
    "G4-D2T-004": ("speculators", map_(lambda d: replace(d, -1, V))),
    "G4-D2T-005": ("speculators", map_(lambda d: replace(d, 5, d[4]))),
    "G4-D2T-006": ("speculators", map_(lambda d: d[::-1])),
    "G4-D2T-007": ("speculators", no_tensor("output.weight")),
    "G4-D2T-008": ("speculators", no_tensor("d2t")),
    "G4-D2T-009": ("speculators", map_(lambda d: replace(d, -1, d[-1] + 1))),
    "G4-D2T-010": ("speculators", map_(lambda d: np.arange(len(d)) + 107)),
    "G4-D2T-011": ("speculators", map_(lambda d: d + np.arange(len(d)))),
}
VOCABULARY: dict[str, tuple[str, Break]] = {
    "G4-VOC-001": ("zlab", put("tokenizer.ggml.model", ValueType.STRING, "gpt2")),
    "G4-VOC-002": ("zlab", put("tokenizer.ggml.scores", ValueType.ARRAY, [0.0] * 3, ValueType.F32)),
    "G4-VOC-003": ("zlab", token(TOKENS, 300, "w301")),
    "G4-VOC-004": ("zlab", put(MERGES, ValueType.ARRAY, ["ab"], ValueType.STRING)),
    "G4-VOC-005": ("zlab", number("tokenizer.ggml.eos_token_id", V)),
    "G4-VOC-006": ("zlab", put("tokenizer.ggml.add_bos_token", ValueType.BOOL, False)),
    "G4-VOC-007": ("target", drop("tokenizer.chat_template")),
    "G4-VOC-008": ("target", entry("token_embd.weight", "shape", (V * 2, H // 2))),
    "G4-VOC-009": ("zlab", token(TOKENS, 106, "<end_of_turn>")),
    "G4-VOC-010": ("target", number("tokenizer.ggml.eot_token_id", 107)),
    "G4-VOC-011": ("zlab", put("tokenizer.ggml.add_space_prefix", ValueType.BOOL, True)),
    "G4-VOC-012": (
        "target",
        both(
            put("tokenizer.ggml.add_bos_token", ValueType.BOOL, False),
            put("tokenizer.chat_template", ValueType.STRING, "{{ messages }}"),
        ),
    ),
    "G4-VOC-013": ("zlab", number("tokenizer.ggml.bos_token_id", 1)),
    "G4-VOC-014": ("zlab", put("tokenizer.ggml.add_eos_token", ValueType.BOOL, True)),
    "G4-VOC-015": (
        "target",
        put("tokenizer.chat_template", ValueType.STRING, "{{ bos_token }}<start_of_turn>user"),
    ),
    "G4-MASK-001": ("zlab", drop("tokenizer.ggml.mask_token_id")),
    "G4-MASK-002": ("zlab", number("tokenizer.ggml.mask_token_id", 248070)),
    "G4-MASK-003": ("zlab", number("tokenizer.ggml.mask_token_id", 5)),
    "G4-MASK-004": ("zlab", number("tokenizer.ggml.mask_token_id", 106)),
}
BLOCK: dict[str, tuple[str, Break]] = {
    "G4-BLK-001": ("zlab", number("dflash.block_size", 1)),
    "G4-BLK-002": ("zlab", number("dflash.block_size", 32)),
    "G4-BLK-003": ("zlab", drop("dflash.embedding_scale")),
    "G4-BLK-004": ("zlab", put("dflash.embedding_scale", ValueType.F32, 64.0)),
    "G4-BLK-005": ("speculators", put("dflash.embedding_scale", ValueType.F32, 8.0)),
    "G4-BLK-006": ("zlab", put(CAUSAL, ValueType.ARRAY, [True], ValueType.BOOL)),
    "G4-BLK-007": ("zlab", drop(CAUSAL)),
    "G4-BLK-008": ("zlab", put(CAUSAL, ValueType.ARRAY, [False, False, True], ValueType.BOOL)),
    "G4-BLK-009": ("zlab", put(CAUSAL, ValueType.ARRAY, [True, True, False], ValueType.BOOL)),
    "G4-BLK-010": ("zlab", drop("dflash.attention.sliding_window_pattern")),
    "G4-BLK-011": ("zlab", number("dflash.attention.sliding_window", 3)),
    "G4-BLK-012": ("zlab", put("dflash.hidden_activation", ValueType.STRING, "gelu")),
    "G4-BLK-013": ("dspark", drop("dflash.attention.scale")),
    "G4-BLK-015": ("zlab", put("dflash.attention.causal", ValueType.BOOL, False)),
    "G4-BLK-014": ("speculators", table(lambda x: x * np.sqrt(H))),
    "G4-HEAD-001": ("dspark", drop("dflash.sample_from_anchor")),
    "G4-HEAD-002": ("dspark", put("dflash.has_confidence_head", ValueType.BOOL, False)),
    "G4-HEAD-003": ("eagle3", drop("eagle3.norm_before_residual")),
    "G4-HEAD-004": ("zlab", put("dflash.sample_from_anchor", ValueType.BOOL, True)),
    "G4-HEAD-005": ("zlab", rename("dflash", "dflash-g4spec")),
    "G4-HEAD-006": ("dspark", put("dflash.sample_from_anchor", ValueType.BOOL, False)),
}
A = "gemma4-assistant."
ASSISTANT: dict[str, tuple[str, Break]] = {
    "G4-DON-001": ("assistant", number(A + "embedding_length_out", 128)),
    "G4-DON-002": (
        "assistant",
        put(A + "attention.head_count_kv", ValueType.ARRAY, [1, 1, 1, 2], ValueType.I32),
    ),
    "G4-DON-003": ("assistant", number(A + "attention.sliding_window", 16)),
    "G4-DON-004": ("assistant", put(A + "rope.freq_base", ValueType.F32, 1e4)),
    "G4-DON-005": ("assistant", number(A + "nextn_predict_layers", 3)),
    "G4-DON-006": ("assistant", number(A + "embedding_length_out", 32)),
    "G4-DON-007": ("assistant", number(A + "attention.shared_kv_layers", 0)),
    "G4-CEN-001": ("assistant", drop(ORDERING)),
    "G4-CEN-002": ("assistant", centroids(15 * 32)),
    "G4-CEN-003": ("assistant", ordering(lambda o: o[:-1])),
    "G4-CEN-004": ("assistant", ordering(lambda o: o // 32)),
    "G4-CEN-005": ("assistant", ordering(lambda o: replace(o, 0, int(o[1])))),
    "G4-CEN-006": ("assistant", centroids(16 * 32, float("nan"))),
    "G4-CEN-007": ("assistant", number(TOP_K, 17)),
    "G4-CEN-008": ("assistant", inverse_ordering),
}
PAIRING: dict[str, tuple[str, Break]] = {
    "G4-PAIR-001": ("zlab", number("dflash.embedding_length", 128)),
    "G4-PAIR-002": ("zlab", both(put("dflash.vocab_size", ValueType.U32, V - 1))),
    "G4-PAIR-003": ("zlab", in_target(token(TOKENS, 400, "other"))),
    "G4-PAIR-004": ("zlab", in_target(token(MERGES, 0, "w 3"))),
    "G4-PAIR-005": ("zlab", number("tokenizer.ggml.eos_token_id", 106)),
    "G4-PAIR-006": ("zlab", number(provenance.TARGET_LAYERS, 60)),
    "G4-PAIR-007": ("zlab", put(provenance.TARGET_TOKENIZER, ValueType.STRING, "0" * 64)),
    "G4-PAIR-008": ("zlab", drop("dflash.final_logit_softcapping")),
    "G4-PAIR-009": ("zlab", number("dflash.context_length", 2048)),
    "G4-PAIR-010": (
        "zlab",
        put("tokenizer.chat_template", ValueType.STRING, "{{ bos_token }} other"),
    ),
    "G4-PAIR-011": ("zlab", in_target(put("tokenizer.ggml.add_bos_token", ValueType.BOOL, False))),
    "G4-PAIR-012": (
        "zlab",
        both(
            put(STOP_IDS, ValueType.ARRAY, [1], ValueType.I32),
            in_target(put(STOP_IDS, ValueType.ARRAY, [1, 106, 50], ValueType.I32)),
        ),
    ),
    "G4-PAIR-013": ("eagle3", number(provenance.TARGET_HIDDEN, 2816)),
    "G4-PAIR-014": ("speculators", table(lambda x: x[::-1])),
    "G4-PAIR-015": (
        "zlab",
        put(provenance.TARGET_WEIGHTS, ValueType.STRING, "rows-sha256:" + "6" * 64),
    ),
    "G4-PAIR-016": ("zlab", both(drop(provenance.TARGET_WEIGHTS), commits("a", "b"))),
    "G4-LAY-002": ("target", drop("gemma4.final_logit_softcapping")),
}
SUPPRESS = "tokenizer.ggml.suppress_tokens"


def one_layer_dense(f: File, t: File) -> None:
    """Remove the router and experts of one layer."""
    for name in [n for n in f.tensors if n.startswith("blk.3.") and ("_exps" in n or "inp" in n)]:
        del f.tensors[name]


SIZES: dict[str, tuple[str, Break]] = {
    "G4-MOE-001": ("experts", number("gemma4.expert_used_count", 0)),
    "G4-MOE-002": ("experts", one_layer_dense),
    "G4-MOE-003": (
        "experts",
        lambda f, t: f.tensors.update(
            {"blk.0.ffn_gate_inp.weight": Entry((8, H), 8, b"\1\0" * 17 * 16)}
        ),
    ),
    "G4-PLE-001": ("per-layer", number("gemma4.embedding_length_per_layer_input", 0)),
    "G4-PLE-002": ("per-layer", number("gemma4.attention.shared_kv_layers", 4)),
    "G4-PLE-003": (
        "per-layer",
        lambda f, t: f.tensors.update({"blk.8.attn_k.weight": f.tensors["blk.4.attn_k.weight"]}),
    ),
    "G4-SUP-001": ("target", put(SUPPRESS, ValueType.ARRAY, [7, V], ValueType.I32)),
}

BREAK = {
    **GGUF,
    **KEYS,
    **TENSORS,
    **TAPS,
    **D2T,
    **VOCABULARY,
    **BLOCK,
    **ASSISTANT,
    **PAIRING,
    **SIZES,
}
"""Rule id -> kind of file (see `gguf_fixtures.KINDS`) and the change that breaks it."""
