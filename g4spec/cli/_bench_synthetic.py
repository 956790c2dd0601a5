"""`bench --synthetic`: time a published model shape with random weights, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from g4spec.cli import _bench_results, _engine, _option_checks, _signals
from g4spec.cli._os_errors import check_working_folder
from g4spec.cli._output_files import prepare
from g4spec.cli.render import Output
from g4spec.errors import EnvironmentProblem, UsageError

Size = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Time random weights of a published shape on the GPU instead of a file: 31b, 26b, "
        "12b, e4b or e2b. Draft: -md dflash (default where one is published) or -md assistant.",
    ),
]
Type = Annotated[
    str,
    typer.Option(
        "--type",
        help="With --synthetic: quant type of the target's weights, any that can be read.",
    ),
]
Accepted = Annotated[
    int, typer.Option("--accept-length", help="With --synthetic: tokens committed per cycle.")
]

SYNTHETIC_ONLY = {"mix", "accepted"}
ALLOWED = SYNTHETIC_ONLY | {
    "synthetic",
    "draft",
    "ctx_size",
    "device",
    "cache_type",
    "threads",
    "save",
    "json",
    "quiet",
}


def check_options(context: typer.Context, synthetic: str | None) -> str | None:
    """Return the size given to --synthetic.

    Raises:
        UsageError: for options of `bench` that --synthetic ignores, or that need --synthetic.
    """
    for name, flag in _option_checks.given_flags(context).items():
        if synthetic and name not in ALLOWED:
            raise UsageError(f"{flag} has no effect with --synthetic", fix="leave one of them out")
        if not synthetic and name in SYNTHETIC_ONLY:
            raise UsageError(f"{flag} needs --synthetic", fix="leave it out")
    return synthetic


def run(
    name: str,
    type: str,
    draft: str | None,
    accept_length: int,
    setup: _engine.Setup,
    out: Output,
    save: Path | None,
) -> None:
    """Measure and show; also times the context length of `setup`."""
    check_working_folder()
    from g4spec.measure import synthetic_bench
    from g4spec.runtime import devices

    n_ctx, device = setup.n_ctx, setup.device
    if device == "cpu":
        raise UsageError("--synthetic measures a GPU", fix="leave out --device cpu")
    contexts = tuple(sorted({*synthetic_bench.CONTEXTS, *([n_ctx] if n_ctx else [])}))
    name = "26b-a4b" if name == "26b" else name
    config = synthetic_bench.SyntheticConfig(
        type, draft=draft, contexts=contexts, accept_length=accept_length
    )
    synthetic_bench.check_config(name, config)
    prepare(save)
    try:
        backend: Any = devices.select("cuda" if device == "auto" else device, setup.cache_type)
    except devices.NoGpu as missing:
        raise EnvironmentProblem(
            f"--synthetic needs an NVIDIA GPU: {missing.reason}", fix="see `g4spec doctor`"
        ) from None
    with _signals.noted(out, "nothing was measured"):
        data = synthetic_bench.measure(name, backend, config)
    _bench_results.write_files(data, out, save, None)
    _show(data, out)
    out.result(data)


def _show(data: dict[str, Any], out: Output) -> None:
    out.line(f"SYNTHETIC: {data['label']}", "bold")
    columns = (
        "context",
        "prefill/s",
        "1 row ms",
        "4 rows",
        "8 rows",
        "16 rows",
        "draft ms",
        "cycle ms",
        "sustained",
        "tokens/s",
    )
    keys = (
        "context",
        "prefill_tokens_per_second",
        "step_1_ms",
        "step_4_ms",
        "step_8_ms",
        "step_16_ms",
        "draft_ms",
        "cycle_ms",
        "sustained_ms",
        "tokens_per_second",
    )
    rows = [tuple(f"{row[key]:g}" for key in keys) for row in data["rows"]]
    out.table(
        f"{data['model']}, {data['type']}, with {data['draft']}, on {data['device']}", columns, rows
    )
    read = data["read_bytes_per_second"]
    out.line(
        f"Weights: {data['weight_bytes'] / 1e9:.2f} GB; a step of one row reads "
        f"{data['step_bytes'] / 1e9:.2f}, at {data['fraction_of_bandwidth']:.0%} of the "
        f"{read / 1e12:.2f} TB/s measured here."
    )
    out.line(
        'Times are of a rested GPU. "sustained" is after one second of cycles, when power may '
        "limit the clock; tokens/s are computed from it."
    )
    out.line(
        f"Each cycle commits {data['accept_length']} tokens: this is --accept-length, not measured."
    )
    for name in data["ops_without_kernel"]:
        out.note(f"ran as torch ops on the GPU, slower than a kernel: {name}")
