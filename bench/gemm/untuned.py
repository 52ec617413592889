"""Layers of models for which no plans are shipped: rules of thumb beside the best candidate.

    PYTHONPATH=src python bench/gemm/untuned.py                      # under two minutes
    PYTHONPATH=src python bench/gemm/untuned.py --models 1B 3B --rows 1 8 64 --seconds 60

Times a layer's four products in bf16 by the rules, by every candidate, and, for models with shipped
plans, by these. Prints each model's share of the byte floor (the weight's bytes over 4.24 TB/s),
then the products for which a candidate gains most, with both plans. Processes compile one model
after the other while the first of them are measured; models that are left when the time is up are
left out. Writes every measurement to $OUT/untuned.jsonl, if set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import torch
from run import BANDWIDTH, layer_shapes

from quire.ops.triton.launch import compiling, traits
from quire.ops.triton.products.plan import TORCH, Shape
from quire.ops.triton.products.table import key_of, plan_for
from quire.ops.triton.products.tune import Measured, Tuner, refinements

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from shapes import MODELS, UNTUNED
from shapes import Shape as Model

DEVICE = torch.device("cuda", 0)
REFINED = 1
"""The plans whose other ways to apply the norm are tried."""


def products(model: Model, rows: list[int]) -> Iterator[tuple[str, Shape]]:
    """Yields name and shape of a layer's products, for each number of rows."""
    for m in rows:
        for name, shape in layer_shapes(model, m, None).items():
            if name != "lm_head":
                yield name, shape


class Timed(NamedTuple):
    """The measurements of one product."""

    model: str
    name: str
    shape: Shape
    rules: Measured
    best: Measured

    @property
    def floor(self) -> float:
        return self.shape.weight_bytes / BANDWIDTH


def compile_share(models: list[Model], rows: list[int], share: int, shares: int) -> None:
    """Compiles a share of all plans into Triton's cache; prints a line behind each model. A tile
    is compiled once, whatever the sizes: equal plans go to one process."""
    tuner = Tuner(DEVICE, pool_bytes=640 << 20)
    for model in models:
        with compiling(1):
            for _, shape in products(model, rows):
                for plan in tuner.plans(shape):
                    kind = f"{plan}{shape.norm}{shape.gated}{shape.m}"
                    if plan.kernel != "torch" and zlib.crc32(kind.encode()) % shares == share:
                        for each in (plan, *refinements(plan, shape, norms=True)):
                            if each.norm != "exact" or each.kernel == "gemv":
                                tuner.launch(shape, each).run()
        print(model.name, flush=True)


def measured(tuner: Tuner, shape: Shape) -> list[Measured]:
    """Returns the measurements of a shape's plans, the rules' first."""
    expected = tuner.reference(shape)
    found = [tuner.measure(shape, plan, expected) for plan in tuner.plans(shape)]
    if all(m.plan.kernel != "torch" for m in found):
        found.append(tuner.measure(shape, TORCH, expected))
    order = sorted((m for m in found if m.plan.kernel != "torch"), key=lambda m: m.us)
    for m in order[:REFINED]:
        for plan in refinements(m.plan, shape, norms=True):
            if plan.norm != "exact" or plan.kernel == "gemv":
                found.append(tuner.measure(shape, plan, expected))
    return found


def shipped(tuner: Tuner, rows: list[int]) -> None:
    """Prints what models with plans of their own reach."""
    print("\nshipped plans: share of the byte floor of a layer, by rows of x")
    card = torch.cuda.get_device_name()
    with compiling(4):
        for model in MODELS:
            for _, shape in products(model, rows):
                plan = plan_for(shape, card, traits(DEVICE))
                if plan.kernel != "torch":
                    tuner.launch(shape, plan).run()
    for model in MODELS:
        cells = []
        for m in rows:
            floor = us = 0.0
            for _, shape in products(model, [m]):
                plan = plan_for(shape, card, traits(DEVICE))
                us += tuner.measure(shape, plan, tuner.reference(shape)).us
                floor += shape.weight_bytes / BANDWIDTH
            cells.append(f"{m:>4}: {us:7.1f} µs {100 * floor / us:5.1f} %")
        print(f"  {model.name:<14}" + "   ".join(cells), flush=True)


def print_model(model: Model, rows: list[int], timed: list[Timed]) -> None:
    cells = []
    for m in rows:
        own = [each for each in timed if each.shape.m == m]
        floor = sum(each.floor for each in own)
        rules, best = sum(each.rules.us for each in own), sum(each.best.us for each in own)
        cells.append(f"{m:>4}: {100 * floor / rules:5.1f} % {100 * floor / best:5.1f} %")
    print(f"  {model.name:<14}" + "   ".join(cells), flush=True)


def print_gains(timed: list[Timed], rows: int, most: int) -> None:
    """Prints the products of so many rows for which the rules lose most."""
    own = [each for each in timed if each.shape.m == rows]
    lost = sorted(own, key=lambda each: each.best.us - each.rules.us)
    print(f"\n{rows} rows, where the rules lose most ({most} of {len(own)}), in µs: rules, best")
    for each in lost[:most]:
        plans = [json.dumps(m.plan.as_json()) for m in (each.rules, each.best)]
        error = f" ({each.rules.error})" if each.rules.error else ""
        print(
            f"  {each.model:<13}{each.name:<8}{key_of(each.shape):<38}"
            f"{each.rules.us:6.1f} {each.best.us:6.1f}  {plans[0]}{error} -> {plans[1]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[""], help="parts of model names")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument(
        "--gains", type=int, default=15, help="products listed for each number of rows"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    models = [m for m in UNTUNED if any(part in m.name for part in options.models)]
    if options.share:
        share, shares = map(int, options.share.split("/"))
        compile_share(models, options.rows, share, shares)
        return
    own = [*sys.argv[1:], "--share"]
    compilers = [
        subprocess.Popen(
            [sys.executable, __file__, *own, f"{share}/{options.workers}"],
            stdout=subprocess.PIPE, bufsize=0,
        )
        for share in range(options.workers)
    ]  # fmt: skip
    try:
        run(models, options, end, [each.stdout for each in compilers if each.stdout])
    finally:
        for each in compilers:
            each.kill()


def line_by(pipe: IO[bytes], end: float) -> bool:
    """Reads a line; returns whether there was one in time."""
    ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
    return bool(ready and pipe.readline())


def run(
    models: list[Model], options: argparse.Namespace, end: float, compiled: list[IO[bytes]]
) -> None:
    out = os.environ.get("OUT")
    file = open(Path(out) / "untuned.jsonl", "w") if out else None  # noqa: SIM115
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    tuner = Tuner(DEVICE)
    began = time.monotonic()
    shipped(tuner, options.rows)
    print(f"[{time.monotonic() - began:.0f} s]")
    print("\nshares of the byte floor, by rows of x: rules, best candidate", flush=True)
    every: list[Timed] = []
    for model in models:
        if not all(line_by(pipe, end) for pipe in compiled):
            print(f"  {model.name}: not compiled in time")
            break
        timed = []
        for name, shape in products(model, options.rows):
            if time.monotonic() > end:
                print(f"  {model.name}: no time left")
                break
            found = measured(tuner, shape)
            best = min(found, key=lambda m: m.us)
            timed.append(Timed(model.name, name, shape, found[0], best))
            for m in found if file else ():
                us = None if math.isinf(m.us) else round(m.us, 3)
                record = {"key": key_of(shape), "us": us, "plan": m.plan.as_json()}
                assert file is not None
                file.write(json.dumps({**record, "error": m.error}) + "\n")
        else:
            print_model(model, options.rows, timed)
            print(f"[{time.monotonic() - began:.0f} s]", flush=True)
        every += timed
        if time.monotonic() > end:
            break
    for m in options.rows:
        print_gains(every, m, options.gains)
    if file:
        file.close()


if __name__ == "__main__":
    main()
