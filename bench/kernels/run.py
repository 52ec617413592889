"""Check every Triton kernel against its float64 twin on this GPU, then time it.

    PYTHONPATH=src python bench/kernels/run.py [--seconds 220] [--quick] [--only TEXT]

--only: checks and timings whose name has this in it. Prints a table at the end and writes
`kernels.json` into $OUT, if that is set. A failing check or configuration is reported, not fatal;
work beyond the time given is skipped and named. Without a GPU it only checks, under
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import attention_cases
import elementwise_cases
import sampling_cases
import torch
from attention_cases import Row
from session import Session, only
from shapes import QWEN3_0_6B, QWEN3_8B, QWEN25_1_5B
from timing import DEVICE

MODELS = (QWEN3_0_6B, QWEN25_1_5B, QWEN3_8B)


def check_all() -> Iterator[tuple[str, Callable[[], float]]]:
    for name, check in attention_cases.checks():
        yield f"attention: {name}", check
    yield from elementwise_cases.checks(MODELS)
    yield from sampling_cases.checks()


def timings(quick: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The most telling first: time may run out."""
    for shape in MODELS:
        for case in ("b1", "b64", "nano", "one long", "tail", "b16", "long"):
            sweep = not quick and case not in ("nano", "one long")
            yield (
                f"attention decode {shape.name} {case}",
                lambda shape=shape, case=case, sweep=sweep: attention_cases.time_decode(
                    shape, case, sweep
                ),
            )
        for tokens in (8192, 2048, 512):
            sweep = not quick
            yield (
                f"attention prefill {shape.name} {tokens}",
                lambda shape=shape, tokens=tokens, sweep=sweep: attention_cases.time_prefill(
                    shape, tokens, sweep
                ),
            )
    for shape, case in (
        (QWEN25_1_5B, "64 behind 2083"),
        (QWEN25_1_5B, "64 behind 32768"),
        (QWEN3_8B, "64 behind 2083"),
        (QWEN25_1_5B, "64 behind 8192 among 64 x 1024"),
    ):
        yield (
            f"attention prefix {shape.name} {case}",
            lambda shape=shape, case=case: attention_cases.time_prefix(shape, case, not quick),
        )
    yield (
        "attention decode b8",
        lambda: attention_cases.time_decode(QWEN3_0_6B, "b8", False),
    )
    for rows in (1, 64, 256):
        yield f"sampling {rows}", lambda rows=rows: sampling_cases.time_sampling(rows)
    for shape in MODELS:
        for tokens in (1, 64, 256, 8192):
            for case in elementwise_cases.time_all(shape, tokens):
                yield f"{case.__name__} {shape.name} {tokens}", case


def table(rows: list[Row]) -> Iterator[str]:
    head = ("kernel", "model", "case", "best µs", "rate", "baseline", "trials (µs)")
    lines = [head]
    for row in rows:
        trials = "; ".join(f"{label} {us:.1f}" for label, us in row.trials)
        best = min(us for _, us in row.trials)
        rate = f"{row.value:.2f} {row.unit}" if row.value < 100 else f"{row.value:.0f} {row.unit}"
        lines.append((row.kernel, row.model, row.case, f"{best:.1f}", rate, row.baseline, trials))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield " | ".join([*cells, line[-1]])


def report(failed: list[str], skipped: list[str], rows: list[Row]) -> None:
    out = os.environ.get("OUT")
    if out:
        record = {
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
            "failed": failed,
            "skipped": skipped,
        }
        record["rows"] = [asdict(row) for row in rows]
        Path(out, "kernels.json").write_text(json.dumps(record, indent=1))
    print("\n".join(table(rows)))
    if skipped:
        print(f"skipped for lack of time: {', '.join(skipped)}")
    print(f"{len(failed)} failures" + "".join(f"\n  {line}" for line in failed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels.")
    parser.add_argument("--seconds", type=float, default=220.0, help="start nothing after this")
    parser.add_argument("--quick", action="store_true", help="default configurations only")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="names with this in them")
    options = parser.parse_args()
    session = Session()
    torch.manual_seed(time.time_ns() % 2**31)
    if not options.no_checks:
        session.check(only(options.only, check_all()), until=0.6 * options.seconds)
    rows: list[Row] = []
    if DEVICE == "cuda":
        for row in session.each(only(options.only, timings(options.quick)), until=options.seconds):
            rows.append(row)
            torch.cuda.empty_cache()
    print(f"{session.seconds:.0f} s in all")
    report(session.failed, session.skipped, rows)


if __name__ == "__main__":
    main()
