"""Times attention, sampling and the kernels that only move bytes.

    PYTHONPATH=src python bench/kernels/run.py [--seconds 220] [--only TEXT]

--only: timings whose name has this in it. Prints a table at the end and writes `kernels.json` into
$OUT, if that is set. A failure is reported, not fatal. Work beyond the time given is skipped and
named. `products.py` times linear layers. tests/ops and tests/gpu compare the kernels with twins.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import attention_cases
import elementwise_cases
import sampling_cases
import torch
from attention_cases import BEHIND_A_PREFIX, CONTEXTS, Row
from session import Session, only
from shapes import QWEN3_0_6B, QWEN3_8B, QWEN25_1_5B

MODELS = (QWEN3_0_6B, QWEN25_1_5B, QWEN3_8B)


def timings() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yields the timings, the most important first, because time may run out."""
    for shape in MODELS:
        for case in dict.fromkeys(("b1", "b64", "nano", *CONTEXTS, "tail")):
            name = f"attention decode {shape.name} {case}"
            yield name, partial(attention_cases.time_decode, shape, case)
        for tokens in (8192, 2048, 512):
            name = f"attention prefill {shape.name} {tokens}"
            yield name, partial(attention_cases.time_prefill, shape, tokens)
    for shape, case in (*((QWEN25_1_5B, case) for case in BEHIND_A_PREFIX),
                        (QWEN3_8B, "64 behind 2083")):  # fmt: skip
        name = f"attention prefix {shape.name} {case}"
        yield name, partial(attention_cases.time_prefix, shape, case)
    for rows in (1, 64, 256):
        yield f"sampling {rows}", partial(sampling_cases.time_sampling, rows)
    for shape in MODELS:
        for tokens in (1, 64, 256, 8192):
            for case in elementwise_cases.time_all(shape, tokens):
                yield f"{case.__name__} {shape.name} {tokens}", case


def table(rows: list[Row]) -> Iterator[str]:
    head = ("kernel", "model", "case", "µs", "rate", "baseline", "trials (µs)")
    lines = [head]
    for row in rows:
        trials = "; ".join(f"{label} {us:.1f}" for label, us in row.trials)
        own = row.trials[0][1]
        rate = f"{row.value:.2f} {row.unit}" if row.value < 100 else f"{row.value:.0f} {row.unit}"
        lines.append((row.kernel, row.model, row.case, f"{own:.1f}", rate, row.baseline, trials))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield " | ".join([*cells, line[-1]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=220.0, help="start nothing after this")
    parser.add_argument("--only", default="", metavar="TEXT", help="names with this in them")
    options = parser.parse_args()
    session = Session()
    torch.manual_seed(time.time_ns() % 2**31)
    rows: list[Row] = []
    for row in session.each(only(options.only, timings()), until=options.seconds):
        rows.append(row)
        torch.cuda.empty_cache()
    out = os.environ.get("OUT")
    if out:
        record = {
            "device": torch.cuda.get_device_name(),
            "failed": session.failed,
            "skipped": session.skipped,
        }
        found = {**record, "rows": [asdict(row) for row in rows]}
        Path(out, "kernels.json").write_text(json.dumps(found, indent=1))
    print("\n".join(table(rows)))
    return session.report()


if __name__ == "__main__":
    sys.exit(main())
