"""Times ways to multiply by A and B on a GPU: whole decode steps, and each kind of layer.

    python bench/kernels/adapter_variants.py [--layers 36] [--seconds 145]

"loop": the product with B is a loop of its own whose result is added to the layer's sums. Others
add it to those sums in place, and read the first slots' B before them ("early").

Each way is first checked against the twins, with adapters of several ranks: it must leave base rows
their bits, and give the same twice. One that fails is told, and timed if it can be. Tables
end the output, at the latest after `--seconds`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapters import CONFIG, Bench, median_us, random_adapter, read_bandwidth
from quire import ops
from quire.adapters.adapted_linear import AdaptedLinear
from quire.ops.adapters import AdapterRows, SlotWeights
from quire.ops.arguments import Activation, RmsScale
from quire.ops.launches import compiling
from quire.ops.reference import adapters as twins
from quire.ops.rows import StepRows
from quire.ops.triton import adapted_gemm, adapters
from quire.ops.triton.adapted_gemm import AdapterSchedule
from quire.ops.triton.linear import linear
from quire.runner.graphs import Graphs

NEW = adapted_gemm.SCHEDULE
LOOP = replace(NEW, stages=1, early=0, by_one=False, registers=0)
WAYS: dict[str, AdapterSchedule] = {
    "extra 64": NEW,
    "extra 64, loop": LOOP,
    "own 128, loop": replace(LOOP, place="own", programs=128),
    "extra 64, not early": replace(NEW, early=0),
    "extra 64, any registers": replace(NEW, registers=0),
    "extra 64, early in shared": replace(NEW, hold=False),
    "extra 32": replace(NEW, programs=32),
    "own 128": replace(NEW, place="own", programs=128),
    "apart 132": replace(NEW, place="apart", programs=132),
    "extra 128": replace(NEW, programs=128),
    "extra 64, all look": replace(NEW, by_one=False),
    "extra 64, 128 registers": replace(NEW, registers=128),
    "extra 64, B late": replace(NEW, ahead=0),
    "extra 64, early 32": replace(NEW, early=32),
    "extra 64, 16 parts": replace(NEW, parts=16),
    "extra 16, loop": replace(LOOP, programs=16),
    "extra 32, loop": replace(LOOP, programs=32),
    "extra 128, loop": replace(LOOP, programs=128),
    "extra 64, loop, B late": replace(LOOP, ahead=0),
    "own 128, loop, B late": replace(LOOP, place="own", programs=128, ahead=0),
    "apart 132, loop": replace(LOOP, place="apart", programs=132),
    "apart 264, loop": replace(LOOP, place="apart", programs=264),
}
CASES = ("none", "1 row of 1", "1", "4", "16", "64")
KINDS = {"qkv": None, "out": None, "up": "silu_and_mul", "down": None}
ROWS = 64


def slots_of(case: str) -> list[int]:
    """Returns the slot of each row."""
    if case == "none":
        return [-1] * ROWS
    if case == "1 row of 1":
        return [0] + [-1] * (ROWS - 1)
    return [row % int(case) for row in range(ROWS)]


def grouped(slots: list[int], module: Any = adapters) -> AdapterRows:
    starts = torch.arange(ROWS + 1, device="cuda", dtype=torch.int32)
    rows = StepRows(starts[:ROWS], starts, starts, torch.zeros_like(starts[:ROWS]))
    column = torch.tensor(slots, dtype=torch.int32, device="cuda")
    found: AdapterRows = module.adapter_rows(rows, column, num_tokens=ROWS, num_slots=ROWS)
    return found


@dataclass
class Kind:
    """The layers of one kind, and a step's input."""

    name: str
    layers: list[tuple[ops.Weight, SlotWeights]]
    x: torch.Tensor
    residual: torch.Tensor | None
    norm: RmsScale | None
    act: Activation | None

    @classmethod
    def of(cls, name: str, bench: Bench) -> Kind:
        layers, width = [], 0
        for layer in bench.hook.pool.layout.layers:
            if layer.name.endswith(name):
                adapted = layer.adapter
                assert isinstance(adapted, AdaptedLinear)
                layers.append((layer.weight, adapted._weights))
                width = layer.inputs
        assert layers, [layer.name for layer in bench.hook.pool.layout.layers[:4]]
        normed = name in ("qkv", "up")

        def random(columns: int) -> torch.Tensor:
            return torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16)

        norm = None
        if normed:
            norm = RmsScale(torch.ones(width, device="cuda", dtype=torch.bfloat16), 1e-6)
        residual = None if normed else random(layers[0][0].outputs)
        return cls(name, layers, random(width), residual, norm, KINDS[name])  # type: ignore[arg-type]

    def base(self, index: int) -> torch.Tensor:
        weight = self.layers[index][0]
        return linear(self.x, weight, None, self._added, self.norm, self.act)

    def adapted(self, index: int, rows: AdapterRows) -> torch.Tensor:
        weight, slots = self.layers[index]
        return adapted_gemm.adapted_linear(
            self.x, weight, None, self._added, self.norm, self.act, slots, rows
        )

    def twin(self, index: int, rows: AdapterRows) -> torch.Tensor:
        weight, slots = self.layers[index]
        return twins.adapted_linear(
            self.x, weight, None, self._added, self.norm, self.act, slots, rows
        )

    @property
    def _added(self) -> torch.Tensor | None:
        return None if self.residual is None else self.residual.clone()

    def check(self) -> float:
        """Returns the error of what adapters add. Raises where base rows change, or a result."""
        worst = 0.0
        index = min(5, len(self.layers) - 1)
        none = self.twin(index, grouped([-1] * ROWS, twins)).float()
        for slots in (
            [row % 5 if row % 3 else -1 for row in range(ROWS)],
            [row // 20 for row in range(ROWS)],
            slots_of("64"), slots_of("1"), slots_of("1 row of 1"), slots_of("none"),
        ):  # fmt: skip
            plain = self.base(index)
            rows = grouped(slots)
            found = self.adapted(index, rows)
            for _ in range(3):
                assert torch.equal(self.adapted(index, rows), found), f"{self.name}: not the same"
            on = torch.tensor(slots, device="cuda") >= 0
            assert torch.equal(found[~on], plain[~on]), f"{self.name}: base rows"
            if on.any():
                want = self.twin(index, grouped(slots, twins)).float() - none
                got = found.float() - plain.float()
                error = float((got - want)[on].norm() / want[on].norm())
                worst = max(worst, error)
                assert error < 0.1, f"{self.name}: error {error:.3f} of {slots[:8]}"
        return worst

    def graph(self, rows: AdapterRows | None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._run(0, rows)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for index in range(len(self.layers)):
                self._run(index, rows)
        return graph

    def _run(self, index: int, rows: AdapterRows | None) -> None:
        weight, slots = self.layers[index]
        # The sum of layers does not matter, so the residual is another tensor than the result.
        if rows is None:
            linear(self.x, weight, None, self.residual, self.norm, self.act)
        else:
            adapted_gemm.adapted_linear(
                self.x, weight, None, self.residual, self.norm, self.act, slots, rows
            )


class Report:
    """Holds what was measured, and prints it once."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}
        self.kinds: dict[str, dict[str, dict[str, float]]] = {}
        self.errors: dict[str, str] = {}
        self.floors: dict[str, float] = {}
        self.note = ""
        self._lock = threading.Lock()

    def end(self, code: int) -> None:
        with self._lock:
            self._print()
            sys.stdout.flush()
            os._exit(code)

    def _print(self) -> None:
        for name, text in self.errors.items():
            print(f"\nfailed: {name}: {text}")
        for kind, ways in self.kinds.items():
            print(f"\n{kind}: µs a layer")
            _table(ways)
        print(f"\nwhole steps, µs. {self.note}")
        _table({**self.steps, "base + bytes": self.floors})


def _table(lines: dict[str, dict[str, float]]) -> None:
    print("| way | " + " | ".join(("base", *CASES)) + " |")
    print("| --- |" + " ---: |" * (len(CASES) + 1))
    for name, times in lines.items():
        cells = [f"{times[case]:.1f}" if case in times else "" for case in ("base", *CASES)]
        print(f"| {name} | " + " | ".join(cells) + " |")


def run_body(bench: Bench, shallow: bool) -> None:
    bench.runner.program.body(bench.shapes[True], shallow=shallow)


def measure(bench: Bench, kinds: list[Kind], report: Report) -> None:
    for kind in kinds:
        graph = kind.graph(None)
        us = median_us(graph.replay, 20) / len(kind.layers)
        report.kinds[kind.name] = {"base": {"base": us}}
    report.steps["base"] = {"base": bench.microseconds(False)}
    shape = bench.shapes[True]
    for name, schedule in WAYS.items():
        if "CUDA" in report.errors.get(name, ""):
            continue
        began = time.monotonic()
        adapted_gemm.SCHEDULE = schedule
        try:
            graphs = Graphs(bench.runner.state.device, bench.runner.state.limits)
            graphs.capture({shape: functools.partial(run_body, bench)})
            times = report.steps[name] = {}
            for case in CASES:
                bench.choose(slots_of(case))
                times[case] = median_us(lambda graphs=graphs: graphs.replay(shape), 12)  # type: ignore[misc]
            for kind in kinds:
                rows = grouped(slots_of("none"))
                graph = kind.graph(rows)
                times = report.kinds[kind.name][name] = {}
                for case in CASES:
                    # Clears the counters too, as a step does.
                    for own, new in zip(rows[:4], grouped(slots_of(case))[:4], strict=True):
                        own.copy_(new)
                    times[case] = median_us(graph.replay, 8) / len(kind.layers)
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            report.errors[name] = f"timing: {error!r}"[:500]
            traceback.print_exc()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--seconds", type=float, default=145.0)
    options = parser.parse_args()
    began, report = time.monotonic(), Report()

    def late() -> None:
        time.sleep(options.seconds)
        print(f"\nstopped after {options.seconds:.0f} s", flush=True)
        report.end(3)

    threading.Thread(target=late, daemon=True).start()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": options.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        bench = Bench(Path(folder), slots=ROWS, rank=16, rows=ROWS)
    print(f"loaded ({time.monotonic() - began:.0f} s)", flush=True)
    kinds = [Kind.of(name, bench) for name in KINDS]
    images = [random_adapter(bench.hook, rank, rank) for rank in (16, 5, 8)]
    for slot in range(ROWS):
        bench.fill(images[slot % 3], slot)
    with torch.inference_mode():
        with compiling(os.cpu_count() or 1):
            for schedule in WAYS.values():
                adapted_gemm.SCHEDULE = schedule
                for kind in kinds:
                    kind.adapted(0, grouped(slots_of("1")))
        print(f"compiled ({time.monotonic() - began:.0f} s)", flush=True)
        for name, schedule in WAYS.items():
            adapted_gemm.SCHEDULE = schedule
            try:
                worst = max(kind.check() for kind in kinds)
                torch.cuda.synchronize()
                print(f"{name}: error {worst:.3f}, base rows keep their bits", flush=True)
            except Exception as error:
                report.errors[name] = repr(error)[:500]
                print(f"{name}: failed: {error!r}"[:500], flush=True)
        print(f"checked ({time.monotonic() - began:.0f} s)", flush=True)
        for slot in range(ROWS):
            bench.fill(images[0], slot)
        torch.cuda.synchronize()
        nbytes, base = images[0].data.nbytes, bench.microseconds(False)
        for case in CASES:
            active = 0 if case == "none" else int(case.split()[-1])
            report.floors[case] = base + active * nbytes / bandwidth * 1e6
        report.note = f"{nbytes / 1e6:.0f} MB an adapter, {bandwidth / 1e12:.2f} TB/s read"
        measure(bench, kinds, report)
    print(f"({time.monotonic() - began:.0f} s)")
    report.end(1 if report.errors else 0)


if __name__ == "__main__":
    main()
