"""Times linear layers of up to 256 rows by every plan, beside the rules of thumb and cuBLAS.

    PYTHONPATH=src python bench/kernels/plans.py                 # the models with shipped plans
    PYTHONPATH=src python bench/kernels/plans.py --models 0.6B --rows 1 8 --seconds 30
    PYTHONPATH=src python bench/kernels/plans.py --models 8B --ranks 2   # a rank's part of two
    PYTHONPATH=src python bench/kernels/plans.py --untuned --rows 1 8 64 # models without plans

Compares each plan with float64 before it is timed. The first table has the µs of each layer by the
rules, by the best plan and by cuBLAS, and the best plan's share of the bandwidth. The second has
the share of the byte floor that a layer's four products reach together. If $OUT is set, writes the
card's table and every measurement to that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from layers import BANDWIDTH, FEW_BITS, FORMATS
from shapes import LARGE, MODELS, UNTUNED, part_of
from shapes import Shape as Model

from quire.ops.triton.products.measure import Measured, preferred
from quire.ops.triton.products.plan import GemmPlan, Shape
from quire.ops.triton.products.table import BUCKETS, PLANS, key_of
from quire.ops.triton.products.tune import Tuner, tune
from quire.ops.weight import WeightFormat


def layer_shapes(model: Model, rows: int, form: WeightFormat | None) -> dict[str, Shape]:
    """Returns the linear layers of a step: qkv and gate_up take a norm, gate_up gates.

    The head of a quantized model may be in its format, or as it is.
    """
    shapes = {}
    for name, (n, k) in model.projections.items():
        gated = name == "gate_up"
        norm = name in ("qkv", "gate_up")
        shapes[name] = Shape(rows, n // 2 if gated else n, k, torch.bfloat16, norm, gated, form)
    shapes["lm_head"] = Shape(rows, model.vocab, model.hidden, torch.bfloat16, format=form)
    return shapes


class Report:
    """Collects measurements by key; writes each to $OUT/gemm_measured.jsonl.

    Attributes:
        found: the measurements of each shape, the rules' plan first.
    """

    def __init__(self, out: Path | None) -> None:
        self.found: dict[str, list[Measured[GemmPlan]]] = {}
        self._file = (out / "gemm_measured.jsonl").open("w") if out else None

    def add(self, shape: Shape, found: list[Measured[GemmPlan]]) -> None:
        self.found[key_of(shape)] = found
        for each in found:
            record = {"key": key_of(shape), "us": None if each.error else round(each.us, 3)}
            record |= {"plan": each.plan.as_json(), "error": each.error}
            if each.error:
                print(f"failed: {key_of(shape)} {each.plan.as_json()}: {each.error}")
            if self._file:
                self._file.write(json.dumps(record) + "\n")

    def times(self, shape: Shape) -> tuple[float, Measured[GemmPlan], float] | None:
        """Returns the µs of the rules' plan, the best plan, and the µs of cuBLAS."""
        found = self.found.get(key_of(shape))
        if not found:
            return None
        cublas = next(each.us for each in found if each.plan.kernel == "torch")
        return found[0].us, min(found, key=lambda each: each.us), cublas

    def layer(self, shape: Shape) -> str:
        times = self.times(shape)
        if times is None:
            return "–"
        rules, best, cublas = times
        share = 100 * shape.weight_bytes / best.us / BANDWIDTH
        return f"{rules:.1f}, {best.us:.1f} {best.plan.kernel} ({share:.0f} %), {cublas:.1f}"

    def shares(self, shapes: list[Shape]) -> str:
        """Returns the shares of the byte floor of some layers together, in percent."""
        times = [each for each in map(self.times, shapes) if each is not None]
        if len(times) < len(shapes):
            return "–"
        floor = sum(shape.weight_bytes for shape in shapes) / BANDWIDTH
        rules, best = sum(own[0] for own in times), sum(own[1].us for own in times)
        return f"{100 * floor / rules:.1f}, {100 * floor / best:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="parts of model names")
    parser.add_argument("--untuned", action="store_true", help="models without shipped plans")
    parser.add_argument("--ranks", type=int, default=1, help="that share each layer")
    parser.add_argument("--rows", nargs="*", type=int, default=list(BUCKETS))
    parser.add_argument("--formats", nargs="*", choices=["bf16", *FEW_BITS], default=["bf16"])
    parser.add_argument("--seconds", type=float, default=130.0, help="begin nothing after this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 4)
    options = parser.parse_args()
    every = UNTUNED if options.untuned else MODELS + (LARGE if options.models else ())
    chosen = [m for m in every if any(part in m.name for part in options.models or [""])]
    models = [part_of(model, options.ranks) for model in chosen]
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    report = Report(out)
    kinds = [(model, name) for model in models for name in options.formats]
    shapes = [
        shape
        for rows in options.rows
        for model, name in kinds
        for label, shape in layer_shapes(model, rows, FORMATS[name]).items()
        if label != "lm_head" or not options.untuned
    ]
    entries: dict[str, GemmPlan] = {}
    end = time.monotonic() + options.seconds
    for shape, found in tune(Tuner(torch.device("cuda", 0)), shapes, options.workers):
        report.add(shape, found)
        best = preferred(found)
        if best is not None:
            entries[key_of(shape)] = best.plan
        if time.monotonic() > end:
            break
    if out:
        text = PLANS.dumps(torch.cuda.get_device_name(), entries)
        (out / "nvidia-h200.json").write_text(text)
    columns = " | ".join(f"{rows} rows" for rows in options.rows)
    line = "| --- " * (len(options.rows) + 2) + "|"
    print(f"\nµs: rules, best (% of 4.24 TB/s), cuBLAS\n| model | layer | {columns} |\n{line}")
    for model, name in kinds:
        for label in layer_shapes(model, 1, None):
            own = [layer_shapes(model, rows, FORMATS[name])[label] for rows in options.rows]
            print(f"| {model.name} {name} | {label} | {' | '.join(map(report.layer, own))} |")
    print(f"\n% of the byte floor: rules, best\n| model | weights | {columns} |\n{line}")
    for model, name in kinds:
        cells = []
        for rows in options.rows:
            layers = layer_shapes(model, rows, FORMATS[name])
            cells.append(report.shares([layers[label] for label in model.projections]))
        print(f"| {model.name} | {name} | {' | '.join(cells)} |")
    print(f"{len(entries)} of {len(shapes)} layers measured")


if __name__ == "__main__":
    main()
