"""doctor on the systems of the four reports: the verdict, the reported failure and the fix."""

from __future__ import annotations

import gc
import json
import re
import shlex
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from g4spec.advisor import alternatives, backends, engines, questions
from g4spec.advisor.cards import assume
from g4spec.advisor.diagnosis import Diagnosis
from g4spec.advisor.doctor import diagnose
from g4spec.advisor.facts import facts
from g4spec.advisor.machine import GIB, Gpu, Machine
from g4spec.advisor.schema import CardFact, SizeFact
from g4spec.advisor.selftest import CheckResult
from g4spec.advisor.summary import estimate
from g4spec.cli import run
from g4spec.errors import UsageError
from g4spec.runtime import devices, selftest
from g4spec.runtime.cuda import kernel_selftest, model_selftest
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.step import graphs
from tests.support.processor_time import processor_time_below

FACTS = facts()
ROOT = Path(__file__).resolve().parents[2]


def ask(
    machine: str,
    model: str | None = None,
    draft: str | None = None,
    *,
    c: int | None = None,
    given: tuple[str, ...] = (),
    engine: str | None = None,
    kv: str | None = None,
    backend: str | None = None,
) -> Diagnosis:
    m = questions.build_machine(FACTS, machine, given)
    q = questions.build_question(FACTS, model, draft, c, kv, backend, None)
    return diagnose(FACTS, m, q, engine)


def texts(d: Diagnosis, title: str = "") -> str:
    return "\n".join(
        f"{line.mark} {line.text} | {line.reason} | {line.fix}"
        for s in d.sections
        if title in s.title
        for line in s.lines
    )


def line(d: Diagnosis, title: str, start: str) -> Any:
    return next(
        x for s in d.sections if title in s.title for x in s.lines if x.text.startswith(start)
    )


def doctor(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = run(["doctor", *args])
    return code, capsys.readouterr().out


# ---- report 1: two RTX 3090, vLLM 0.19.2rc1, RedHat's DFlash


AMPERE = ("2x RTX 3090", "31b", "redhat-dflash")


def test_ampere_report() -> None:
    d = ask(*AMPERE, given=("vllm=0.19.2rc1.dev21+g893611813",))
    assert not d.works
    engines = texts(d, "Engines")
    assert "bad vLLM 0.19.2rc1.dev21+g893611813: vLLM 0.19 cannot run a DFlash draft" in engines
    assert "inherits the target's backend" in engines
    assert "not about head size 256" in engines
    assert "vllm>=0.28" in d.steps[0]
    assert "after an upgrade, vLLM 0.33.0" in engines


def test_ampere_table_is_reproduced_with_its_true_cause() -> None:
    """Columns of the report's table: backend, non-causal, head size."""
    rows = {r.name: r for r in backends.judge_backends(FACTS, "vllm", "0.19.2", (8, 6))}
    table = {name: (r.draft, 512 in r.heads) for name, r in rows.items()}
    assert table == {
        "FLASH_ATTN": (True, False),
        "FLASH_ATTN_DIFFKV": (None, False),
        "FLASHINFER": (False, False),
        "TRITON_ATTN": (False, True),
        "FLEX_ATTENTION": (False, True),
        "TREE_ATTN": (False, True),
    }
    assert all(256 in r.heads for r in rows.values()), "head size 256 was never the problem"
    assert "512" in rows["FLASH_ATTN"].why and rows["FLASH_ATTN"].fix
    assert all(r.why and r.fix for r in rows.values())


def test_ampere_table_is_corrected_for_newer_versions() -> None:
    rows = {r.name: r for r in backends.judge_backends(FACTS, "vllm", "0.33.0", (8, 6))}
    for name in ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"):
        assert rows[name].draft and rows[name].target, name
    assert rows["FLASH_ATTN (FA2)"].draft and not rows["FLASH_ATTN (FA2)"].target
    assert "TREE_ATTN" not in rows
    assert "fp8" not in rows["TRITON_ATTN"].kv, "an fp8 cache needs capability 8.9 in Triton"
    ada = {r.name: r for r in backends.judge_backends(FACTS, "vllm", "0.33.0", (8, 9))}
    assert "fp8" in ada["TRITON_ATTN"].kv
    flex = {r.name: r for r in backends.judge_backends(FACTS, "vllm", "0.20.2", (8, 6))}
    assert [n for n, r in flex.items() if r.draft and r.target] == ["FLEX_ATTENTION"]


def test_ampere_today() -> None:
    d = ask(*AMPERE)
    assert d.works
    vllm = line(d, "Engines", "vLLM 0.33.0")
    assert "INT4 AutoRound, 2 GPUs" in vllm.text
    assert "draft FLASH_ATTN" in texts(d, "Attention backends")
    assert "num_speculative_tokens 8" in texts(d, "Draft length")
    assert "no NVLink" in texts(d, "Machine")
    assert "peer-to-peer" in texts(d, "Known problems")


def test_ampere_second_path_llamacpp() -> None:
    d = ask(*AMPERE, engine="llama.cpp")
    problems = texts(d, "Known problems")
    assert d.works
    assert "d2t and t2d" in problems and "g4spec convert" in problems
    old = ask(*AMPERE, engine="llama.cpp", given=("llama.cpp=b9548",))
    assert not old.works and "b9831" in old.steps[0]


# ---- report 2: GB10 alone, and two and four of them


def test_spark_report() -> None:
    d = ask("GB10", "31b:fp8", "redhat-dflash", given=("vllm=0.19.2",))
    assert not d.works
    engines = texts(d, "Engines")
    assert "cannot run a DFlash draft" in engines, "second and third patch"
    assert "no FP8 kernels for GB10" in engines and "FORCE_FP8_MARLIN" in engines, "first patch"


def test_spark_forced_backend() -> None:
    d = ask("GB10", "31b", "redhat-dflash", backend="flash_attn", engine="vllm")
    assert not d.works
    assert "FLASH_ATTN cannot be forced" in texts(d, "Engines")
    assert "remove --attention-backend" in d.steps[0]


def test_spark_today() -> None:
    d = ask("GB10", "31b:fp8", "redhat-dflash", c=16384)
    assert d.works
    assert "shared with the CPU" in texts(d, "Machine")
    assert "0.80" in texts(d, "Known problems")
    speed = texts(d, "Speed")
    assert "5.53 without, 15.44 tokens/s with this draft" in speed
    assert "sm_121" not in speed


@pytest.mark.parametrize("nodes", [2, 4])
def test_sparks_together(nodes: int) -> None:
    d = ask(f"{nodes}x GB10", "31b:fp8", "redhat-dflash")
    assert d.works and d.machine.nodes == nodes and len(d.machine.gpus) == 1
    problems = texts(d, "Known problems")
    assert "Ray" in problems and "--headless" in problems
    assert "bad cable" in problems and "doctor --network" in problems
    assert f"{nodes} GPUs" in line(d, "Engines", "vLLM").text


# ---- report 3: one RTX 3090 with 24 GB


def test_one_3090_31b() -> None:
    d = ask("RTX 3090 24GB", "31b:q4_k_m", "zlab", c=32768, kv="q8_0")
    assert d.works
    assert "does not start the 31B on one GPU of 24 GB or less" in texts(d, "Engines")
    assert "24.00 of 24 GB" in texts(d, "Known problems")
    assert "Q8_0 draft" in texts(d, "Known problems")
    assert d.plans[0].largest >= 32768
    too_long = ask("RTX 3090 24GB", "31b:q4_k_m", "zlab", c=65536, kv="q8_0")
    assert not too_long.works
    assert "65,536 tokens do not fit" in texts(too_long, "Engines")
    assert too_long.brief is not None and too_long.brief.alternatives[0].kind == "context"


def test_one_3090_26b() -> None:
    d = ask("RTX 3090 24GB", "26b", "zlab", c=65536)
    assert d.works
    assert "runs Q4_K_M" in line(d, "Engines", "llama.cpp").text


# ---- report 4: two V100


def test_volta() -> None:
    d = ask("2x V100", "31b", "mtp")
    engines = texts(d, "Engines")
    assert d.works, "with llama.cpp"
    assert "bad vLLM 0.33.0 (newest known, not installed): vLLM has no code for a V100" in engines
    assert "1Cat-vLLM" in engines and "CUDA 12" in engines
    assert "runs" in line(d, "Engines", "llama.cpp").text
    problems = texts(d, "Known problems")
    assert "310 ms per token on Triton" in problems and "--attention-backend" in problems
    assert "CUDA 12.9" in problems
    only = ask("2x V100", "31b", "mtp", engine="vllm")
    assert not only.works and "llama.cpp" in only.steps[0]


def test_volta_shared_memory_is_just_enough() -> None:
    assert backends.shared_memory(FACTS, (7, 0)) == 98304
    turing = {r.name: r for r in backends.judge_backends(FACTS, "vllm", "0.33.0", (7, 5))}
    assert not turing["TRITON_ATTN"].target
    assert "98,304" in turing["TRITON_ATTN"].why and "65,536" in turing["TRITON_ATTN"].why


# ---- rules beyond the reports


@pytest.mark.parametrize(
    ("machine", "model", "draft", "given", "kv", "words"),
    [
        ("RTX 4090", "12b", "mtp", ("vllm=0.27.1", "transformers=5.15.0"), None, "5.14.1"),
        ("RTX 4090", "12b", "mtp", ("vllm=0.25.0",), None, "0.24.0"),
        ("RTX 3090", "12b", "mtp", ("vllm=0.33.0",), "fp8", "bfloat16"),
        ("2x RTX 4090", "31b", "zlab", ("vllm=0.25.1",), None, "vllm>=0.28"),
        ("2x RTX 4090", "31b", "redhat-dflash2", ("vllm=0.26.0",), None, "vllm>=0.29"),
        ("RTX 4090", "12b", "mtp", ("vllm=0.33.0", "driver=570.12"), None, "driver 580"),
        ("RTX 3090", "26b:autoround", "mtp", ("vllm=0.33.0",), None, "26b:awq"),
        ("T4", "e4b", "mtp", ("vllm=0.33.0",), None, "llama.cpp"),
        ("RTX 3090", "12b", "mtp", ("llama.cpp=b9831",), "fp8", "doctor --engine"),
        ("RTX 4090", "12b", "mtp", ("vllm=0.33.0",), "q8_0", "doctor --engine"),
        ("RTX 3090", "12b", "mtp", ("vllm=0.33.0", "transformers=5.7.0"), None, "5.8"),
        ("RTX 3090 + RTX 4090", "31b", "mtp", ("vllm=0.33.0",), None, "one compute capability"),
        ("RTX 3090", "12b", "mtp", ("llama.cpp=b9000",), None, "b9549"),
        ("RTX 3090", "e2b", "mtp", ("llama.cpp=b9550",), None, "b9568"),
    ],
)
def test_every_failure_has_a_fix(
    machine: str, model: str, draft: str, given: tuple[str, ...], kv: str | None, words: str
) -> None:
    engine = "llama.cpp" if given[0].startswith("llama") else "vllm"
    d = ask(machine, model, draft, given=given, kv=kv, engine=engine)
    assert not d.works
    assert words in " ".join(d.steps) + texts(d, "Engines")


@pytest.mark.parametrize(
    "machine, model, draft, engine, step",
    [
        ("H100", "31b", "redhat-eagle3", "sglang", "vLLM instead of SGLang"),
        ("RTX 3090", "12b", "deepseek-eagle3", "vllm", None),
        ("RTX 3090", "12b", "deepseek-eagle3", "llama.cpp", None),
        ("H100", "12b", "deepseek-dspark", "sglang", None),
    ],
)
def test_a_run_of_which_nothing_is_known_does_not_count_as_possible(
    machine: str, model: str, draft: str, engine: str, step: str | None
) -> None:
    """Doctor marked it with a cross, exited with 0, and its step was empty."""
    d = ask(machine, model, draft, engine=engine)
    assert not d.works and d.steps and all(text.split(": ")[-1].strip() for text in d.steps)
    assert step is None or step in d.steps


def test_nccl_typo_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(
        (Gpu("RTX 3090", (8, 6), 24 << 30, card="rtx-3090"),) * 2,
        env=frozenset({"NCCL_IP_DISABLE"}),
    )
    d = diagnose(FACTS, machine, None)
    assert "NCCL_IB_DISABLE was probably meant" in texts(d)


# ---- machines that are not in the data


def test_an_unknown_card_gives_unknown() -> None:
    machine = Machine((Gpu("NVIDIA Tomorrow 9000", (8, 6), 24 << 30),))
    q = questions.build_question(FACTS, "31b:q4_k_m", "mtp", 8192, None, None, None)
    d = diagnose(FACTS, machine, q)
    assert d.works
    assert "bandwidth unknown" in texts(d, "Machine")
    assert "unknown" in texts(d, "Speed")


def test_unknown_capability() -> None:
    machine = Machine((Gpu("NVIDIA Future", (13, 0), 48 << 30, bandwidth=3000.0),))
    d = diagnose(FACTS, machine, None)
    assert "this compute capability is not in the data" in texts(d, "Machine")


@pytest.mark.parametrize(
    "text",
    [
        "RTX 9999",
        "",
        "2x",
        "0x RTX 3090",
        "banana",
        "sm_99 24GB",
        "sm_20 4GB",
        "sm_86",
        "V100 80GB",
        "999x RTX 3090",
    ],
)
def test_wrong_assume(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        assume(FACTS, text)
    if text in ("RTX 9999", "banana", "sm_99 24GB", ""):
        assert 'as "sm_86 24GB"' in str(caught.value) and "doctor --cards" in str(caught.value)
    if text.startswith("sm_"):
        assert re.search(r"expected one of sm_[67]\d, .*sm_90, .*sm_120", str(caught.value))


@pytest.mark.parametrize(
    ("text", "cc", "n", "gib"),
    [
        ("RTX 3090 24GB", (8, 6), 1, 24),
        ("2x RTX 3090", (8, 6), 2, 24),
        ("2 x NVIDIA GeForce RTX 3090", (8, 6), 2, 24),
        ("3090", (8, 6), 1, 24),
        ("V100 16GB", (7, 0), 1, 16),
        ("2x V100", (7, 0), 2, 32),
        ("sm_86 24GB", (8, 6), 1, 24),
        ("sm_120a 32GB", (12, 0), 1, 32),
        ("A100 40GB", (8, 0), 1, 40),
        ("H100", (9, 0), 1, 80),
        ("rtx3090", (8, 6), 1, 24),
        ("3090 x2", (8, 6), 2, 24),
        ("RTX 3090 x2 24GB", (8, 6), 2, 24),
        ("A100 x4 40 GB", (8, 0), 4, 40),
        ("3090x2", (8, 6), 2, 24),
        ("dual 3090", (8, 6), 2, 24),
        ("RTX3080ti", (8, 6), 1, 12),
        ("4060ti 8gb", (8, 9), 1, 8),
        ("RTX 4090 Laptop", (8, 9), 1, 16),
        ("5060 ti", (12, 0), 1, 16),
        ("RTX 2060 Super", (7, 5), 1, 8),
        ("a5000", (8, 6), 1, 24),
        ("RTX 6000 Ada", (8, 9), 1, 48),
        ("NVIDIA H100 NVL", (9, 0), 1, 94),
        ("H100 80GB HBM3", (9, 0), 1, 80),
        ("Quadro RTX 8000", (7, 5), 1, 48),
        ("NVIDIA RTX 4500 Ada Generation", (8, 9), 1, 24),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", (8, 9), 1, 16),
        ("NVIDIA GeForce RTX 2070 Super with Max-Q Design", (7, 5), 1, 8),
        ("RTX 2070 SUPER Laptop", (7, 5), 1, 8),
        ("RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), 1, 96),
        ("A6000 Ada", (8, 9), 1, 48),
        ("Tesla P100-PCIE-16GB", (6, 0), 1, 16),
        ("NVIDIA B300 SXM6 AC", (10, 3), 1, 288),
        ("L40G", (8, 9), 1, 24),
        ("NVIDIA GH200 480GB", (9, 0), 1, 96),
        ("2x GH200 120GB", (9, 0), 2, 96),
        ("GH200", (9, 0), 1, 96),
        ("GH200 144G", (9, 0), 1, 144),
        ("2x GH200 HBM3e 144GB", (9, 0), 2, 144),
    ],
)
def test_assumed_machines(text: str, cc: tuple[int, int], n: int, gib: int) -> None:
    m = assume(FACTS, text)
    assert m.assumed and m.cc == cc and len(m.gpus) == n and m.memory == gib << 30


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7900 XTX", "GGML_VULKAN"),
        ("Radeon RX 9070 XT", "GGML_HIP"),
        ("M3 Max 64GB", "Metal"),
        ("MacBook Pro", "Metal"),
        ("Arc B580", "GGML_SYCL"),
        ("Jetson AGX Orin 64GB", "on the board"),
        ("RTX 4090m", "RTX 4090 Laptop"),
        ("4070tis", "RTX 4070 Ti SUPER"),
        ("RTX 6000", "RTX 6000 Ada"),
        ("RTX 4060 Tii", "RTX 4060 Ti"),
        ("RTX 4060 Ti 16MB", "memory in GB, as 24GB, found 16MB"),
        ("sm_86 0GB", "expected more than 0 GB, found 0 GB"),
        ("RTX 3090 0.0GB", "expected more than 0 GB, found 0 GB"),
        ("24GB", "RTX 4090"),
        ("24GB", "sm_86 24GB"),
        ("CPU", "CPU 64GB"),
        ("1000x RTX 3090", "expected 1 to 64 GPUs, found 1000"),
        ("-1x RTX 3090", "expected 1 to 64 GPUs, found -1"),
        ("40x RTX 3090 + 40x RTX 4090", "expected 1 to 64 GPUs, found 80"),
        ("RTX 3090 x1000", "expected 1 to 64 GPUs, found 1000"),
        ("RTX 3090 x0", "expected 1 to 64 GPUs, found 0"),
        ("RTX 3090 x-1", "expected 1 to 64 GPUs, found -1"),
        ("3090x1000", "expected 1 to 64 GPUs, found 1000"),
        ("1000 x 3090", "expected 1 to 64 GPUs, found 1000"),
        ("H100 + RTX 3090 24GB x 1000", "expected 1 to 64 GPUs, found 1001"),
        ("sm_86 24GB x1000", "expected 1 to 64 GPUs, found 1000"),
        ("99999999999x H100", "expected 1 to 64 GPUs, found 99999999999"),
        ("H100 94GB", 'Write "H100 SXM 80GB", "H100 NVL 94GB", or "sm_90 94GB"'),
        ("MIG 1g.5gb", 'Write them as "sm_80 5GB"'),
        ("A100-SXM4-40GB MIG 2g.10gb", 'Write "sm_80 10GB"'),
        ("2x H100 1g.10gb", 'Write "sm_90 10GB"'),
        ("4x 4x H100", "two counts: expected one, as 4x H100"),
        ("2x dual 3090", "two counts"),
        ("quad 2x RTX 3090 24GB", "two counts"),
        ("RTX 4090 + 2x 3090 x2", "two counts"),
        ("TITAN X 2016", "unknown GPU"),
    ],
)
def test_unknown_cards_get_suggestions(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        assume(FACTS, text)
    assert says in str(caught.value)


def test_every_known_card_can_be_assumed() -> None:
    for number, card in enumerate(FACTS.all(CardFact)):
        m = assume(FACTS, card.name)
        assert m.gpus[0].card == card.id, card.name
        if number % 8 == 0:
            assert diagnose(FACTS, m, None).sections


def test_similar_product_names_are_not_mistaken_for_known_cards() -> None:
    with pytest.raises(UsageError):
        assume(FACTS, "RTX 5080 D")
    assert assume(FACTS, "RTX 3090 Ti").gpus[0].card == "rtx-3090-ti"
    assert assume(FACTS, "RTX PRO 4000 Blackwell SFF Edition").gpus[0].bandwidth == 432


# ---- the command


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys, "--assume", "RTX 3090", "-m", "31b:q4_k_m", "-md", "mtp")[0] == 0
    assert doctor(capsys, "--assume", "RTX 3060", "-m", "31b:q8_0")[0] == 1
    assert doctor(capsys, "--assume", "RTX 3060", "-m", "99b")[0] == 2
    assert doctor(capsys, "--assume", "no such card")[0] == 2
    assert doctor(capsys, "-md", "mtp")[0] == 2
    assert doctor(capsys, "--assume", "RTX 3090", "-m", "31b", "-md", "nothing")[0] == 2
    assert doctor(capsys, "--assume", "RTX 3090", "-m", "12b", "-md", "redhat-dflash")[0] == 2
    assert doctor(capsys, "--assume", "RTX 3090", "-m", "missing.gguf")[0] == 3
    assert doctor(capsys, "--with", "vllm", "-m", "12b")[0] == 2
    assert doctor(capsys, "--engine", "ollama", "-m", "12b")[0] == 2


def test_missing_files_name_the_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target.gguf").touch()
    for argv, fix in (
        ("-m targt.gguf", "targt.gguf: no such file. Did you mean target.gguf?"),
        ("-m no/x.gguf", "no/x.gguf: no such file. Check the path, or name a size such as 31b"),
        ("-m 31b -md x.gguf", "x.gguf: no such file. Check the path, or name a published draft"),
    ):
        assert run(["doctor", "--assume", "RTX 3090", *argv.split()]) == 3
        assert fix in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("--with", "vlmm=0.19.2"),
        ("-m", "12b", "--attention-backend", "FLASH_ATN"),
        ("--gpus", "2"),
        ("--gpus", "2", "--assume", "RTX 3090", "-m", "12b"),
        ("--attention-backend", "FLASH_ATTN"),
        ("--self-test", "--network"),
        ("--why", "gtx-1080-ti", "-m", "12b"),
        ("--log", "-", "--self-test"),
    ],
)
def test_no_argument_is_ignored(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *argv]) == 2
    output = capsys.readouterr().err
    assert argv[0] in output or argv[2] in output
    assert "expected" in output or "one question at a time" in output


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = doctor(
        capsys, "--assume", "2x RTX 3090", "-m", "31b", "-md", "redhat-dflash", "--json"
    )
    got = json.loads(out)
    assert code == 0 and got["works"] is True
    assert got["machine"]["gpus"][0]["bandwidth"] == 936
    plan = got["memory"][0]
    assert plan["total"] == sum(s["nbytes"] for s in plan["steps"])
    code, out = doctor(capsys, "--assume", "RTX 3060", "-m", "31b:q8_0", "--json")
    assert code == 1 and json.loads(out)["works"] is False


def test_five_lines_and_everything(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--assume", "2x RTX 3090", "--model", "31b", "--draft", "redhat-dflash")
    short, full = doctor(capsys, *args)[1], doctor(capsys, *args, "--verbose")[1]
    assert len(short.splitlines()) <= 16
    d = ask("2x RTX 3090", "31b", "redhat-dflash")
    assert d.brief is not None and d.brief.command.startswith("g4spec recipe ")
    assert [name for name, _ in d.brief.rows] == ["why", "type", "context", "speed"]
    assert len(full) > len(short)
    assert all(sign in full for sign in "✓!✗")
    assert "[vllm-selection" in full


def test_without_a_card_llamacpp_runs_on_the_cpu() -> None:
    assert questions.build_machine(FACTS, "cpu64gb", ()).ram == 64 << 30
    d = ask("CPU 64GB")
    marks = {
        x.facts[0]: x.mark
        for s in d.sections
        if "Gemma 4" in s.title
        for x in s.lines
        if x.facts and not x.detail
    }
    assert marks == dict.fromkeys(("31b", "26b", "12b", "e4b", "e2b"), "good")
    assert d.steps == ['g4spec doctor -m 31b -md mtp --assume "CPU 64GB"']
    assert [x.works for x in (ask("CPU 64GB", "31b", "mtp"), ask("CPU 8GB", "31b", "mtp"))] == [
        True,
        False,
    ]


def test_a_16_gb_card_gets_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    d = ask("4060 ti", "31b", "mtp")
    assert d.brief is not None and not d.works
    assert not any("Speed" in s.title for s in d.sections), (
        "no speed for an engine that cannot start"
    )
    assert [name for name, _ in d.brief.rows] == ["reported"]
    assert [a.kind for a in d.brief.alternatives] == ["split", "size"]
    assert re.search(r"\d+ of 60 layers.*\(-ngl \d+\)", d.brief.alternatives[0].text)
    code, out = doctor(capsys, *shlex.split(d.brief.command)[2:], "--json")
    assert code == 0 and json.loads(out)["works"], "the proposal works"
    moe = ask("rtx 4070", "26b").brief
    assert moe is not None and "-ncmoe" in moe.alternatives[0].command
    every = ask("4060 ti")
    assert line(every, "Gemma 4", "12B").mark in ("good", "warn")
    assert "-m 26b" in every.steps[0]


def test_reported_speeds_name_the_card_if_it_is_another() -> None:
    def reported(machine: str, model: str) -> list[str]:
        brief = ask(machine, model).brief
        assert brief is not None and not ask(machine, model).works
        return [text for name, text in brief.rows if name == "reported"]

    assert reported("RTX 4060", "12b:q8_0") == [], "nothing is published for this size"
    (own,), (other,) = reported("RTX 3060", "26b"), reported("RTX 4070", "26b")
    assert not own.startswith("nothing for this GPU")
    assert other.startswith("nothing for this GPU")


@pytest.mark.parametrize("machine", ["RTX 4060", "RTX 3090", "RTX 4060 Ti", "2x RTX 3090", "T4"])
def test_the_overview_agrees_with_each_diagnosis(machine: str) -> None:
    overview = ask(machine)
    for size in FACTS.all(SizeFact):
        brief, shown = ask(machine, size.id, "mtp").brief, line(overview, "Gemma 4", size.name)
        assert brief is not None and shown.mark == brief.mark, size.id
        assert bool(shown.reason) == (shown.mark == "warn"), "every warning has a reason"
        if brief.mark in ("good", "warn"):
            engine = brief.said.split(" (")[0]
            assert line(ask(machine, size.id, "mtp"), "Engines", engine).mark == brief.mark


@pytest.mark.parametrize(
    ("machine", "model", "draft"),
    [
        ("RTX 4060", "12b:q4_k_m", None),
        ("RTX 4060", "12b", "mtp"),
        ("RTX 4060 Ti", "31b", "mtp"),
        ("RTX 4070", "26b", None),
    ],
)
def test_layers_in_ram_replace_missing_gpu_memory(
    machine: str, model: str, draft: str | None
) -> None:
    m = questions.build_machine(FACTS, machine, ())
    q = questions.build_question(FACTS, model, draft, None, None, None, None)
    assert q is not None
    v = engines.judge(FACTS, m, q, "llama.cpp")
    assert v.plan is not None and v.option is not None and not v.works
    assert f"{v.plan.total / GIB:.1f} GiB" in v.refusal, "the figures are of one plan"
    found = alternatives.smallest_split(FACTS, m, q, v.option, v.plan)
    assert found is not None
    split, fits = found
    assert fits.fits and v.too_large
    assert v.plan.total - fits.total == pytest.approx(fits.ram, abs=8)
    assert fits.ram >= v.plan.total - v.plan.available
    again = engines.judge(FACTS, m, replace(q, split=split), "llama.cpp")
    assert again.works and again.plan is not None and again.plan.ram
    assert estimate(FACTS, m, q, again) is None, "no speed of the card for layers in RAM"


@pytest.mark.parametrize("machine", ["RTX 3060", "CPU 8GB", "GTX 1080 Ti", "T4", "RTX 5090"])
@pytest.mark.parametrize("model", ["31b:bf16", "26b:bf16", "e2b"])
def test_every_refusal_has_a_next_step(machine: str, model: str) -> None:
    d = ask(machine, model, "mtp")
    assert d.brief is not None and (d.works or d.steps), "what to do is said"


def test_every_line_can_be_traced(capsys: pytest.CaptureFixture[str]) -> None:
    """Every printed id belongs to a row with source and date."""
    d = ask("2x RTX 3090", "31b", "redhat-dflash", given=("vllm=0.19.2",))
    ids = {i for s in d.sections for x in s.lines for i in x.facts}
    assert len(ids) > 15
    for id in ids:
        assert id in FACTS.by_id, id
    code, out = doctor(capsys, "--why", "dflash-0.19")
    assert code == 0 and "https://huggingface.co/RedHatAI" in out and "date: 2026-" in out
    assert doctor(capsys, "--why", "no-such-fact")[0] == 2


def test_every_row_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Silent:
        def line(self, text: str = "", style: str | None = None) -> None: ...
        def note(self, text: str) -> None: ...
        def result(self, value: dict[str, Any]) -> None:
            json.dumps(value)

    for id in FACTS.by_id:
        questions.explain(FACTS, id, Silent())


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="asks the driver, too")
def test_quick_without_a_gpu() -> None:
    """Measures whole processes, imports included."""
    for args in ([], ["-m", "31b", "-md", "mtp", "--assume", "RTX 3090"]):
        with processor_time_below(2):
            subprocess.run(
                [sys.executable, "-m", "g4spec", "doctor", *args],
                cwd=ROOT,
                capture_output=True,
                check=False,
            )


def test_torch_is_not_imported() -> None:
    code = (
        "import sys\nfrom g4spec.cli import run\nrun(['doctor', '-m', '31b', '--assume', "
        "'RTX 3090'])\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_self_test(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out = doctor(capsys, "--self-test", "--json")
    checks = json.loads(out)["checks"]
    assert code == 0
    assert any("same bits" in c["text"] and c["ok"] for c in checks)
    assert any("CUDA kernels" in c["text"] for c in checks)


def test_a_failed_self_test_names_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [CheckResult(True, "reference"), CheckResult(False, "Q4_K matmul")]
    monkeypatch.setattr("g4spec.advisor.selftest.run", lambda: results)
    assert run(["doctor", "--self-test"]) == 1
    assert "the self-test found a problem: Q4_K matmul" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2])
def test_self_test_checks_the_kernels_of_each_gpu(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    def select(device: str) -> mock.Mock:
        ops = mock.Mock(device=torch.device("cpu"), title=f"GPU of {device}")
        return mock.Mock(spec=CudaBackend, ops=ops)

    monkeypatch.setattr(devices, "select", select)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(kernel_selftest, "checks", lambda ops: [(True, f"kernel: {ops.title}")])
    monkeypatch.setattr(model_selftest, "checks", lambda found: [(True, f"on {found.ops.title}")])
    monkeypatch.setattr(kernel_selftest, "step_graph", lambda ops, rows: (rows, 2 * 10**8))
    monkeypatch.setattr(selftest, "gpu_seconds", lambda launch, times: 1e-4 * launch)
    found = list(selftest.checks())
    for i in range(count):
        assert {(True, f"kernel: GPU of cuda:{i}"), (True, f"on GPU of cuda:{i}")} <= {*found}
        assert ((None, f"cuda:{i}: GPU of cuda:{i}") in found) == (count > 1)
    times = [text for ok, text in found if ok is None and text.startswith("step time measured")]
    assert "100 us" in times[0] and "1 row: 2000 GB/s" in times[0]
    assert "16 rows: 125 GB/s" in times[1]


def test_the_step_of_the_self_test_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph reads the addresses of its inputs, and does not keep them."""
    inputs: list[weakref.ref[Any]] = []

    def gated(*read: Any, **options: Any) -> torch.Tensor:
        inputs.extend(weakref.ref(x) for x in read[:4])
        return torch.zeros(1)

    launched = mock.Mock()
    monkeypatch.setattr(kernel_selftest, "HIDDEN", 256)
    monkeypatch.setattr(kernel_selftest, "FF", 512)
    monkeypatch.setattr(graphs, "Capture", lambda run, pool: launched)
    ops = mock.Mock(device="cpu", portable=True, gated=gated, norm_rows=lambda x, *_: x)
    launch, nbytes = kernel_selftest.step_graph(ops, 2)
    gc.collect()
    assert len(inputs) == 4 and all(x() is not None for x in inputs)
    launch()
    assert launched.replay.call_count == 1 and nbytes == 3 * 512 * 144


def test_speed_without_a_published_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    """The plain speed is not taken for the speed with the draft."""
    words = ["doctor", "--assume", "RTX 4060 Ti 16GB", "-m", "12b", "-md", "mtp"]
    assert run(words) == 0
    assert "tokens/s without the draft (computed" in capsys.readouterr().out
    assert run(words[:-2]) == 0
    assert "tokens/s (computed, not measured)\n" in capsys.readouterr().out
