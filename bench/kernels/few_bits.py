"""Chooses plans of one row's products in few bits within a whole decode step.

    PYTHONPATH=src python bench/kernels/few_bits.py int4 int8 fp8 [--model Qwen3-8B] [--ranks 2]

Each plan is compared with float64 and timed in a graph of all layers' weights. The fastest few of
each product are then tried in a step of all layers. That step has rotary embedding, attention at a
context of 256 and the head in bf16. The fastest plans are printed as entries of the card's table.

--head int8        has the head in 8 bits and tries its plans

--kernel integer   tries only this kernel's plans and the table's

--store            writes the fastest plans to the user's table
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from attention_cases import AttentionTuning, Batch
from layers import BANDWIDTH, FEW_BITS, draw, values
from shapes import LARGE, MODELS, part_of
from shapes import Shape as Model
from timing import graph_us
from torch import Tensor

from quire.ops import RmsScale
from quire.ops.triton.attention.rope_store import qk_norm_rope_store
from quire.ops.triton.launch import traits
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GemmPlan, LinearArgs, norms_late, shape_of
from quire.ops.triton.products.quantized_tiles import dequantize
from quire.ops.triton.products.table import PLANS, key_of, plan_for
from quire.ops.triton.products.tune import candidates, refinements
from quire.ops.weight import Weight

PRODUCTS = ("gate_up", "down", "qkv", "o")
DEVICE = torch.device("cuda", 0)
CONTEXT = 256
TOLERANCE = 1e-2
"""Relative error against float64."""
BETWEEN_STEPS = 25.0
"""µs of a step that no kernel of it takes."""

Plans = dict[str, GemmPlan]


class Step:
    """Weights and buffers of a decode step of one sequence."""

    def __init__(self, model: Model, form: str, layers: int, head: str | None = None) -> None:
        self.model = model
        self.names = (*PRODUCTS, "head") if head else PRODUCTS
        self.weights = [
            {name: draw(form, n, k) for name, (n, k) in model.projections.items()}
            for _ in range(layers)
        ]
        if head is None:
            self.head = Weight.plain(values(model.vocab, model.hidden).mul_(0.02))
        else:
            self.head = draw(head, model.vocab, model.hidden)
        self.norm = RmsScale(values(model.hidden).abs(), 1e-6)
        self.bias = values(model.qkv_width) if model.bias else None
        self.h, self.h1 = values(1, model.hidden), values(1, model.hidden)
        self.qkv = values(1, model.qkv_width)
        self.attention = values(1, model.heads * model.head_dim)
        self.wide = values(1, model.intermediate)
        self.logits = values(1, model.vocab)
        self.outputs = {
            "qkv": self.qkv, "o": self.h1, "gate_up": self.wide, "down": self.h,
            "head": self.logits,
        }  # fmt: skip
        self.batch = Batch.make([(1, CONTEXT)], model.heads, model.kv_heads, model.head_dim, layers)
        self.angles = torch.rand(CONTEXT, model.head_dim, device=DEVICE)
        self.positions = torch.tensor([CONTEXT - 1], device=DEVICE)
        self.slots = self.batch.table[0, -1:].long() * 16 + 15
        self.gain = values(model.head_dim) if model.qk_norm else None
        self.schedule = self.batch.schedule(AttentionTuning())
        self.card = torch.cuda.get_device_name()

    def known(self, args: LinearArgs) -> GemmPlan:
        return plan_for(shape_of(args), self.card, traits(DEVICE))

    def args(self, layer: int, name: str) -> LinearArgs:
        if name == "head":
            return LinearArgs(self.h, self.head)
        weight = self.weights[layer][name]
        if name == "qkv":
            return LinearArgs(self.h, weight, self.bias, norm=self.norm)
        if name == "o":
            return LinearArgs(self.attention, weight, residual=self.h)
        if name == "gate_up":
            return LinearArgs(self.h1, weight, norm=self.norm, act="silu_and_mul")
        return LinearArgs(self.wide, weight, residual=self.h1)

    def product(self, layer: int, name: str, plan: GemmPlan) -> None:
        run(self.args(layer, name), plan, self.outputs[name])

    def products(self, name: str, plan: GemmPlan) -> None:
        for layer in range(self.count(name)):
            self.product(layer, name, plan)

    def count(self, name: str) -> int:
        """Products of a name in a step."""
        return 1 if name == "head" else len(self.weights)

    def run(self, plans: Plans) -> None:
        model, rows = self.model, self.batch
        heads = model.heads + 2 * model.kv_heads
        for layer in range(len(self.weights)):
            self.product(layer, "qkv", plans["qkv"])
            rows.q[layer] = qk_norm_rope_store(
                self.qkv.view(1, heads, model.head_dim), rows.caches[layer],
                positions=self.positions, slots=self.slots, cos_sin=self.angles,
                q_weight=self.gain, k_weight=self.gain,
            )  # fmt: skip
            self.attention = rows.run(layer, AttentionTuning(), scratch=self.schedule).view(1, -1)
            for name in ("o", "gate_up", "down"):
                self.product(layer, name, plans[name])
        self.product(0, "head", plans.get("head") or self.known(self.args(0, "head")))


def run(args: LinearArgs, plan: GemmPlan, out: Tensor) -> None:
    if args.norm is not None and plan.norm == "separate":
        args = replace(args, x=rms_norm(args.x, *args.norm), norm=None)
    small.run(args, plan, out=out)


def expected(args: LinearArgs) -> Tensor:
    x = args.x.double()
    if args.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.norm.eps)
        x = x * args.norm.weight.double()
    y = x @ dequantize(args.weight, torch.float32).double().T
    if args.bias is not None:
        y = y + args.bias.double()
    if args.gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if args.residual is None else y + args.residual.double()


def microseconds(work: Callable[[], None]) -> float:
    """Returns the µs of a graph of the work."""
    return graph_us([work], at_least=1)


def plans_of(args: LinearArgs, kernel: str) -> list[GemmPlan]:
    """Returns plans of the GEMV on tensor cores, or of one of its two kernels."""
    shape = shape_of(args)
    plans = [
        plan
        for plan in candidates(shape, traits(DEVICE).num_sms)
        if plan.kernel in ((kernel,) if kernel else ("mma", "integer"))
    ]
    refined = [other for plan in plans for other in refinements(plan, shape, norms=True)]
    # In integers, a norm costs a kernel nothing that would be worth another kernel.
    late = shape.norm and norms_late(shape)
    return [plan for plan in plans if not (late and plan.kernel == "integer")] + refined


def label(plan: GemmPlan) -> str:
    return f"{plan.kernel} w{plan.warps} s{plan.stages} p{plan.programs} {plan.norm}"


def choose(step: Step, kernel: str, until: float) -> Plans:
    """Returns the fastest plans of a step's products."""
    best = {name: step.known(step.args(0, name)) for name in step.names}
    print(f"plans of the table: {microseconds(lambda: step.run(best)):.0f} us a step", flush=True)
    ranked: dict[str, list[tuple[float, GemmPlan]]] = {}
    for name in step.names:
        args = step.args(0, name)
        residual = None if args.residual is None else torch.randn_like(args.residual)
        args = replace(args, x=torch.randn_like(args.x), residual=residual)
        want, out = expected(args), torch.empty_like(step.outputs[name])
        found = []
        for plan in dict.fromkeys((best[name], *plans_of(args, kernel))):
            try:
                out.fill_(math.nan)
                run(args, plan, out)
                error = float((out.double() - want).norm() / want.norm())
                if not error < TOLERANCE:
                    print("WRONG", name, label(plan), error)
                    continue
                work = functools.partial(step.products, name, plan)
                found.append((microseconds(work) / step.count(name), plan))
            except Exception as problem:
                print("FAILED", name, label(plan), type(problem).__name__, str(problem)[:150])
        ranked[name] = found = sorted(found, key=lambda pair: pair[0])
        floor = shape_of(args).weight_bytes / BANDWIDTH
        share = 100 * floor / found[0][0]
        told = "; ".join(f"{us:.1f} {label(plan)}" for us, plan in found[:5])
        print(f"  {name:8} floor {floor:.1f} us, {share:.0f} %: {told}", flush=True)
    best = {name: found[0][1] for name, found in ranked.items()}
    fastest = microseconds(lambda: step.run(best))
    print(f"each as it is fastest alone: {fastest:.0f} us a step", flush=True)
    # The head's plan is the fastest alone. In back-to-back graphs a plan would win that leaves room
    # for the next step's first kernel, but in a real step samplers follow the head.
    for name in PRODUCTS:
        for _, plan in ranked[name][1:7]:
            trial = {**best, name: plan}
            if time.monotonic() > until:
                break
            us = microseconds(functools.partial(step.run, trial))
            if us < fastest:
                fastest, best = us, trial
        print(f"  {name:8} {label(best[name])}: {fastest:.0f} us a step", flush=True)
    print(f"{fastest:.0f} us a step: {1e6 / (fastest + BETWEEN_STEPS):.0f} tokens/s")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="+", choices=FEW_BITS)
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--ranks", type=int, default=1, help="that share each layer")
    parser.add_argument("--head", choices=["int8"])
    parser.add_argument("--kernel", choices=["mma", "integer"], default="")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit for each format")
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    model = next(m for m in MODELS + LARGE if m.name == options.model)
    model = part_of(model, options.ranks)
    torch.manual_seed(0)
    card = torch.cuda.get_device_name()
    head = options.head
    for name in options.formats:
        began = time.monotonic()
        print(f"{model.name} {name}")
        step = Step(model, name, model.layers, head)
        best = choose(step, options.kernel, began + options.seconds)
        entries = {key_of(shape_of(step.args(0, part))): plan for part, plan in best.items()}
        for key, plan in entries.items():
            print(f"  {json.dumps(key)}: {json.dumps(plan.as_json())},")
        if options.store:
            PLANS.keep(card, entries)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
