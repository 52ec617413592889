"""All linear layers of a decode step in one CUDA graph, and what launching them early buys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops import RmsScale, Weight
from quire.ops.triton.launch import options, traits
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GemmPlan, LinearArgs, shape_of
from quire.ops.triton.products.table import GemmTable, heuristic, key_of
from quire.ops.triton.products.table_file import graph_us
from quire.ops.triton.products.tune import Tuner

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from shapes import Shape as Model

EARLIER = {
    "Qwen3-0.6B": "cuBLAS mv 1046, Triton 1665, + PDL and first tile 2050; floor 3570",
    "Qwen2.5-1.5B": "cuBLAS mv 785, Triton 888, + PDL and first tile 968; floor 1377",
    "Qwen3-8B": "floor 281",
    "Llama-2-7B": "cuBLAS mv 265, Triton 290, + PDL and first tile 299; floor 321",
}
EARLIER_CUBLAS_MS = {
    "Qwen3-0.6B": {8: 0.767, 64: 0.813, 256: 0.952},
    "Qwen2.5-1.5B": {8: 1.227, 64: 1.319, 256: 1.717},
    "Qwen3-8B": {8: 4.274, 64: 4.368, 256: 7.074},
}
WHOLE = 1 << 20
"""Prefetch depth in bytes that reaches the end of any row."""


@triton.jit
def _spin(x_ptr, y_ptr, width, iterations, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stands for a small kernel: copies, slowly. Follows the other kernels' launch convention."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    for _ in range(iterations):
        x = x * 0.9999 + 0.0001
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < width)


def spin(x: Tensor, y: Tensor, iterations: int, pdl: bool) -> None:
    width = y.numel()
    grid = (triton.cdiv(width, 128),)
    _spin[grid](x, y, width, iterations, BLOCK=128, PDL=pdl, **options(pdl, num_warps=4))


def iterations_for(tuner: Tuner, us: float) -> int:
    """Spin iterations that make the small kernel take `us` in a chain of its kind."""
    a = torch.ones(4096, dtype=torch.bfloat16, device=tuner.device)
    pdl = traits(tuner.device).pdl
    low = graph_us([lambda: spin(a, a, 16, pdl)] * 100, 3.0, tuner.stream)
    high = graph_us([lambda: spin(a, a, 2016, pdl)] * 100, 3.0, tuner.stream)
    return max(1, round(16 + (us - low) * 2000 / (high - low)))


@dataclass
class Step:
    """Weights and buffers of one decode step of `rows` sequences."""

    model: Model
    rows: int
    tuner: Tuner
    table: GemmTable

    def __post_init__(self) -> None:
        model, device = self.model, self.tuner.device

        def draw(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)

        self.weights = [
            {name: Weight.plain(draw(n, k)) for name, (n, k) in model.projections.items()}
            for _ in range(model.layers)
        ]
        self.head = Weight.plain(draw(model.vocab, model.hidden))
        self.norm = RmsScale(draw(model.hidden).abs() + 1.0, 1e-6)
        self.bias = draw(model.qkv_width) if model.bias else None
        self.h = draw(self.rows, model.hidden)
        self.h1 = draw(self.rows, model.hidden)
        self.qkv = draw(self.rows, model.qkv_width)
        self.attention = draw(self.rows, model.heads * model.head_dim)
        self.wide = draw(self.rows, model.intermediate)
        self.logits = draw(self.rows, model.vocab)

    def plan(self, args: LinearArgs) -> GemmPlan:
        shape = shape_of(args)
        known = self.table.entries.get(key_of(shape))
        return known or heuristic(shape, traits(self.tuner.device))

    def calls(
        self, change: Callable[[GemmPlan], GemmPlan], pdl: bool, spins: int
    ) -> list[Callable[[], object]]:
        """The step as a list of launches; `change` adapts each of the table's plans."""
        calls: list[Callable[[], object]] = []

        def add(args: LinearArgs, out: Tensor) -> None:
            plan = change(self.plan(args))
            if plan.kernel == "torch" or plan.norm == "separate":
                calls.append(lambda: self.tuner.call(args, plan, out))
            else:
                workspace = self.tuner.workspace
                calls.append(lambda: small.run(args, plan, out=out, workspace=workspace, pdl=pdl))

        for w in self.weights:
            add(LinearArgs(self.h, w["qkv"], self.bias, norm=self.norm), self.qkv)
            if spins:
                calls.append(lambda: spin(self.qkv, self.attention, spins, pdl))
            add(LinearArgs(self.attention, w["o"], residual=self.h), self.h1)
            gate_up = LinearArgs(self.h1, w["gate_up"], norm=self.norm, act="silu_and_mul")
            add(gate_up, self.wide)
            add(LinearArgs(self.wide, w["down"], residual=self.h1), self.h)
        add(LinearArgs(self.h, self.head), self.logits)
        return calls

    def us(self, change: Callable[[GemmPlan], GemmPlan], pdl: bool = True, spins: int = 0) -> float:
        calls = self.calls(change, pdl, spins)
        self.h.normal_(0.0, 1.0)
        torch.cuda.synchronize()
        return graph_us(calls, 5.0, self.tuner.stream) * len(calls)


VARIANTS: dict[str, tuple[Callable[[GemmPlan], GemmPlan], bool]] = {
    "no PDL": (lambda plan: replace(plan, prefetch=0), False),
    "PDL, no L2 prefetch": (lambda plan: replace(plan, prefetch=0), True),
    "PDL, table's prefetch": (lambda plan: plan, True),
    "PDL, L2 prefetch of 2 KB per row": (lambda plan: replace(plan, prefetch=2048), True),
    "PDL, L2 prefetch of all": (lambda plan: replace(plan, prefetch=WHOLE), True),
    "... and trigger after the wait": (
        lambda plan: replace(plan, prefetch=WHOLE, eager=False),
        True,
    ),
    "... and norm applied late": (
        lambda plan: replace(
            plan, prefetch=WHOLE, norm="late" if plan.norm == "exact" else plan.norm
        ),
        True,
    ),
}


def decode_steps(model: Model, table: GemmTable) -> Iterator[str]:
    """Tokens per second at one row, by how launches overlap and what stands between them."""
    tuner = Tuner(torch.device("cuda", torch.cuda.current_device()), pool_bytes=1 << 20)
    step = Step(model, 1, tuner, table)
    spins = {0: 0, 2: iterations_for(tuner, 2.0), 8: iterations_for(tuner, 8.0)}
    yield f"\n{model.name}, one row, tokens/s (before: {EARLIER[model.name]})"
    yield f"  {'small kernel after qkv:':<36}" + "".join(f"{us:>8} µs" for us in spins)
    for name, (change, pdl) in VARIANTS.items():
        cells = []
        for count in spins.values():
            try:
                cells.append(f"{1e6 / step.us(change, pdl, count):11.0f}")
            except Exception as error:
                cells.append(f"{type(error).__name__:>11}")
        yield f"  {name:<36}" + "".join(cells)
    if not bool(step.logits.isfinite().all()):
        yield "  WRONG: logits are not finite"


def batch_steps(model: Model, table: GemmTable, rows: list[int]) -> Iterator[str]:
    """Milliseconds of all linear layers of a step of several rows, ours and by cuBLAS."""
    tuner = Tuner(torch.device("cuda", torch.cuda.current_device()), pool_bytes=1 << 20)
    for count in rows:
        step = Step(model, count, tuner, table)
        try:
            ours = step.us(lambda plan: plan) / 1e3
            cublas = step.us(lambda plan: GemmPlan("torch")) / 1e3
        except Exception as error:
            yield f"{model.name} at {count} rows: {type(error).__name__} {str(error)[:120]}"
            continue
        before = EARLIER_CUBLAS_MS.get(model.name, {}).get(count)
        yield (
            f"{model.name} at {count} rows: {ours:.3f} ms; cuBLAS with norm, activation and "
            f"residual as kernels {cublas:.3f} (bare cuBLAS before: {before})"
        )
