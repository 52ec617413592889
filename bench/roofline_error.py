"""Compares predictions of `quire roofline` with the records of an H200, and prints the errors.

python bench/roofline_error.py
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.bench.cases import TTFT, parse_case
from quire.bench.record import BenchRecord, read_jsonl
from quire.bench.roofline import Roofline
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError

HERE = Path(__file__).parent
RECORDS = HERE / "results" / "h200_throughput.jsonl"
_LEFT_OUT = ("nano-penalized", "nano-logprobs")
"""Cases whose sampling costs more than the model knows."""


@dataclass(frozen=True)
class Row:
    """One figure. `quantization`: "" in 16 bits."""

    model: str
    quantization: str
    case: str
    measured: float
    predicted: float

    @property
    def percent(self) -> float:
        return 100.0 * (self.predicted / self.measured - 1.0)


def rows() -> Iterator[Row]:
    """Yields one row for each case and metric of the newest record of its kind.

    Models that `quire roofline` refuses (experts, recurrent layers) have none.
    """
    newest: dict[tuple[str, str, str], BenchRecord] = {}
    for record in read_jsonl(RECORDS):
        if record.case in _LEFT_OUT or record.settings.get("deterministic"):
            continue
        kind = record.model, str(record.settings.get("quantization") or ""), record.case
        newest[kind] = record
    rooflines: dict[tuple[str, str], Roofline | None] = {}
    for (model, quantization, name), record in sorted(newest.items()):
        if (model, quantization) not in rooflines:
            rooflines[model, quantization] = roofline(model, quantization)
        predictor = rooflines[model, quantization]
        if predictor is None:
            continue
        case = parse_case(name)
        for found in predictor.case(case):
            metric = f"{found.case.replace(' ', '_')}_ms" if case is TTFT else "output_tok_s"
            value = found.first_token_seconds * 1e3 if case is TTFT else found.output_tok_s
            yield Row(model, quantization, found.case, record.metrics[metric], value)


def roofline(model: str, quantization: str) -> Roofline | None:
    """Returns the model's roofline, or None where `quire roofline` refuses the model."""
    args = EngineArgs(
        model=str(HERE / "configs" / model),
        dtype="bfloat16",
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization=quantization or None,
    )
    config = resolve(args)
    try:
        return Roofline(config, "h200")
    except ConfigError as error:
        if error.param != "model":
            raise
        return None


def mean_error(found: list[Row]) -> float:
    """Returns the mean of the errors' sizes, in percent."""
    return statistics.mean(abs(row.percent) for row in found)


def main() -> None:
    found = list(rows())
    print("| model | case | measured | predicted | error |")
    print("| --- | --- | --- | --- | --- |")
    for row in found:
        name = f"{row.model} {row.quantization}".strip()
        print(
            f"| {name} | {row.case} | {row.measured:,.4g} | {row.predicted:,.4g} "
            f"| {row.percent:+.0f} % |"
        )
    plain = [row for row in found if not row.quantization]
    quantized = [row for row in found if row.quantization]
    print(
        f"\nMean error: {mean_error(plain):.1f} % of {len(plain)} figures in 16 bits, "
        f"{mean_error(quantized):.1f} % of {len(quantized)} quantized"
    )


if __name__ == "__main__":
    main()
