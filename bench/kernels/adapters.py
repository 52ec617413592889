"""Times linear layers with low-rank adapters on a GPU, after comparing them with float64.

    python bench/kernels/adapters.py

Layers have Qwen3-8B's shapes and rank 16. Times are µs of a call in a CUDA graph, with weights read
from memory. The floor adds the read time of the active adapters to the layer's own time. Without a
GPU the script only compares small layers with float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import DEVICE, graph_us
from torch import Tensor

from quire import ops
from quire.ops.adapters import HEAD, WORDS, AdapterRows, SlotWeights, scale_bits
from quire.ops.arguments import Activation, RmsScale
from quire.ops.rows import StepRows
from quire.ops.triton.launch import compiling
from quire.ops.triton.linear import linear
from quire.ops.triton.lora import adapted_gemm, adapters
from quire.ops.triton.norm import rms_norm

RANK, SLOTS = 16, 64
SMALL = DEVICE == "cpu"
COPIES = 1 if SMALL else 3
DTYPE = torch.float32 if SMALL else torch.bfloat16
BANDWIDTH = 4.2e6
"""Bytes per µs."""
PLACES: dict[str, tuple[tuple[int, ...], int, bool, Activation | None]] = {
    "q/k/v": ((4096, 1024, 1024), 4096, True, None),
    "o": ((4096,), 4096, False, None),
    "gate/up": ((12288, 12288), 4096, True, "silu_and_mul"),
    "down": ((4096,), 12288, False, None),
}
"""By layer: outputs of its projections, inputs, whether it has a norm, its activation."""


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(DTYPE)


@dataclass
class Layer:
    """Copies of a layer and of its adapters, and a step's input."""

    name: str
    x: Tensor
    residual: Tensor | None
    norm: RmsScale | None
    act: Activation | None
    weights: list[ops.Weight]
    slots: list[SlotWeights]

    @classmethod
    def of(cls, name: str, rows: int) -> Layer:
        sizes, inputs, normed, act = PLACES[name]
        if SMALL:
            sizes, inputs = tuple(size // 64 for size in sizes), inputs // 32
        weights = [
            ops.Weight.plain(random(sum(sizes), inputs, scale=inputs**-0.5)) for _ in range(COPIES)
        ]
        norm = RmsScale(1 + random(inputs, scale=0.1), 1e-6) if normed else None
        residual = None if normed else random(rows, sum(sizes))
        slots = [_slots(sizes, inputs) for _ in range(COPIES)]
        return cls(name, random(rows, inputs), residual, norm, act, weights, slots)

    @property
    def adapter_bytes(self) -> int:
        own = self.slots[0]
        return RANK * (own.inputs * len(own.sizes) + sum(own.sizes)) * DTYPE.itemsize

    def first(self, rows: int) -> Layer:
        res = None if self.residual is None else self.residual[:rows]
        x, norm, act = self.x[:rows], self.norm, self.act
        return Layer(self.name, x, res, norm, act, self.weights, self.slots)

    def base(self) -> list[Callable[[], object]]:
        return [
            lambda w=w: linear(self.x, w, None, self.residual, self.norm, self.act)  # type: ignore[misc]
            for w in self.weights
        ]

    def adapted(self, rows: AdapterRows) -> list[Callable[[], Tensor]]:
        return [
            lambda w=w, s=s: adapted_gemm.adapted_linear(  # type: ignore[misc]
                self.x, w, None, self.residual, self.norm, self.act, s, rows
            )
            for w, s in zip(self.weights, self.slots, strict=True)
        ]

    def exact(self, slots: list[int]) -> Tensor:
        """Returns the result of the first copy, in float64."""
        x, own = self.x.double(), self.slots[0]
        if self.norm is not None:
            x = rms_norm(self.x, *self.norm).double()
        out = x @ self.weights[0].values.double().t()
        for row, slot in enumerate(slots):
            start = 0
            for place, size in enumerate(own.sizes if slot >= 0 else ()):
                line = own.table[slot, HEAD + WORDS * place :][:WORDS].tolist()
                a_at = int(own.table[slot, 0]) + line[2] * own.inputs
                a = own.memory[slot, a_at : a_at + RANK * own.inputs].view(RANK, -1).double()
                b = own.memory[slot, line[0] : line[0] + size * RANK].view(size, RANK).double()
                out[row, start : start + size] += 2.0 * (b @ (a @ x[row]))
                start += size
        if self.act is not None:
            out = ops.activate(out.float(), self.act).double()
        return out if self.residual is None else out + self.residual


def _slots(sizes: tuple[int, ...], inputs: int) -> SlotWeights:
    table = torch.zeros(SLOTS, HEAD + WORDS * len(sizes), dtype=torch.int32)
    ranks = RANK * len(sizes)
    table[:, 1] = ranks
    at = ranks * inputs
    for place, size in enumerate(sizes):
        line = torch.tensor([at, RANK, place * RANK, scale_bits(2.0)])
        table[:, HEAD + WORDS * place :][:, :WORDS] = line
        at += size * RANK
    memory = random(SLOTS, at, scale=0.02)
    return SlotWeights(memory, table.to(DEVICE), sizes, inputs, RANK)


def grouped(slots: list[int]) -> AdapterRows:
    """Returns the rows of a step, row i of lane i."""
    count = len(slots)
    starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32)
    rows = StepRows(starts[:count], starts, starts, torch.zeros_like(starts[:count]))
    column = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    return adapters.adapter_rows(rows, column, num_tokens=count, num_slots=SLOTS)


def check(layers: dict[str, Layer]) -> None:
    """Raises where a result is not float64's, or a row without an adapter changes."""
    for rows, active in ((3, 2), (5, 5)) if SMALL else ((1, 1), (8, 5), (64, 1), (64, 64)):
        slots = [row % active if row % 3 != 2 else -1 for row in range(rows)]
        own, base = grouped(slots), torch.tensor(slots, device=DEVICE) < 0
        for name, whole in layers.items():
            layer = whole.first(rows)
            found, exact = layer.adapted(own)[0](), layer.exact(slots)
            plain = layer.base()[0]()
            assert isinstance(plain, Tensor)
            same = torch.equal(found[base], plain[base])
            error = float((found.double() - exact).abs().max() / exact.abs().max())
            print(f"{name}, {rows} rows, {active} adapters: error {error:.1e}, base rows {same}")
            # The interpreter's functions round by an element's place in an array.
            assert error < 2e-2, (name, rows, active)
            assert same or SMALL, (name, rows, active)


def line(layer: Layer, rows: AdapterRows, active: int, base: float) -> str:
    found = graph_us(layer.adapted(rows), target_ms=2.0, at_least=12)
    floor = base + active * layer.adapter_bytes / BANDWIDTH
    return f"{found:.1f} | {found - base:.1f} | {found / floor:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    torch.manual_seed(0)
    began = time.monotonic()
    most = 5 if SMALL else 64
    layers = {name: Layer.of(name, most) for name in PLACES}
    if not SMALL:
        with compiling(12):
            for rows in (1, 8, 64):
                own = grouped([0] * rows)
                for layer in layers.values():
                    layer.first(rows).adapted(own)[0]()
    check(layers)
    print(f"results are float64's ({time.monotonic() - began:.0f} s)", flush=True)
    if SMALL:
        return 0
    print("\n| layer | rows | base, µs | active | µs | over base | of floor |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    sums: dict[int, list[float]] = {}
    for rows in (64, 8, 1):
        for name, whole in layers.items():
            layer = whole.first(rows)
            base = graph_us(layer.base(), target_ms=2.0, at_least=12)
            for active in (0, 1, 8, 64):
                if active > rows:
                    continue
                own = grouped([row % active if active else -1 for row in range(rows)])
                text = line(layer, own, active, base)
                print(f"| {name} | {rows} | {base:.1f} | {active} | {text} |", flush=True)
                if rows == SLOTS:
                    pair = sums.setdefault(active, [0.0, 0.0])
                    pair[0] += base
                    pair[1] += float(text.split(" |")[0])
    for active, (base, found) in sums.items():
        print(f"| all | 64 | {base:.1f} | {active} | {found:.1f} | {found - base:.1f} | |")
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
