"""Features of some sizes of Gemma 4: experts (26B-A4B), per-layer embeddings and shared keys and
values (E2B, E4B), suppressed tokens (12B)."""

from __future__ import annotations

import re

from g4spec.convert.tokenizer import STOP_IDS, SUPPRESS
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, NOTE, TARGETS, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

FILE = Needs.FILE
FROM_CONFIG = "take the number from the checkpoint's config.json"
CONVERT = "convert again with g4spec convert"


@rule(
    "G4-MOE-001",
    ERROR,
    "a token must visit at least one expert, and no more than exist",
    on=TARGETS,
    needs=FILE,
)
def used(s: Subject) -> Findings:
    """Gemma calls it `top_k_experts`, other models `num_experts_per_tok`: a converter that looks
    for the other name writes 0, and upstream refuses the file."""
    n, k = s.integer(".expert_count") or 0, s.integer(".expert_used_count")
    if n and (k is None or not 1 <= k <= n):
        yield Finding("gemma4.expert_used_count", f"1 to {n}", k, FROM_CONFIG)


@rule("G4-MOE-002", ERROR, "all layers must have experts, or none", on=TARGETS, needs=FILE)
def every_layer(s: Subject) -> Findings:
    """Upstream takes a layer without a router for a dense one and computes half of it."""
    n, routers = s.integer(".block_count") or 0, "ffn_gate_inp.weight"
    have = [i for i in range(min(n, 512)) if f"blk.{i}.{routers}" in s.open_file.tensors]
    if (have or s.integer(".expert_count")) and len(have) != n:
        yield Finding(routers, f"{n} layers", f"{len(have)} layers", CONVERT)


@rule("G4-MOE-003", WARNING, "routers should not be quantized", on=TARGETS, needs=FILE)
def router(s: Subject) -> Findings:
    """A rounded score sends a token to another expert; a router is 0.03 % of the weights."""
    for name in s.open_file.tensors:
        kind = s.type_name(name)
        if name.endswith("ffn_gate_inp.weight") and kind not in ("F32", "F16", "BF16"):
            yield Finding(name, "F32", kind, CONVERT)


@rule(
    "G4-PLE-001",
    ERROR,
    "per-layer embeddings must be present if the metadata says so, and only then",
    on=TARGETS,
    needs=FILE,
)
def per_layer(s: Subject) -> Findings:
    """A key lost in a rewrite turns E2B into a model that ignores a third of its weights; it
    still writes sentences."""
    width = s.integer(".embedding_length_per_layer_input") or 0
    has_table = "per_layer_token_embd.weight" in s.open_file.tensors
    if bool(width) != has_table:
        yield Finding(
            "gemma4.embedding_length_per_layer_input", "> 0" if has_table else 0, width, FROM_CONFIG
        )


@rule(
    "G4-PLE-002",
    ERROR,
    "layers that share keys and values must read them where upstream does",
    on=TARGETS,
)
def donors(s: Subject) -> Findings:
    """Sliding layers read the last layer but one that has its own, full layers the last one.
    Another pattern before them makes upstream read the other kind's keys."""
    for spec in s.config.layers:
        n_own = sum(x.kv_from is None for x in s.config.layers)
        reads = n_own - (1 if spec.window is None else 2)
        if spec.kv_from not in (None, reads):
            yield Finding(
                f"layer {spec.index}",
                f"keys and values of layer {reads}",
                f"of layer {spec.kv_from}",
                FROM_CONFIG,
            )


@rule(
    "G4-PLE-003",
    NOTE,
    "layers that share keys and values should have no projections for them",
    on=TARGETS,
)
def spare(s: Subject) -> Findings:
    """Published checkpoints contain them; nothing reads them, but they take memory."""
    shared = {spec.index for spec in s.config.layers if spec.kv_from is not None}
    found = [
        name
        for name in s.open_file.tensors
        if (m := re.fullmatch(r"blk\.(\d+)\.attn_[kv](_norm)?\.weight", name))
        and int(m[1]) in shared
    ]
    if found:
        yield Finding(
            found[0],
            "nothing",
            f"{len(found)} tensors that nothing reads",
            "leave them if upstream's file has them too",
        )


@rule(
    "G4-SUP-001",
    ERROR,
    "suppressed tokens must be tokens, and none of them may end a text",
    needs=FILE,
)
def suppressed(s: Subject) -> Findings:
    """The 12B must not choose the marks of images and sound. A list that holds a stop token makes
    it generate forever; ids of another tokenizer silence words."""
    found, n = s.numbers(SUPPRESS), s.count("tokenizer.ggml.tokens") or 0
    ends = s.numbers(STOP_IDS)
    stops = set() if ends is None else set(ends.tolist())
    for i in () if found is None else found.tolist():
        if not 0 <= i < n:
            yield Finding(SUPPRESS, f"0 to {n - 1}", i, CONVERT)
        elif i in stops:
            yield Finding(SUPPRESS, "no stop token", i, "remove it from the list")
