"""Options of `doctor` and `recipe` that describe the pair and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli._options import T
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.advisor.format_choice import Question
    from g4spec.advisor.machine import Machine

Model = Annotated[
    T,
    typer.Option(
        "-m",
        "--model",
        "-hf",
        "--hf-repo",
        metavar="MODEL",
        help="Target: a GGUF file, a checkpoint folder, a hub id (org/name:Q4_K_M), or a size "
        "(31b, 26b, 12b, e4b, e2b) with an optional quant type (31b:q4_k_m).",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        "--draft",
        "-hfd",
        "--hf-repo-draft",
        metavar="DRAFT",
        help="Draft: a file, a folder, a hub id, ngram, or a published draft: mtp (every size); "
        "zlab-dflash (31b, 26b); redhat-dflash, redhat-dspark, redhat-dflash2, redhat-eagle3 "
        "(31b); deepseek-dspark, deepseek-dflash, deepseek-eagle3 (12b).",
    ),
]
Context = Annotated[
    int | None, typer.Option("-c", "--ctx-size", min=256, help="Context length in tokens.")
]
Assume = Annotated[
    str | None,
    typer.Option(
        help='Assume another machine: "2x RTX 3090", "V100 16GB", "4x GB10", "sm_86 24GB".'
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="NAME=VERSION",
        help="Assume this version: vllm=0.19.2, llama.cpp=b9831, transformers=5.15, "
        "driver=580. May be repeated.",
    ),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs to use in total. Default: all.")]
GpuLayers = Annotated[
    int | None,
    typer.Option(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        min=1,
        help="llama.cpp only: layers on the GPU, output included; others stay in RAM. "
        "Default: all.",
    ),
]
CpuMoe = Annotated[
    int | None,
    typer.Option(
        "-ncmoe",
        "--n-cpu-moe",
        min=1,
        help="llama.cpp only: number of layers whose experts stay in RAM (26b). Default: 0.",
    ),
]
Kv = Annotated[
    str | None,
    typer.Option("--kv", "--cache-type", help="KV cache type: f16, q8_0, q4_0, bf16, fp8, ..."),
]


def check_gpus(gpus: int | None, machine: Machine) -> None:
    """Raise UsageError for more GPUs than the machine has."""
    if gpus is not None and gpus > machine.total_gpus:
        raise UsageError(
            "--gpus", expected=f"at most {machine.total_gpus}, the number of GPUs", found=gpus
        )


def check_split(question: Question | None, machine: Machine) -> None:
    """Raise UsageError for layers in RAM without a GPU that the others could be on."""
    if question is not None and question.split and not machine.gpus:
        raise UsageError(
            f"{question.split.flags.strip()}: no NVIDIA GPU, so all layers are in RAM anyway",
            fix="leave it out, or name a GPU with --assume",
        )
