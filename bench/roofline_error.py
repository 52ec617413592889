"""Compares predictions of `quire roofline` with the records of an H200, and prints the errors.

python bench/roofline_error.py
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.tools.bench.cases import TTFT, parse_case
from quire.tools.bench.record import BenchRecord, read_jsonl
from quire.tools.roofline.roofline import Roofline

HERE = Path(__file__).parent
RECORDS = (
    HERE / "results" / "h200_throughput.jsonl",
    HERE / "results" / "two_gpus" / "h200.jsonl",
    HERE / "results" / "scaling" / "h200.jsonl",
)
_LEFT_OUT = ("nano-penalized", "nano-logprobs")
"""Cases whose sampling costs more than the model knows."""
_MOST_IDLE = 5.0
"""Percent of a run in which the device may have waited for the host. The model knows no host."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        quantization: the setting, or "".
        plain: whether weights have 16 bits.
        ranks: number of ranks of tensor parallelism.
    """

    model: str
    quantization: str
    plain: bool
    ranks: int
    case: str
    measured: float
    predicted: float

    @property
    def percent(self) -> float:
        return 100.0 * (self.predicted / self.measured - 1.0)


def rows() -> Iterator[Row]:
    """Yields one row for each case and metric of the newest record of its kind."""
    newest: dict[tuple[str, str, int, str], BenchRecord] = {}
    records = [record for path in RECORDS for record in read_jsonl(path)]
    for record in sorted(records, key=lambda record: record.date):
        settings = record.settings
        if record.case in _LEFT_OUT or settings.get("deterministic"):
            continue
        if record.metrics.get("cpu_overhead_percent", 0.0) > _MOST_IDLE:
            continue
        # Stages are not predicted.
        if int(settings.get("pipeline_parallel_size") or 1) > 1:
            continue
        ranks = int(settings.get("tensor_parallel_size") or 1)
        kind = record.model, str(settings.get("quantization") or ""), ranks, record.case
        newest[kind] = record
    rooflines: dict[tuple[str, str, int], Roofline] = {}
    for (model, quantization, ranks, name), record in sorted(newest.items()):
        if (model, quantization, ranks) not in rooflines:
            rooflines[model, quantization, ranks] = roofline(model, quantization, ranks)
        case, own = parse_case(name), rooflines[model, quantization, ranks]
        plain = own.work.body_products == "plain"
        for found in own.case(case):
            metric = f"{found.case.replace(' ', '_')}_ms" if case is TTFT else "output_tok_s"
            value = found.first_token_seconds * 1e3 if case is TTFT else found.output_tok_s
            measured = record.metrics[metric]
            yield Row(model, quantization, plain, ranks, found.case, measured, value)


def roofline(model: str, quantization: str, ranks: int) -> Roofline:
    args = EngineArgs(
        model=str(HERE / "configs" / model),
        dtype="bfloat16",
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization=quantization or None,
        tensor_parallel_size=ranks,
    )
    return Roofline(resolve(args), "h200")


def mean_error(found: list[Row]) -> float:
    """Returns the mean of the errors' sizes, in percent."""
    return statistics.mean(abs(row.percent) for row in found)


def summary(kind: str, found: list[Row]) -> str:
    """Returns a sentence with the mean and the largest of the errors' sizes."""
    worst = max(abs(row.percent) for row in found)
    return (
        f"{kind}: {mean_error(found):.1f} % off in the mean, {worst:.1f} % at worst "
        f"({len(found)} figures)."
    )


def main() -> None:
    found = list(rows())
    print("| model | case | measured | predicted | error |")
    print("| --- | --- | --- | --- | --- |")
    for row in found:
        name = f"{row.model} {row.quantization}".strip() + f" x {row.ranks}" * (row.ranks > 1)
        print(
            f"| {name} | {row.case} | {row.measured:,.4g} | {row.predicted:,.4g} "
            f"| {row.percent:+.0f} % |"
        )
    plain = [row for row in found if row.plain]
    quantized = [row for row in found if not row.plain]
    print(f"\n{summary('In 16 bits', plain)} {summary('Quantized', quantized)}")


if __name__ == "__main__":
    main()
