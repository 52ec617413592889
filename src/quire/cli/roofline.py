"""`quire roofline`: predicted times and memory of a model on a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from quire.bench.cases import parse_case
from quire.bench.record import number
from quire.cli.info import config_alone
from quire.config import EngineArgs

if TYPE_CHECKING:
    from quire.bench.roofline import Prediction, Roofline

_DEFAULT_CASES = ("b1", "b64", "ttft")


def roofline(engine: EngineArgs, card: str, names: Sequence[str] | None, *, as_json: bool) -> None:
    """Prints predictions. Reads configuration only.

    Raises:
        ConfigError: see `Roofline` and its `case`.
    """
    from quire.bench.roofline import Roofline
    from quire.models import load_config, spec_from_config

    cases = [parse_case(name) for name in names or _DEFAULT_CASES]
    config = config_alone(engine)
    if engine.dtype == "auto":
        # A GPU computes in the checkpoint's.
        spec = spec_from_config(load_config(config.model_path))
        config = replace(config, dtype=str(spec.dtype).removeprefix("torch."))
    line = Roofline(config, card)
    found = [described(each, line) for case in cases for each in line.case(case)]
    heading = {
        "model": config.model_name, "card": line.card.name, "dtype": config.dtype,
        "ceilings": line.limits.described(), "tensor_parallel_size": line.world,
        "predictions": found,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(heading, indent=2))
    else:
        _print(heading)


def described(found: Prediction, line: Roofline) -> dict[str, Any]:
    decode = found.decode_seconds
    memory = found.weight_bytes + found.kv_bytes
    return {
        "case": found.case,
        "output_tok_s": found.output_tok_s,
        "decode_step_ms": None if decode is None else decode * 1e3,
        "first_token_ms": found.first_token_seconds * 1e3,
        "seconds": found.seconds,
        "steps": found.steps,
        "weights_gb": found.weight_bytes / 1e9,
        "kv_gb": found.kv_bytes / 1e9,
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


def _print(heading: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
