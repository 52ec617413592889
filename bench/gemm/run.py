"""Small-batch linear layers on a CUDA card: correctness, speed per layer, speed of a decode step.

    PYTHONPATH=src python bench/gemm/run.py                 # everything, under four minutes
    PYTHONPATH=src python bench/gemm/run.py --models 0.6B --rows 1 8 --seconds 30
    PYTHONPATH=src python bench/gemm/run.py --models 8B --ranks 2   # what a rank of two has

Writes the card's table and every measurement to the folder $OUT, if set. Prints two summaries. The
first has each layer's µs and bandwidth, with those of cuBLAS. The second has the tokens per second
of a decode step: a graph of all linear layers, with a small kernel of a given length in place of
attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
from checks import check_combinations
from skeleton import batch_steps, decode_steps

from quire.ops.triton.products.plan import Shape
from quire.ops.triton.products.table import BUCKETS, GemmTable, key_of
from quire.ops.triton.products.tune import Measured, Tuner, preferred, tune
from quire.ops.weight import WeightFormat

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from shapes import LARGE, MODELS, part_of
from shapes import Shape as Model

FORMATS = {
    "bf16": None,
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
}
BANDWIDTH = 4.24e6
"""Bytes per µs of a GEMV, measured on an H200."""


def layer_shapes(model: Model, rows: int, form: WeightFormat | None) -> dict[str, Shape]:
    """The linear layers of a step: qkv and gate_up take a norm, gate_up gates. The head of a
    quantized model may be in its format, or as it is."""
    shapes = {}
    for name, (n, k) in model.projections.items():
        gated = name == "gate_up"
        norm = name in ("qkv", "gate_up")
        shapes[name] = Shape(rows, n // 2 if gated else n, k, torch.bfloat16, norm, gated, form)
    shapes["lm_head"] = Shape(rows, model.vocab, model.hidden, torch.bfloat16, format=form)
    return shapes


class Report:
    """Collects measurements by key; writes each to $OUT/gemm_measured.jsonl."""

    def __init__(self, out: Path | None) -> None:
        self.best: dict[str, tuple[Measured, Measured]] = {}
        self.failures: list[str] = []
        self._file = (out / "gemm_measured.jsonl").open("w") if out else None

    def add(self, shape: Shape, found: list[Measured]) -> None:
        cublas = next(m for m in found if m.plan.kernel == "torch")
        self.best[key_of(shape)] = (min(found, key=lambda m: m.us), cublas)
        for m in found:
            record = {"key": key_of(shape), "us": None if m.error else round(m.us, 3)}
            record |= {"plan": m.plan.as_json(), "error": m.error}
            if m.error:
                self.failures.append(f"{key_of(shape)} {m.plan.as_json()}: {m.error}")
            if self._file:
                self._file.write(json.dumps(record) + "\n")
        if self._file:
            self._file.flush()

    def line(self, label: str, shapes: list[Shape]) -> str:
        cells = []
        for shape in shapes:
            found = self.best.get(key_of(shape))
            if found is None:
                cells.append("-".rjust(17))
                continue
            best, cublas = found
            share = 100 * shape.weight_bytes / best.us / BANDWIDTH
            kind = best.plan.kernel[0]
            cells.append(f"{best.us:6.1f}{kind}{share:3.0f}%{cublas.us:6.1f}")
        return f"{label:<24}" + " ".join(cells)


def tuned(shapes: list[Shape], report: Report, workers: int, seconds: float) -> GemmTable:
    """Returns a table of the shapes that are measured in time, and reports each."""
    end = time.monotonic() + seconds
    table = GemmTable(torch.cuda.get_device_name())
    for shape, found in tune(Tuner(torch.device("cuda", 0)), shapes, workers):
        report.add(shape, found)
        best = preferred(found)
        if best is not None:
            table.entries[key_of(shape)] = best.plan
        if time.monotonic() > end:
            break
    return table


def print_plans(
    table: GemmTable, models: list[Model], rows: list[int], label: str, form: WeightFormat | None
) -> None:
    print(f"\n{label}: plans at the fewest rows:")
    for model in models:
        for name, shape in layer_shapes(model, rows[0], form).items():
            plan = table.entries.get(key_of(shape))
            print(f"  {model.name:<13}{name:<8}", json.dumps(plan.as_json()) if plan else "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[""], help="parts of model names")
    parser.add_argument("--ranks", type=int, default=1, help="that share each layer")
    parser.add_argument("--rows", nargs="*", type=int, default=list(BUCKETS))
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=["bf16"])
    parser.add_argument("--seconds", type=float, default=130.0, help="limit for the tuning")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 4)
    options = parser.parse_args()
    began = time.monotonic()
    every = MODELS if options.models == [""] else MODELS + LARGE
    chosen = [m for m in every if any(part in m.name for part in options.models)]
    models = [part_of(model, options.ranks) for model in chosen]
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None

    def done(what: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {what}", flush=True)

    print(torch.cuda.get_device_name(), torch.__version__)
    for problem in check_combinations(torch.device("cuda", 0), options.workers):
        print("WRONG", problem)
    done("combinations of prologue and epilogue checked")

    report = Report(out)
    forms = [(name, FORMATS[name]) for name in options.formats]
    shapes = [
        shape
        for rows in options.rows
        for model in models
        for _, form in forms
        for shape in layer_shapes(model, rows, form).values()
    ]
    table = tuned(shapes, report, options.workers, options.seconds)
    if out:
        (out / "nvidia-h200.json").write_text(table.dumps())
    done(f"tuned {len(table.entries)} layers, {len(report.failures)} plans failed")
    for failure in report.failures[:12]:
        print("  failed:", failure)

    print("\nper layer: µs (g gemv, s skinny, t torch), % of 4.24 TB/s, cuBLAS µs; by rows of x")
    print(" " * 24 + " ".join(f"{rows}".center(17) for rows in options.rows))
    for model, (label, form) in itertools.product(models, forms):
        for name in layer_shapes(model, 1, form):
            row = [layer_shapes(model, rows, form)[name] for rows in options.rows]
            print(report.line(f"{model.name[:10]} {label} {name}", row))
    for label, form in forms:
        print_plans(table, models, options.rows, label, form)
    done("layers printed")

    for model in models if "bf16" in options.formats else ():
        for line in decode_steps(model, table):
            print(line, flush=True)
    done("decode steps of one row")
    for model in models if "bf16" in options.formats else ():
        for line in batch_steps(model, table, [r for r in (8, 64, 256) if r in options.rows]):
            print(line, flush=True)
    done("end")


if __name__ == "__main__":
    main()
