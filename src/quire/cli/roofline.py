"""`quire roofline`: predicted times and memory of a model on a card, and how far they are off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.cli.help import AsJson, ModelOptions, with_options
from quire.cli.info import config_alone
from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError
from quire.llm import LLM
from quire.models import load_config, spec_from_config
from quire.system import stored_weights
from quire.tools.bench.cases import Case, parse_case
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.record import card_name, number
from quire.tools.bench.throughput import QuireEngine
from quire.tools.profile import kernel_kinds
from quire.tools.roofline.residual import MeasuredCase, residuals, run_case
from quire.tools.roofline.roofline import CPU, MAX_REQUESTS, MAX_TOKENS, Prediction, Roofline

_DEFAULT_CASES = ("b1", "b64", "ttft")
_FIGURES = {
    "output_tok_s": ("output_tok_s", 1.0, "tok/s"),
    "decode_seconds": ("decode_step_ms", 1e3, "ms of a decode step"),
    "first_token_seconds": ("first_token_ms", 1e3, "ms to the first token"),
    "weight_bytes": ("weights_gb", 1e-9, "GB of weights"),
    "kv_bytes": ("kv_gb", 1e-9, "GB of KV"),
}
"""Maps figures to their names in the output, what they are multiplied by, and their names there in
words."""


@with_options(ModelOptions)
def roofline(
    *,
    model: ModelOptions,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="b1, b64, nano, ttft, or requests x prompt x output tokens, as in 64x512x1024. "
            "May be repeated. Default: b1, b64 and ttft."
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="h200, h100, b200, a100, l40s, l4, or cpu: this machine's, whose ceilings are "
            "measured. Default: h200; with --device cpu, cpu.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run",
            help="Also run the cases on this machine, with random weights if there is no "
            "checkpoint, and show the error of the prediction. Default: on if the GPU is the card.",
            show_default=False,
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Run, and compare the times of kinds of kernels as well."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or cuda:N.")] = "auto",
    json: AsJson = False,
) -> None:
    """Prints predictions, then what was measured, if the cases are run.

    Args:
        card: None is an H200, or this CPU if `device` is one.
        run: None runs the cases where the device is the card.
        kernels: profile them as well, and compare kinds of kernels.

    Raises:
        ConfigError: see `Roofline` and its `case`; or the cases are to be run, and cannot be.
    """
    cases = [parse_case(name) for name in case or _DEFAULT_CASES]
    engine = model.engine()
    config = config_alone(engine)
    card = card or (CPU if device == CPU else "h200")
    if engine.dtype == "auto" and card != CPU:
        # A GPU computes in the checkpoint's.
        config = replace(config, dtype=_stored_dtype(config))
    line = Roofline(config, card)
    device = ("cpu" if card == CPU else "cuda") if device == "auto" else device
    missing = _missing(line, device)
    if (run or kernels) and missing:
        raise ConfigError(f"cannot run: {missing}. --no-run predicts only", "run")
    predicted = {case.name: line.case(case) for case in cases}
    found = {each.case: described(each, line) for group in predicted.values() for each in group}
    heading = {
        "model": config.model_name, "card": line.card.name, "dtype": config.dtype,
        "ceilings": line.limits.described(), "tensor_parallel_size": line.world,
        "predictions": list(found.values()),
    }  # fmt: skip
    if not json:
        _print(heading)
    if run or kernels or (run is None and not missing and card != CPU):
        fitting = [
            case for case in cases if all(found[p.case]["fits"] for p in predicted[case.name])
        ]
        by_case = {each.case: each for group in predicted.values() for each in group}
        for name, more in _run(config, device, fitting, by_case, kernels=kernels):
            found[name] |= more
        if not json:
            _print_residuals(heading)
    if json:
        typer.echo(dumps(heading, indent=2))


def _stored_dtype(config: EngineConfig) -> str:
    return str(spec_from_config(load_config(config.model_path)).dtype).removeprefix("torch.")


def _missing(line: Roofline, device: str) -> str | None:
    """Returns what keeps the cases from being run as they are predicted; None if nothing does."""
    if device == "cpu":
        return None if line.card.name == card_name("cpu") else f"a CPU is not a {line.card.name}"
    if not torch.cuda.is_available():
        return f"there is no GPU here, and {line.card.name} is predicted"
    if torch.cuda.device_count() < line.world:
        return f"{line.world} GPUs are predicted, and {torch.cuda.device_count()} are here"
    here = card_name(device)
    return None if here == line.card.name else f"{line.card.name} is predicted, and {here} is here"


def _run(
    config: EngineConfig,
    device: str,
    cases: Sequence[Case],
    predicted: Mapping[str, Prediction],
    *,
    kernels: bool,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the cases. Yields (name, what its description says from now on) of each prediction."""
    if not cases:
        return
    with _engine(config, device) as engine:
        meter = GpuMeter.of_engine(engine.config.args, engine.config.device)
        for case in cases:
            typer.echo(f"running {case.name} ...", err=True)
            for measured in run_case(engine, case, meter):
                own = predicted[measured.case]
                yield own.case, compared(own, measured)
                if kernels:
                    times = kernel_kinds.measured_kinds(engine, own.case)
                    kinds = kernel_kinds.compared(kernel_kinds.predicted_kinds(own), times)
                    yield own.case, {"measured_kinds": kinds}


@contextlib.contextmanager
def _engine(config: EngineConfig, device: str) -> Iterator[QuireEngine]:
    """Yields an engine that plans steps as the prediction has it.

    Raises:
        ConfigError: the device's memory does not suffice.
    """
    folder = Path(config.model_path)
    stored = bool(stored_weights(folder))
    settings: dict[str, Any] = {
        "load_format": "auto" if stored else "dummy", "device": device,
        "dtype": config.dtype, "quantization": config.args.quantization,
        "tensor_parallel_size": config.args.tensor_parallel_size, "skip_tokenizer_init": True,
        "enable_prefix_caching": False, "max_num_seqs": MAX_REQUESTS,
        "max_num_batched_tokens": MAX_TOKENS,
    }  # fmt: skip
    typer.echo(f"starting with {'the checkpoint' if stored else 'random weights'} ...", err=True)
    try:
        llm = LLM(str(folder), **settings)
        try:
            yield QuireEngine(llm, None)
        finally:
            llm.shutdown()
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the device's memory does not suffice to run: {error}", "run") from None


def described(found: Prediction, line: Roofline) -> dict[str, Any]:
    memory = found.weight_bytes + found.kv_bytes
    return {
        "case": found.case,
        **_figures(found),
        "seconds": found.seconds,
        "steps": found.steps,
        "fits": memory <= line.card.memory * EngineArgs.gpu_memory_utilization,
        "kinds": {
            name: {
                "ms": kind.seconds * 1e3,
                "percent": 100.0 * kind.seconds / found.seconds,
                "bound": kind.bound,
            }
            for name, kind in found.kinds.items()
        },
    }


def compared(predicted: Prediction, found: MeasuredCase) -> dict[str, Any]:
    """Returns what the description of a case says once it was run."""
    off = residuals(predicted, found)
    return {
        "measured": {**_figures(found), "seconds": found.seconds, **found.gpus},
        "residual_percent": {_FIGURES[name][0]: value for name, value in off.items()},
    }


def _figures(of: Prediction | MeasuredCase) -> dict[str, float | None]:
    values = {name: getattr(of, name) for name in _FIGURES}
    return {
        name: None if values[key] is None else values[key] * factor
        for key, (name, factor, _) in _FIGURES.items()
    }


def _print_residuals(heading: dict[str, Any]) -> None:
    table = Table("case", "figure", box=None, padding=(0, 2))
    for name in ("predicted", "measured", "residual"):
        table.add_column(name, justify="right")
    for found in heading["predictions"]:
        if "measured" not in found:
            table.add_row(found["case"], "not run: does not fit", "", "", "")
            continue
        measured, percent = found["measured"], found["residual_percent"]
        for name, _, words in _FIGURES.values():
            if name in percent:
                values = number(found[name]), number(measured[name]), f"{percent[name]:+.1f} %"
                table.add_row(found["case"], words, *values)
        for name, words in (("gpu_watts", "W"), ("joules_per_token", "J per token")):
            if name in measured:
                table.add_row(found["case"], words, "", number(measured[name]), "")
        for name, line in found.get("measured_kinds", {}).items():
            off = line.get("residual_percent")
            last = "" if off is None else f"{off:+.1f} %"
            both = number(line["predicted_ms"]), number(line["measured_ms"])
            table.add_row(found["case"], f"ms in all: {name}", *both, last)
    console = Console(highlight=False)
    console.print()
    console.print(table)


def _print(heading: dict[str, Any]) -> None:
    console = Console(highlight=False)
    limits = heading["ceilings"]
    console.print(
        Text(
            f"{heading['model']} in {heading['dtype']} on {heading['tensor_parallel_size']} x "
            f"{heading['card']}: {limits['memory_tb_s']:g} TB/s, "
            f"{limits['matmul_tflop_s']:g} TFLOP/s, {limits['origin']}"
        )
    )
    for found in heading["predictions"]:
        decode = found["decode_step_ms"]
        console.print(
            Text(
                f"\n{found['case']}: {number(found['output_tok_s'])} tok/s, first token "
                f"{number(found['first_token_ms'])} ms"
                + ("" if decode is None else f", decode step {number(decode)} ms")
                + f"; weights {found['weights_gb']:.2f} GB, KV {found['kv_gb']:.2f} GB"
                + ("" if found["fits"] else ", which do not fit: requests would wait for room")
            )
        )
        table = Table.grid(padding=(0, 2))
        kinds = sorted(found["kinds"].items(), key=lambda item: -item[1]["ms"])
        for name, kind in kinds:
            table.add_row(
                f"  {name}",
                Text(f"{number(kind['ms'])} ms", justify="right"),
                Text(f"{kind['percent']:.0f} %", justify="right"),
                kind["bound"],
            )
        console.print(table)
