"""Error texts in logs: every text of the collection, and logs that contain anything else."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from g4spec.advisor import logs
from g4spec.advisor.facts import facts
from g4spec.cli import run
from tests.support.processor_time import processor_time_below

FACTS = facts()

LINES = [
    (
        "err-head-size",
        "ValueError: Selected backend AttentionBackendEnum.FLASH_ATTN is not valid "
        "for this configuration. Reason: ['head_size not supported']",
    ),
    (
        "err-non-causal",
        "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid "
        "for this configuration. Reason: ['non-causal attention not supported']",
    ),
    (
        "err-num-speculative",
        "  Value error, num_speculative_tokens must be provided with "
        "speculative model unless the draft model config contains an n_predict parameter. "
        "[type=value_error]",
    ),
    (
        "err-fp8e4nv",
        'ValueError("type fp8e4nv not supported in this architecture. The supported '
        "fp8 dtypes are ('fp8e4b15', 'fp8e5')\")",
    ),
    (
        "err-fp8-kv-sm89",
        "FP8 KV cache is not supported by the Triton attention backend on sm_86: "
        "native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype auto",
    ),
    (
        "err-smem-114944",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, "
        "Required: 114944, Hardware limit: 101376. Reducing block sizes may help.",
    ),
    (
        "err-smem-turing",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, "
        "Required: 98304, Hardware limit: 65536. Reducing block sizes may help.",
    ),
    ("err-head-dim", "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute"),
    (
        "err-draft-multimodal",
        "NotImplementedError: Speculative Decoding with draft models does not "
        "support multimodal models yet",
    ),
    (
        "err-reduction-dim",
        "RuntimeError: a and b must have same reduction dim, but got [2048, 3840] X [5632, 1024].",
    ),
    ("err-dtype-auto", "ValueError: Unrecognized dtype: auto"),
    (
        "err-illegal-access",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    (
        "err-page-size",
        "NotImplementedError: The page size of the layer is not divisible by the "
        "maximum page size.",
    ),
    (
        "err-v2-runner",
        "DFlash drafters with mixed sliding/full attention require the V2 model "
        "runner; relaunch with VLLM_USE_V2_MODEL_RUNNER=1",
    ),
    ("err-layer-types", 'qwen3_dflash.py", line 88, in _resolve_layer_attention'),
    ("err-aux-features", "ValueError: DFlash drafter expects 6 concatenated aux hidden features"),
    (
        "err-no-cache-blocks",
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization`",
    ),
    (
        "err-free-memory",
        "ValueError: Free memory on device (77.1/119.7 GiB) on startup is less "
        "than desired GPU memory utilization (0.9, 107.7 GiB).",
    ),
    ("err-only-sm120", "This kernel only supports sm120"),
    ("err-ptxas-121a", "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
    ("err-ray-timeout", "ray.exceptions.RayChannelTimeoutError: System error: Timed out"),
    ("err-sample-tokens", "TimeoutError: RPC call to sample_tokens timed out."),
    ("err-engine-dead", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered"),
    ("err-arch-underscore", "unknown model architecture: 'gemma4_assistant'"),
    ("err-ctx-other", "llama_init_from_model: Gemma4Assistant requires ctx_other"),
    ("err-fattn-abort", "/app/ggml/src/ggml-cuda/fattn.cu:110: fatal error"),
    ("err-fattn-abort", "/app/ggml/src/ggml-cuda/fattn.cu:730: fatal error"),
    (
        "err-pre-allocated",
        "pre-allocated tensor (blk.0.attn) in a buffer (CUDA1) that cannot run "
        "the operation (NONE)",
    ),
    ("err-mtp-kv-segfault", "Segmentation fault (core dumped)"),
    ("err-garbage", '{"choices":[{"text":"!!!!!!!!!!!!!!"}]}'),
    ("err-nccl-init", "NCCL INFO ncclCommInitRank comm 0x7f rank 1 nranks 2 - Init START"),
    ("err-uuid", "ValueError: invalid literal for int() with base 10: 'GPU-7e1f3a'"),
    ("err-marlin-k", "ValueError: Marlin: size K = 704 is not divisible by 128"),
]


@pytest.mark.parametrize(("id", "text"), LINES, ids=[f"{i}-{n}" for n, (i, _) in enumerate(LINES)])
def test_each_collected_text(id: str, text: str, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"INFO 08-10 12:00:01 starting\n(EngineCore pid=7) ERROR {text}\nINFO done\n")
    hits = logs.scan(FACTS, log)
    assert [h.error.id for h in hits] == [id]
    assert hits[0].line == 2 and hits[0].error.cause and hits[0].error.fix


def test_causes_before_harmless_lines_and_counts(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("Gemma4Assistant requires ctx_other\n" + "CUDA out of memory.\n" * 3)
    hits = logs.scan(FACTS, log)
    assert [h.error.id for h in hits] == ["err-cuda-oom", "err-ctx-other"]
    assert hits[0].count == 3 and hits[0].line == 2


def test_nothing_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_text("all is well\n")
    assert run(["doctor", "--log", str(log)]) == 0
    assert "no error message that g4spec knows" in capsys.readouterr().out


def test_ordinary_lines_are_not_errors(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(
        "llama_model_loader: - kv 3: gemma4.block_count u32 = 60\n"
        "INFO loading gemma4_assistant head of the draft\n"
        "Avg generation throughput: 61.0 tokens/s, GPU KV cache usage: 3.1%\n"
        "WARNING tensor_parallel_size=2, head_size=256, method mtp\n"
        "wow!! great!!\n"
    )
    assert logs.scan(FACTS, log) == []


HOSTILE = {
    "empty": b"",
    "newlines": b"\n" * 1000,
    "bytes": bytes(range(256)) * 4096,
    "random": os.urandom(1 << 20),
    "zeros": b"\x00" * (1 << 20),
    "one line": b"A" * (5 << 20),
    "unicode": ("\ud7ff" * 1000).encode(),
    "near misses": b"out of resource: shared memory, " * 100_000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_logs(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(content)
    with processor_time_below(5):
        logs.scan(FACTS, log)


def test_an_error_is_found_between_garbage(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff" * 3_000_000 + b"\nThis kernel only supports sm120\r\n" + b"\x00" * 999)
    (hit,) = logs.scan(FACTS, log)
    assert hit.error.id == "err-only-sm120" and hit.line == 2


def test_a_binary_file_is_not_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"GGUF\x03\0\0\0")
    assert run(["doctor", "--log", str(log)]) == 3
    assert "x.log: not a log: expected text in UTF-8" in capsys.readouterr().err
    log.write_bytes(b"\0\0\nThis kernel only supports sm120\n")
    assert run(["doctor", "--log", str(log)]) == 0


def test_shown_text_is_short_and_printable(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\x1b[31m" + b"x" * 9000 + b" CUDA out of memory \x07" + b"y" * 9000)
    (hit,) = logs.scan(FACTS, log)
    assert len(hit.text) <= 170 and hit.text.isprintable() and "out of memory" in hit.text


@pytest.mark.parametrize("key", [e.key for e in FACTS.all(logs.ErrorFact)])
def test_patterns_are_quick_on_long_lines(key: str) -> None:
    """No pattern may backtrack: all are tried on a long line that repeats one's own keyword."""
    line = (key + " ") * (logs.MAX_LINE // (len(key) + 1))
    with processor_time_below(2):
        logs.match(FACTS.all(logs.ErrorFact), line)


def test_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stdin:
        buffer = io.BytesIO(b"RuntimeError: RPC call to sample_tokens timed out.\n")

    monkeypatch.setattr("sys.stdin", Stdin())
    assert run(["doctor", "--log", "-", "--json"]) == 0
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["id"] == "err-sample-tokens" and "doctor --network" in error["fix"]


def test_missing_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--log", "/no/such/file.log"]) == 3
