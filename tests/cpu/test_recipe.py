"""recipe: complete commands for the systems of the four reports, with a reason for each flag."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from g4spec import cli
from g4spec.advisor import engines, lengths, named_models, questions, recipe, scripts
from g4spec.advisor.conditions import Situation
from g4spec.advisor.doctor import diagnose
from g4spec.advisor.facts import facts
from g4spec.advisor.machine import Machine, on_nodes
from g4spec.advisor.recipe import Recipe
from g4spec.advisor.schema import CardFact, DraftFact, FlagFact, SizeFact
from g4spec.cli import run
from g4spec.errors import UsageError
from tests.support import tiny

FACTS = facts()
CARDS = list({(c.cc, c.memory, c.unified): c for c in FACTS.all(CardFact)}.values())
"""One card of each capability and memory size."""


def make(
    engine: str,
    machine: str,
    model: str,
    draft: str | None = None,
    *,
    c: int | None = None,
    given: tuple[str, ...] = (),
    kv: str | None = None,
    nodes: int | None = None,
) -> Recipe:
    m = on_nodes(questions.build_machine(FACTS, machine, given), nodes)
    q = questions.build_question(FACTS, model, draft, c, kv, None, None)
    assert q is not None
    return recipe.make(FACTS, m, q, engine)


def speculative(command: str) -> dict[str, object]:
    """Return the JSON of --speculative-config as the shell passes it on."""
    words = shlex.split(command)
    found: dict[str, object] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def test_eagle_3_runs_in_llama_cpp() -> None:
    """`benchmarks/llama_cpp_drafts.py` found that upstream's proposals equal g4spec's."""
    (command,) = make("llama.cpp", "RTX 5090", "31b", "redhat-eagle3").commands
    words = shlex.split(command)
    assert words[words.index("--spec-type") + 1] == "draft-eagle3"
    assert words[words.index("--spec-draft-n-max") + 1] == "5"
    old = make("llama.cpp", "RTX 5090", "31b", "redhat-eagle3", given=("llama.cpp=b9500",))
    assert not old.works


@pytest.mark.parametrize("machine", ["H100", "CPU 64GB"])
@pytest.mark.parametrize("engine", recipe.SERVER)
def test_drafts_that_an_engine_cannot_read_are_refused(engine: str, machine: str) -> None:
    """Recipes downloaded them, the EAGLE-3 draft from a repository that does not exist."""
    r = make(engine, machine, "12b", "deepseek-eagle3")
    assert not r.works and any("Gemma4Eagle3Model" in why for _, why, _ in r.blocked)
    r = make(engine, "H100", "12b", "deepseek-dflash")
    assert r.works == (engine == "g4spec")
    assert r.works or any("Gemma4DSparkModel" in why for _, why, _ in r.blocked)


@pytest.mark.parametrize(
    ("engine", "last", "first", "model", "draft"),
    [
        ("vllm", "0.19.0", "0.19.1", "31b", "redhat-eagle3"),
        ("vllm", "0.22.1", "0.23", "12b", "mtp"),
        ("vllm", "0.28.1", "0.29", "31b", "redhat-dflash2"),
        ("sglang", "0.5.10", "0.5.11", "31b", None),
        ("sglang", "0.5.11", "0.5.12", "31b", "mtp"),
        ("sglang", "0.5.12.post1", "0.5.13", "12b", "mtp"),
        ("sglang", "0.5.13", "0.5.14", "31b", "zlab"),
    ],
)
def test_versions_without_the_model_or_draft_are_refused(
    engine: str, last: str, first: str, model: str, draft: str | None
) -> None:
    """`last` does not have the class or the method that `first` has."""
    assert not make(engine, "H100", model, draft, given=(f"{engine}={last}",)).works
    assert make(engine, "H100", model, draft, given=(f"{engine}={first}",)).works


def test_the_cache_type_is_that_of_the_memory_plan() -> None:
    m = questions.build_machine(FACTS, "RTX 4060 Ti", ())
    q = questions.build_question(FACTS, "12b", "mtp", None, None, None, None)
    assert q is not None
    plan = engines.judge(FACTS, m, q, "vllm").plan
    assert plan is not None and plan.kv == "fp8"
    r = make("vllm", "RTX 4060 Ti", "12b", "mtp")
    assert "--kv-cache-dtype fp8" in r.commands[0]
    reasons = {p.fact: p.reason for p in r.parts}
    assert "--kv" not in reasons["flag-vllm-kv"], "no cache type was asked for"
    assert f"{plan.largest:,}" in reasons["flag-vllm-len"]
    result = make("vllm", "RTX 4060 Ti", "12b", "mtp", kv="fp8", c=4096)
    reasons = {p.fact: p.reason for p in result.parts}
    assert "--kv" in reasons["flag-vllm-kv"] and "-c" in reasons["flag-vllm-len"]


@pytest.mark.parametrize(("c", "kv"), [(None, "q8_0"), (4096, "f16")])
def test_g4spec_has_f16_where_it_fits(c: int | None, kv: str) -> None:
    r = make("g4spec", "RTX 4060", "e4b", "mtp", c=c)
    flag = {"q8_0": "flag-g4-kv", "f16": "flag-g4-kv-f16"}[kv]
    (part,) = [p for p in r.parts if p.fact.startswith("flag-g4-kv")]
    assert part.fact == flag and "f16" in part.reason
    assert ("--cache-type q8_0" in r.commands[0]) == (kv == "q8_0")


def test_layers_in_ram_for_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["recipe", "llama.cpp", "-m", "26b", "--assume", "RTX 4070", "--json"]
    assert run([*ask, "-ncmoe", "12"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    assert "-ncmoe 12" in command and "-ngl 99" in command
    assert run([*ask, "-ngl", "12"]) == 0
    assert "-ngl 12" in json.loads(capsys.readouterr().out)["commands"][0]


def test_more_layers_than_the_model_has_are_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """The 26b has 30 layers; llama.cpp takes larger numbers for all of them."""
    ask = ["recipe", "llama.cpp", "-m", "26b", "--assume", "RTX 4070"]
    assert run([*ask, "-ncmoe", "1200"]) == 0
    text = capsys.readouterr().out
    assert "-ncmoe 30" in text and "1200" not in text
    assert run([*ask[:-1], "H100", "-ngl", "99"]) == 0
    assert "-ngl 99: all layers on the GPU" in capsys.readouterr().out
    assert run([*ask, "-ngl", "12"]) == 0
    assert "the first others stay in RAM" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["recipe", "llama.cpp"], ["doctor"]])
@pytest.mark.parametrize("option", ["-ngl", "-ncmoe"])
def test_layers_in_ram_need_a_gpu(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*command, "-m", "26b", "--assume", "CPU 64GB"]
    assert run(line) == 0
    capsys.readouterr()
    assert run([*line, option, "12"]) == 2
    assert f"{option} 12: no NVIDIA GPU" in capsys.readouterr().err
    assert run(["recipe", "vllm", "-m", "26b", "--assume", "H100", "-ncmoe", "1"]) == 2
    assert run(["recipe", "llama.cpp", "-m", "12b", "--assume", "H100", "-ncmoe", "1"]) == 2
    assert run(["doctor", "-m", "26b", "--assume", "RTX 4070", "-ncmoe", "12"]) == 0


@pytest.mark.parametrize(
    ("machine", "kv", "flag", "gpu"),
    [
        ("RTX 3090", None, True, True),
        ("RTX 3090", "q8_0", True, True),
        ("CPU 64GB", None, False, False),
        ("CPU 64GB", "bf16", False, False),
        ("CPU 64GB", "q8_0", True, False),
    ],
)
def test_flash_attention_of_llama_cpp(machine: str, kv: str | None, flag: bool, gpu: bool) -> None:
    """Recipes for a CPU gave the compute capability that GPUs need as the reason of -fa on."""
    r = make("llama.cpp", machine, "12b:q4_0", kv=kv)
    assert r.commands[0].count("-fa on") == flag
    (text,) = [line for line in r.reasons() if line.startswith("-fa on")] or [""]
    assert ("7.0" in text) == gpu and ("quantized" in text) == flag


def test_one_drafted_token_with_experts_in_ram(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe wrote 2, and doctor's own list of problems says 1."""
    on = ["-m", "26b", "-md", "mtp", "--assume", "RTX 4060 Ti 16GB", "-ncmoe", "1", "--json"]
    assert run(["recipe", "llama.cpp", *on]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    assert "--spec-draft-n-max 1 " in command
    assert run(["doctor", *on]) == 0
    assert "moe-cpu" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.28.0"])
def test_old_vllm_keeps_tokens_for_the_target(version: str) -> None:
    """2048 less 14 for each of 1024 sequences: vLLM to 0.27.1 refused to start on an H100."""
    (command,) = make("vllm", "H100", "31b", "zlab", given=(f"vllm={version}",)).commands
    words = shlex.split(command.replace("\\\n", " "))
    if version == "0.28.0":
        assert "--max-num-seqs" not in words
    else:
        sequences = int(words[words.index("--max-num-seqs") + 1])
        budget = int(words[words.index("--max-num-batched-tokens") + 1])
        drafted = speculative(command)["num_speculative_tokens"]
        assert isinstance(drafted, int) and budget - sequences * (drafted - 1) >= 1024


# ---- report 1


def test_two_3090() -> None:
    r = make("vllm", "2x RTX 3090", "31b", "redhat-dflash")
    (command,) = r.commands
    assert "vllm serve Intel/gemma-4-31B-it-int4-AutoRound" in command
    assert "--tensor-parallel-size 2" in command
    assert "NCCL_P2P_DISABLE=1" in command and "--disable-custom-all-reduce" in command
    assert "--attention-backend" not in command, "the target stays on TRITON_ATTN"
    assert speculative(command) == {
        "method": "dflash",
        "model": "RedHatAI/gemma-4-31B-it-speculator.dflash",
        "num_speculative_tokens": 8,
        "attention_backend": "FLASH_ATTN",
    }


def test_two_3090_of_the_report() -> None:
    r = make("vllm", "2x RTX 3090", "31b", "redhat-dflash", given=("vllm=0.19.2rc1",))
    assert not r.works
    what, why, fix = r.blocked[0]
    assert "0.19" in what and "inherits" in why and "vllm>=0.28" in fix
    assert r.instead == (
        'g4spec recipe vllm -m 31b -md redhat-dflash --assume "2x RTX 3090 24GB" --with vllm=0.33.0'
    )


def test_two_3090_llamacpp_needs_a_conversion_by_g4spec() -> None:
    r = make("llama.cpp", "2x RTX 3090", "31b:q4_k_m", "redhat-dflash")
    assert any(p.startswith("g4spec convert") for p in r.prepare)
    assert r.commands[0].startswith("llama-server -hf unsloth/gemma-4-31B-it-GGUF:Q4_K_M ")
    assert "CMAKE_CUDA_ARCHITECTURES=86" in r.prepare[0]
    assert "--spec-draft-n-max 7" in r.commands[0] and "-sm layer" in r.commands[0]


# ---- report 2


def test_gb10() -> None:
    r = make("vllm", "GB10", "31b:fp8", "redhat-dflash", c=16384)
    (command,) = r.commands
    assert "--gpu-memory-utilization 0.80" in command and "--quantization fp8" in command
    assert "--max-model-len 16384" in command
    assert "google/gemma-4-31B-it" in command, "quantized while loading, as in the report"
    assert speculative(command)["attention_backend"] == "FLASH_ATTN", "the split of the report"
    assert "--enforce-eager" not in command, "only needed with 0.19"
    assert "drop_caches" in r.prepare[2]


def test_gb10_of_the_report() -> None:
    r = make("vllm", "GB10", "31b:fp8", "redhat-dflash", given=("vllm=0.19.2",))
    titles = " ".join(b[0] for b in r.blocked)
    assert "cannot run a DFlash draft" in titles and "no FP8 kernels" in titles
    plain = make("vllm", "GB10", "31b:awq", None, given=("vllm=0.19.2",))
    assert "--enforce-eager" in plain.commands[0]
    assert "VLLM_DISABLE_COMPILE_CACHE=1" in plain.commands[0]


@pytest.mark.parametrize("nodes", [2, 4])
def test_sparks_over_nodes(nodes: int) -> None:
    r = make("vllm", f"{nodes}x GB10", "31b:fp8", "redhat-dflash")
    assert len(r.commands) == nodes
    for rank, command in enumerate(r.commands):
        assert f"--nnodes {nodes}" in command and f"--node-rank {rank}" in command
        assert ("--headless" in command) == (rank > 0)
        assert "ray" not in command
        assert f"--tensor-parallel-size {nodes}" in command
    assert any("doctor --network" in p for p in r.prepare)
    same = make("vllm", "GB10", "31b:fp8", "redhat-dflash", nodes=nodes)
    assert same.commands == r.commands


def test_sglang_over_nodes() -> None:
    r = make("sglang", "2x GB10", "31b", "zlab")
    assert len(r.commands) == 2
    assert "--dist-init-addr HEAD_IP:25000" in r.commands[1]
    assert "--disable-cuda-graph" in r.commands[0]
    assert "--speculative-draft-attention-backend flashinfer" in r.commands[0]
    assert "--attention-backend triton" in r.commands[0]
    assert "--mem-fraction-static 0.80" in r.commands[0]
    assert not any("--gpu-memory-utilization" in fix for _, _, fix in r.conditions), "vLLM's"


@pytest.mark.parametrize("engine", ["llama.cpp", "g4spec"])
def test_several_nodes_go_to_vllm_or_sglang_only(engine: str) -> None:
    r = make(engine, "2x GB10", "31b", "mtp")
    assert not r.works and not r.commands
    assert any("not for several nodes" in b[0] and "vllm" in b[2] for b in r.blocked)
    assert r.instead.startswith("g4spec recipe vllm")


def test_the_benchmark_of_the_report() -> None:
    r = make("vllm", "GB10", "31b", "redhat-dflash")
    (bench,) = r.bench
    for part in (
        "vllm bench serve",
        "philschmid/mt-bench",
        "--num-prompts 80",
        "--max-concurrency 1",
        "--hf-output-len 2048",
        "--temperature 0",
    ):
        assert part in bench


def test_sglang_is_measured_with_its_own_client() -> None:
    r = make("sglang", "H100", "31b", "zlab")
    (bench,) = r.bench
    words = shlex.split(bench)
    assert words[:3] == ["python", "-m", "sglang.bench_serving"] and "vllm" not in bench
    assert json.loads(words[words.index("--extra-request-body") + 1]) == {"temperature": 0}
    assert "--base-url http://127.0.0.1:30000 " in bench


# ---- report 3


def test_one_3090() -> None:
    r = make("llama.cpp", "RTX 3090 24GB", "31b:q4_k_m", "zlab", c=32768)
    (command,) = r.commands
    for part in (
        "-md draft.gguf",
        "--spec-type draft-dflash",
        "--spec-draft-n-max 15",
        "-np 1",
        "-ngl 99",
        "-fa on",
        "-c 32768",
        "-ctk q8_0",
    ):
        assert part in command
    too_long = make("llama.cpp", "RTX 3090 24GB", "31b:q4_k_m", "zlab", c=131072, kv="f16")
    assert not too_long.works and " -c " in too_long.blocked[0][2]
    vllm = make("vllm", "RTX 3090 24GB", "31b", "zlab")
    other = 'g4spec recipe llama.cpp -m 31b -md zlab --assume "RTX 3090 24GB"'
    assert not vllm.works and vllm.instead == other


def test_hub_ids_are_passed_to_llamacpp_unchanged() -> None:
    given = "unsloth/gemma-4-31B-it-GGUF:Q4_K_M"
    r = make("llama.cpp", "RTX 3090 24GB", given, "mtp", c=8192)
    assert r.commands[0].startswith(f"llama-server -hf {given} ")
    assert not any(p.fact == "flag-lc-target" for p in r.parts)
    assert any("--target google/gemma-4-31B-it" in p for p in r.prepare), "for its tokenizer"


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("redhat-dspark", "draft-dspark"),
        ("redhat-dflash2", "draft-dflash"),
        ("redhat-dflash", "draft-dflash"),
        ("mtp", "draft-mtp"),
    ],
)
def test_llamacpp_has_a_flag_for_each_kind(draft: str, kind: str) -> None:
    r = make("llama.cpp", "RTX 5090", "31b", draft)
    assert r.works and r.version == "b11739" and f"--spec-type {kind}" in r.commands[0]
    assert not any("DSpark" in what for what, _, _ in r.conditions)


def test_our_runtime_on_a_card() -> None:
    r = make("g4spec", "RTX 3090 24GB", "31b:q4_k_m", "zlab", c=8192)
    assert r.works
    assert r.commands[0].startswith("g4spec serve -m unsloth/gemma-4-31B-it-GGUF:Q4_K_M ")
    words = shlex.split(r.commands[0].replace("\\\n", " "))
    assert words[4:] == ["-md", "draft.gguf", "-c", "8192", "--parallel", "1"]
    assert {p.fact for p in r.parts} >= {"flag-g4-draft", "flag-g4-ctx", "flag-g4-parallel"}
    assert all(p.reason for p in r.parts)
    pair = "g4spec bench -m unsloth/gemma-4-31B-it-GGUF:Q4_K_M -md draft.gguf"
    ask, measure = r.bench
    assert measure == f"{pair} -c 8192" and "/v1/chat/completions" in ask
    json.loads(shlex.split(ask)[-1])
    plain = make("g4spec", "RTX 3090 24GB", "31b:q4_k_m", c=8192)
    assert plain.bench[1:] == ["g4spec bench -m unsloth/gemma-4-31B-it-GGUF:Q4_K_M -c 8192"]
    long = make("g4spec", "RTX 3090 24GB", "31b:q4_k_m", "zlab", c=16384)
    assert long.works and "--cache-type q8_0" in long.commands[0]
    assert long.bench[1:] == [f"{pair} -c 16384 --cache-type q8_0"]
    too_long = make("g4spec", "RTX 3090 24GB", "31b:q4_k_m", "zlab", c=131072)
    assert not too_long.works and " -c " in too_long.blocked[0][2]


def test_assumed_versions_are_to_be_checked() -> None:
    """Except versions that an upgrade replaces."""
    given = ["driver=580", "transformers=5.10", "vllm=0.28.1"]
    q = questions.build_question(FACTS, "31b", "zlab", None, None, None, None)
    assert q is not None

    def steps(version: str) -> str:
        given[2] = f"vllm={version}"
        machine = questions.build_machine(FACTS, "2x RTX 3090", given)
        return next(s for s in diagnose(FACTS, machine, q).steps if s.startswith("g4spec recipe"))

    pair = 'g4spec recipe vllm -m 31b -md zlab --assume "2x RTX 3090 24GB" --with driver=580'
    assert steps("0.28.1") == f"{pair} --with transformers=5.10 --with vllm=0.28.1"
    assert steps("0.20.1") == pair
    old = recipe.make(FACTS, questions.build_machine(FACTS, "2x RTX 3090", given), q, "vllm")
    assert not old.works and old.instead.startswith(f"{pair} --with vllm=0.3")
    with pytest.raises(UsageError, match="one of"):
        questions.build_machine(FACTS, None, ["g4spec=9.9"])


def test_a_folder_is_converted_first() -> None:
    tiny = Path(__file__).resolve().parents[2] / "examples" / "tiny"
    q = questions.build_question(
        FACTS, str(tiny / "target"), str(tiny / "dflash"), None, None, None, None
    )
    assert q is not None
    r = recipe.make(FACTS, Machine((), ram=16 << 30), q, "g4spec")
    assert r.prepare[1:3] == [
        f"g4spec convert {shlex.quote(f'{tiny}/target')} -o target.gguf",
        f"g4spec convert {shlex.quote(f'{tiny}/dflash')} --target target.gguf -o draft.gguf",
    ]


# ---- report 4


def test_two_v100() -> None:
    r = make("vllm", "2x V100", "31b", "mtp")
    assert not r.works
    assert "no code for a V100" in r.blocked[0][0] and "1Cat-vLLM" in r.blocked[0][2]
    assert r.instead == 'g4spec recipe llama.cpp -m 31b -md mtp --assume "2x V100 32GB"'
    r = make("llama.cpp", "2x V100", "31b:q4_k_m", "mtp", c=8192)
    assert "CMAKE_CUDA_ARCHITECTURES=70" in r.prepare[0]
    assert any("CUDA 12.9 or older" in p.reason for p in r.parts)
    assert "--spec-type draft-mtp" in r.commands[0]
    assert not make("sglang", "2x V100", "31b", "mtp").works


# ---- lengths


def test_draft_lengths_follow_each_engines_convention() -> None:
    """vLLM: block - 1 for z-lab, 8 of 8 for RedHat; SGLang: the block; llama.cpp: block - 1."""
    zlab = named_models.from_row(FACTS.get(DraftFact, "zlab-31b"), "")
    redhat = named_models.from_row(FACTS.get(DraftFact, "redhat-dflash"), "")
    assert [lengths.full_length(zlab, e) for e in lengths.OPTIONS] == [15, 16, 15]
    assert [lengths.full_length(redhat, e) for e in lengths.OPTIONS] == [8, 0, 7]
    assert lengths.start_length(FACTS, zlab, Situation(engine="sglang", cc=(8, 6))) == 16
    assert lengths.start_length(FACTS, zlab, Situation(engine="vllm", cc=(8, 6))) == 7
    assert lengths.start_length(FACTS, zlab, Situation(engine="vllm", cc=(9, 0))) == 15


@pytest.mark.parametrize(("model", "steps"), [("12b", 4), ("e2b", 2)])
def test_sglang_is_told_steps_for_an_assistant(model: str, steps: int) -> None:
    """It has no defaults for them: without, its draft worker multiplies by None."""
    r = make("sglang", "H100", model, "mtp")
    words = shlex.split(r.commands[0].replace("\\\n", " "))
    given = {w: words[i + 1] for i, w in enumerate(words) if w.startswith("--spec")}
    assert given["--speculative-num-steps"] == str(steps)
    assert given["--speculative-eagle-topk"] == "1"
    assert given["--speculative-num-draft-tokens"] == str(steps + 1)
    assert not any("unknown" in p.text for p in r.parts)


def test_redhats_eagle3_of_the_26b() -> None:
    (command,) = make("vllm", "H100", "26b", "redhat-eagle3").commands
    assert "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3" in command
    assert '"num_speculative_tokens": 3' in command


@pytest.mark.parametrize("draft", ["dflash", "dspark", "dflash2", "eagle3"])
def test_sglang_does_not_read_the_format_of_speculators(draft: str) -> None:
    r = make("sglang", "2x RTX 4090", "31b", f"redhat-{draft}")
    (reason,) = r.blocked
    assert "speculators' format" in reason[0] and not r.unknown


def test_sglang_gets_the_cache_type() -> None:
    """The memory was planned for --kv fp8, and the command started with 16 bits."""
    (command,) = make("sglang", "RTX 5090", "31b", "zlab", kv="fp8", c=8192).commands
    assert "--kv-cache-dtype fp8_e4m3 " in command
    assert "--speculative-draft-kv-cache-dtype bf16 " in command
    (command,) = make("sglang", "H100", "31b", "mtp", kv="fp8").commands
    assert "--kv-cache-dtype fp8_e4m3 " in command and "draft-kv" not in command
    assert "kv-cache-dtype" not in make("sglang", "H100", "31b", "zlab").commands[0]
    assert not make("sglang", "2x RTX 3090", "31b", "zlab", kv="fp8").works


@pytest.mark.parametrize(
    ("draft", "type"),
    [
        ("redhat-dspark", "draft-dspark"),
        ("redhat-dflash2", "draft-dflash"),
        ("zlab-31b", "draft-dflash"),
    ],
)
def test_llama_cpp_gets_the_kind_of_draft(draft: str, type: str) -> None:
    r = make("llama.cpp", "RTX 4090", "31b:q4_k_m", draft, c=8192)
    assert f"--spec-type {type} " in " ".join(r.commands[0].split()) + " "
    assert not any("unknown" in p.text for p in r.parts)


# ---- versions


@pytest.mark.parametrize(
    ("given", "draft", "inside", "outside"),
    [
        ("vllm=0.26.0", "zlab", [], ["VLLM_USE_V2_MODEL_RUNNER"]),
        ("vllm=0.29.0", "redhat-dflash2", [], ["VLLM_USE_V2_MODEL_RUNNER"]),
        ("vllm=0.22.1", "redhat-dflash", [], ["attention_backend"]),
        ("vllm=0.28.0", "redhat-dflash", ["attention_backend"], []),
    ],
)
def test_flags_follow_the_version(
    given: str, draft: str, inside: list[str], outside: list[str]
) -> None:
    r = make("vllm", "2x RTX 4090", "31b", draft, given=(given,))
    text = r.commands[0]
    assert all(part in text for part in inside)
    assert not any(part in text for part in outside)


def test_fp8_cache_with_a_draft_gets_its_key() -> None:
    r = make("vllm", "2x RTX 4090", "31b", "redhat-dflash", kv="fp8")
    assert "--kv-cache-dtype fp8" in r.commands[0]
    assert speculative(r.commands[0])["kv_cache_dtype"] == "bfloat16"


# ---- every pair on every card

some_cards = pytest.mark.parametrize(
    "cards", [CARDS[::4], pytest.param(CARDS, marks=pytest.mark.slow)], ids=["a quarter", "all"]
)


@some_cards
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_checkpoint_has_the_format_of_the_memory_estimate(
    engine: str, cards: list[CardFact]
) -> None:
    """A BF16 checkpoint must not be served if the memory estimate assumed a smaller format."""
    for card in cards:
        for size in FACTS.all(SizeFact):
            for n in ("", "2x "):
                r = make(engine, n + card.name, size.id, None)
                m = questions.build_machine(FACTS, n + card.name, ())
                q = questions.build_question(FACTS, size.id, None, None, None, None, None)
                assert q is not None
                option = engines.judge(FACTS, m, q, engine).option
                if r.works and r.model == size.hub:
                    assert option is not None
                    assert option.format == "BF16" or "--quantization fp8" in r.commands[0]


def test_an_unnamed_checkpoint_is_requested() -> None:
    r = make("vllm", "2x RTX 3090", "31b:awq", "mtp")
    assert "YOUR_31B_AWQ_CHECKPOINT" in r.commands[0]
    assert any("put yours" in u for u in r.unknown)
    r = make("vllm", "2x RTX 3090", "someone/gemma-4-31B-it-AWQ", "mtp")
    assert "vllm serve someone/gemma-4-31B-it-AWQ" in r.commands[0]


@some_cards
@pytest.mark.parametrize("engine", engines.NAMES)
def test_every_flag_has_a_reason(engine: str, cards: list[CardFact]) -> None:
    for card in cards:
        for size in FACTS.all(SizeFact):
            draft = next((d.id for d in FACTS.all(DraftFact) if d.model == size.id), None)
            r = make(engine, card.name, size.id, draft)
            assert r.works != bool(r.blocked), (card.name, size.id)
            for p in r.parts:
                flag = FACTS.get(FlagFact, p.fact)
                assert p.reason and flag.source and flag.date
                assert "{" not in p.text.replace("{rank}", "").replace('{"', ""), p.text
            for command in r.commands:
                assert shlex.split(command)
                assert "{" not in command.replace('{"', "").replace('{"method"', "").replace(
                    '{"model"', ""
                ), command


# ---- the command


def run_recipe(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = run(["recipe", *args])
    return code, capsys.readouterr().out


def test_output_is_commands_with_comments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out = run_recipe(
        capsys, "vllm", "--assume", "2x RTX 3090", "-m", "31b", "-md", "redhat-dflash"
    )
    assert code == 0
    script = tmp_path / "all.sh"
    script.write_text(out)
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert "[flag-spec-n]" in out and "(vLLM >=0.24)" in out


def test_output_says_for_which_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag has the versions that it holds for, or says that they are unknown."""
    pair = ("vllm", "-m", "31b", "-md", "zlab-dflash", "--assume", "2x RTX 3090")
    _, text = run_recipe(capsys, *pair, "--with", "vllm=0.33.0")
    assert "\n# Why (for vLLM 0.33.0; " in text
    _, limited = run_recipe(capsys, *pair, "--with", "vllm=0.33.0", "--json")
    assert "(vLLM >=0.33)" in text  # of transformers, which is installed first
    for flag in json.loads(limited)["flags"]:
        if flag["part"] == "image":
            continue
        line = next(s for s in text.splitlines() if s.endswith(f" [{flag['fact']}]"))
        said = {"any": "any version", "unknown": "versions unknown"}
        assert f" ({said.get(flag['versions'], 'vLLM ' + flag['versions'])}) " in line


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("-m", "31b", "-md", "mtp")
    assert run_recipe(capsys, "vllm", "--assume", "2x V100", *pair)[0] == 1
    assert run_recipe(capsys, "ollama", "--assume", "RTX 3090", *pair)[0] == 2
    assert run_recipe(capsys, "vllm", "--assume", "RTX 3090")[0] == 2
    assert run_recipe(capsys, "vllm", "--assume", "2x GB10", "--nodes", "3", *pair)[0] == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_recipe(
        capsys, "vllm", "--assume", "2x GB10", "-m", "31b", "-md", "mtp", "--json"
    )
    got = json.loads(out)
    assert code == 0 and len(got["commands"]) == 2
    assert all(f["reason"] and f["fact"] for f in got["flags"])


@pytest.mark.parametrize(
    ("machine", "install"),
    [
        ("RTX 3090", "pip install '.[cuda,serve]'"),
        (
            "CPU 64GB",
            "pip install torch --index-url https://download.pytorch.org/whl/cpu && "
            "pip install '.[serve]'",
        ),
    ],
)
def test_g4spec_is_installed_for_the_machine(
    machine: str, install: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run_recipe(capsys, "g4spec", "--assume", machine, "-m", "e4b")
    assert code == 0 and out.count("source folder: ") == 1
    assert f"source folder: {install}\n" in out


def test_compose(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_recipe(
        capsys, "vllm", "--assume", "2x RTX 3090", "-m", "31b", "-md", "redhat-dflash", "--compose"
    )
    assert code == 0
    assert "image: vllm/vllm-openai:v0.33.0" in out
    assert 'NCCL_P2P_DISABLE: "1"' in out
    words = [
        json.loads(line.strip()[2:]) for line in out.splitlines() if line.strip().startswith('- "')
    ]
    assert words[0] == "Intel/gemma-4-31B-it-int4-AutoRound"
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens"] == 8
    limits = json.loads(words[words.index("--limit-mm-per-prompt") + 1])
    assert limits == {"image": 0, "video": 0, "audio": 0}


def test_reasons_of_a_llamacpp_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """The build needs a clone of llama.cpp; the draft length says where it comes from."""
    args = ("llama.cpp", "--assume", "RTX 4060 Ti 16GB", "-m", "12b", "-md", "mtp")
    code, out = run_recipe(capsys, *args)
    assert code == 0 and "all versions" not in out
    assert "\n# once, in a clone of llama.cpp" in out
    assert "\n#   cmake: builds llama-server for this GPU" in out
    assert "--spec-draft-n-max 4: 4 for code, 4 for chat, 1 with 4 to 8 requests;" in out
    code, out = run_recipe(capsys, *args, "--compose")
    assert code == 0 and out.startswith("# First, in this folder:\n#   hf download google/")
    assert "#   g4spec convert draft" in out and "cmake" not in out


def test_compose_keeps_dollars_of_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compose replaces `$HOME` by a variable unless the dollar is doubled."""
    tiny.target(tmp_path / "m$HOME")
    monkeypatch.chdir(tmp_path)
    code, out = run_recipe(capsys, "vllm", "--assume", "h200", "-m", "./m$HOME", "--compose")
    assert code == 0 and "m$$HOME" in out and "m$HOME" not in out.replace("$$", "")


def test_compose_finds_files_in_the_current_folder_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.target(tmp_path / "in" / "m")
    monkeypatch.chdir(tmp_path / "in")
    args = ("vllm", "--assume", "h200", "-m")
    code, out = run_recipe(capsys, *args, "m", "--compose")
    assert code == 0 and "working_dir: /models" in out
    for path in (str(tmp_path / "in" / "m"), "../in/m"):
        assert cli.run(["recipe", *args, path, "--compose"]) == UsageError.exit_code
        assert "the current folder only" in capsys.readouterr().err
        code, _ = run_recipe(capsys, *args, path, "-o", str(tmp_path / "out"))
        assert code == 0 and not (tmp_path / "out" / "compose.yaml").exists()


def test_a_tilde_is_expanded_in_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quoted ~ means nothing to the programs that the recipe runs."""
    tiny.target(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out = run_recipe(capsys, "vllm", "--assume", "h200", "-m", "~/m")
    assert code == 0 and f"vllm serve {tmp_path}/m" in out and "~" not in out


@pytest.mark.parametrize("inside", [True, False])
def test_written_files_find_the_models(
    inside: bool,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files' paths are those of the current folder, and compose's those of its own."""
    here = tmp_path / "here"
    tiny.target(here / "m")
    monkeypatch.chdir(here)
    out = here / "a" / "b" if inside else tmp_path / "out"
    code, _ = run_recipe(capsys, "vllm", "--assume", "h200", "-m", "m", "-o", str(out))
    text = (out / "compose.yaml").read_text()
    mounted = next(line for line in text.splitlines() if line.endswith(":/models"))
    assert code == 0 and (out / mounted.split()[1].split(":")[0]).samefile(here)
    monkeypatch.chdir("/")
    script = (out / "start.sh").read_text().replace("vllm serve", "ls -d").partition(" \\\n")[0]
    done = subprocess.run(
        ["sh", "-c", script, str(out / "start.sh")], check=True, capture_output=True
    )
    assert done.stdout == b"m\n"


def test_a_refused_compose_file_writes_no_scripts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ("g4spec", "--assume", "h200", "-m", "31b", "--compose", "-o", str(tmp_path / "out"))
    assert run_recipe(capsys, *args)[0] == UsageError.exit_code
    assert not (tmp_path / "out").exists()


def test_a_folder_has_the_scripts_of_one_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Files of an earlier one would start another engine. Files of others stay."""
    asked = ("-m", "31b", "--assume", "2x GB10", "-o", str(tmp_path))
    (tmp_path / "start-here.sh").write_text("mine")
    (tmp_path / "compose.yaml").write_text("mine")
    assert run_recipe(capsys, "vllm", *asked, "--nodes", "2")[0] == 0
    assert run_recipe(capsys, "llama.cpp", "-m", "31b", "--assume", "h200", "-o", str(tmp_path))[0]
    (tmp_path / "compose.yaml").unlink()
    for engine, stale in (
        ("llama.cpp", ["start-node0.sh", "start-node1.sh"]),
        ("g4spec", ["compose.yaml"]),
    ):
        args = ("-m", "31b:q4_k_m", "--assume", "h200", "-o", str(tmp_path))
        assert run(["recipe", engine, *args]) == 0
        notes = "".join(capsys.readouterr().err.split())
        assert notes.count("removed") == len(stale)
        assert all(f"removed{tmp_path / name}," in notes for name in stale)
        assert (tmp_path / "compose.yaml").exists() == (engine == "llama.cpp")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"prepare.sh", "start.sh", "bench.sh", "start-here.sh"}


def test_compose_without_a_known_image() -> None:
    m = questions.build_machine(FACTS, "V100", ())
    q = questions.build_question(FACTS, "12b:q8_0", "mtp", 8192, None, None, None)
    assert q is not None
    result = recipe.make(FACTS, m, q, "llama.cpp")
    with pytest.raises(UsageError, match="no published image"):
        scripts.compose(result, m)
    m = questions.build_machine(FACTS, "2x GB10", ())
    q = questions.build_question(FACTS, "12b", "mtp", 8192, None, None, None)
    assert q is not None
    with pytest.raises(UsageError, match="one node"):
        scripts.compose(recipe.make(FACTS, m, q, "vllm"), m)


def test_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run_recipe(
        capsys,
        "vllm",
        "--assume",
        "2x GB10",
        "-m",
        "31b",
        "-md",
        "mtp",
        "-o",
        str(tmp_path / "out"),
    )
    assert code == 0
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["bench.sh", "prepare.sh", "start-node0.sh", "start-node1.sh"]
    for path in (tmp_path / "out").iterdir():
        subprocess.run(["sh", "-n", str(path)], check=True)


@pytest.mark.parametrize("name", ["start.sh", "bench.sh", "compose.yaml"])
def test_only_scripts_of_g4spec_are_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["vllm", "--assume", "H100", "-m", "31b", "-md", "mtp", "-o", str(tmp_path)]
    assert run(["recipe", *line]) == 0 and run(["recipe", *line]) == 0
    written = {path: path.read_text() for path in tmp_path.iterdir()}
    capsys.readouterr()
    for path in written:
        path.write_text("#!/bin/sh\necho mine\n") if path.name == name else path.unlink()
    assert run(["recipe", *line]) == 2
    assert f"{name} exists and is not a script of g4spec" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["#!/bin/sh\necho mine\n"]
    (tmp_path / name).unlink()
    assert run(["recipe", *line]) == 0
    assert written == {path: path.read_text() for path in tmp_path.iterdir()}


def test_our_own_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """This version accepts every `g4spec ...` command of a recipe or a fix."""
    commands = typer.main.get_command(cli.app()).commands  # type: ignore[attr-defined]
    for flag in FACTS.all(FlagFact):
        if not flag.text.startswith("g4spec "):
            continue
        words = shlex.split(flag.text)
        options = {o for p in commands[words[1]].params for o in p.opts}
        used = {w for w in words[2:] if w.startswith("-")}
        assert used <= options, (flag.text, used - options)
    for engine, start in recipe.SERVER.items():
        if engine == "g4spec":
            assert start.split()[1] in commands
