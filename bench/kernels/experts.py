"""Times the experts and the router of one layer.

    PYTHONPATH=src python bench/kernels/experts.py [--seconds 100] [--only TEXT] [--tokens 1,64]
    PYTHONPATH=src python bench/kernels/experts.py --chain [--only TEXT] [--tokens 1,2,4]

Layers are those of Qwen3-30B-A3B and gpt-oss-20b, with 1 to 2048 tokens on random routes. The share
compares a time with reading each chosen expert's weights once at 4.0 TB/s. The table also times the
kernels that run with `experts_integer`, `experts_mma` or `hopper_experts` disabled, and for many
tokens the other order of operands and weights that are not expanded.

--chain       a graph over eight layers of Qwen3-30B-A3B or four of gpt-oss-20b, whose experts
              together are larger than L2: norm and router, then the experts and their residual
--only TEXT   cases whose name contains one of these texts, separated by commas

A failure is reported and not fatal. Cases without time left are named.
tests/gpu/test_experts_layers.py compares the kernels with twins.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from session import Session
from timing import DEVICE, graph_us
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.experts import SILU, ExpertCopies, ExpertWeights, Routing, Swiglu, expands
from quire.ops.triton.experts.experts import run_experts, takes_integers, takes_mma, takes_ring
from quire.ops.triton.experts.plan import (
    GEMV_TOKENS,
    ExpertsPlan,
    ExpertsShape,
    Tile,
    bits_of,
    plan_for,
)
from quire.ops.triton.experts.route import route
from quire.ops.weight import Weight, WeightFormat

BYTES_PER_US = 4.0e6
"""Bytes that the card reads in a microsecond, as other kernels here have shown."""
FORMATS = {
    "bf16": WeightFormat(torch.bfloat16),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "int4-g128": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True),
    "int4-g128-no-zeros": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
    "mxfp4": WeightFormat(torch.uint8, bits=4, scales=torch.float8_e8m0fnu, group=32, code="e2m1"),
}


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    experts: int
    top_k: int
    width: int
    act: Swiglu
    bias: bool
    formats: tuple[str, ...]


QWEN3 = Model(
    "Qwen3-30B-A3B",
    2048,
    128,
    8,
    768,
    SILU,
    False,
    ("bf16", "fp8", "fp8-g128", "int8", "int4-g128"),
)
GPT_OSS = Model("gpt-oss-20b", 2880, 32, 4, 2880, Swiglu(1.702, 7.0, 1.0), True, ("mxfp4", "bf16"))
TOKENS = (1, 8, 64, 256, 2048)


def drawn(format: WeightFormat, outputs: int, inputs: int) -> Weight:
    """A random weight whose products are about as large as their inputs."""
    weight = Weight.empty(format, outputs, inputs, torch.device(DEVICE))
    if format.scales is None:
        weight.values.normal_(0.0, inputs**-0.5)
        return weight
    # As bytes, but none that is a NaN of 8-bit floats.
    weight.values.view(torch.uint8).random_(0, 256 if format.bits else 120)
    assert weight.scales is not None
    if format.scales is torch.float8_e8m0fnu:
        weight.scales.view(torch.uint8).random_(118, 122)
    else:
        top = 8 if format.bits else 100
        weight.scales.uniform_(0.5, 1.5).div_(top * inputs**0.5)
    if weight.zeros is not None:
        weight.zeros.random_(0, 16)
    return weight


@dataclass
class Layer:
    """The experts of one layer, and routes of several batches."""

    model: Model
    up: ExpertWeights
    down: ExpertWeights

    @classmethod
    def make(cls, model: Model, format: WeightFormat) -> Layer:
        def linear(outputs: int, inputs: int) -> ExpertWeights:
            weight = drawn(format, model.experts * outputs, inputs)
            bias = None
            if model.bias:
                bias = torch.randn(model.experts, outputs, device=DEVICE, dtype=torch.bfloat16)
            return ExpertWeights(weight, model.experts, bias)

        up = linear(2 * model.width, model.hidden)
        return cls(model, up, linear(model.hidden, model.width))

    @property
    def expert_bytes(self) -> int:
        parts = (self.up.weight, self.down.weight)
        tensors = [t for part in parts for t in (part.values, part.scales, part.zeros)]
        return sum(t.nbytes for t in tensors if t is not None) // self.model.experts


@dataclass
class Batch:
    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, model: Model, tokens: int, seed: int) -> Batch:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        shape = (tokens, model.experts)
        scores = torch.rand(shape, generator=generator, device=DEVICE)
        weights, ids = scores.topk(model.top_k, 1)
        x = torch.randn(tokens, model.hidden, generator=generator, device=DEVICE)
        return cls(x.bfloat16(), ids.int(), weights / weights.sum(1, keepdim=True))

    def run(self, plan: ExpertsPlan, layer: Layer) -> Tensor:
        return run_experts(
            plan, self.x, self.ids, self.weights, layer.up, layer.down, layer.model.act, self.x
        )


def has_mma(layer: Layer) -> bool:
    """Whether `experts_mma` takes a layer's weights, on this card."""
    x = torch.empty(1, layer.up.weight.inputs, dtype=torch.bfloat16, device=DEVICE)
    return takes_mma(x, layer.up, layer.down)


def has_ring(layer: Layer) -> bool:
    """Whether `hopper_experts` takes a layer's weights, on this card."""
    x = torch.empty(1, layer.up.weight.inputs, dtype=torch.bfloat16, device=DEVICE)
    return takes_ring(x, layer.up, layer.down)


def plan_of(
    layer: Layer, tokens: int, *, mma: bool = True, ring: bool = True, integers: bool = True
) -> ExpertsPlan:
    """Returns the plan that is chosen, or that is without `experts_mma`, `hopper_experts` or
    `experts_integer`."""
    model = layer.model
    x = torch.empty(1, model.hidden, dtype=torch.bfloat16, device=DEVICE)
    integers = integers and takes_integers(x, layer.up, layer.down, model.top_k)
    return plan_for(
        ExpertsShape(
            tokens, model.experts, model.top_k, model.hidden, model.width, torch.bfloat16,
            bits_of(layer.up.weight.format), mma and has_mma(layer),
            expands(layer.up.weight.format, tokens * model.top_k, model.experts),
            layer.up.weight.dtype.is_floating_point, ring and has_ring(layer), counts=integers,
        )
    )  # fmt: skip


def copies_of(experts: int) -> ExpertCopies:
    """Returns the copies of experts on the second of two ranks.

    Both ranks have every second expert, and the first rank has the others.
    """
    both = torch.arange(experts, device=DEVICE) % 2 == 0
    slots = torch.full((experts, 2), -1, dtype=torch.int32, device=DEVICE)
    slots[both, 1] = torch.arange(int(both.sum()), dtype=torch.int32, device=DEVICE)
    return ExpertCopies(1 + both.int(), slots, torch.zeros_like(slots[:, 0]))


def plans(layer: Layer, tokens: int) -> dict[str, ExpertsPlan]:
    """Returns the plan that is chosen, and those without the kernels that it has."""
    found = {"default": plan_of(layer, tokens), "before": plan_of(layer, tokens, mma=False)}
    if tokens <= GEMV_TOKENS:
        found["before"] = plan_of(layer, tokens, integers=False)
    if has_ring(layer) and tokens > 256:
        found["before"] = plan_of(layer, tokens, ring=False)
    default, bits = found["default"], bits_of(layer.up.weight.format)
    if default == found["before"]:
        del found["before"]
    if tokens > 256 and bits < 16:
        own = replace(plan_of(layer, tokens, ring=False), expand=not default.expand)
        found["expanded" if own.expand else "not expanded"] = own
        small = plan_of(layer, tokens, ring=False)
        found["other order"] = turned(replace(small, expand=False))
    return found


def turned(plan: ExpertsPlan) -> ExpertsPlan:
    """Returns a grouped plan with the other order of operands."""
    up, down = plan.up, plan.down
    assert isinstance(up, Tile)
    assert isinstance(down, Tile)
    return replace(plan, up=replace(up, swap=not up.swap), down=replace(down, swap=not down.swap))


@dataclass
class Line:
    """The times of one case.

    Attributes:
        trials: µs of each plan.
        route_us: µs of the router; 0 if the plans' times include it.
        floor_us: µs to read each chosen expert's weights once.
    """

    model: str
    format: str
    tokens: int
    trials: dict[str, float] = field(default_factory=dict)
    route_us: float = 0.0
    floor_us: float = 0.0
    flops: float = 0.0

    def rates(self, us: float) -> str:
        """Returns the share of the floor and the TFLOP/s; "" for times that include the router."""
        if not self.route_us:
            return ""
        return f" ({self.floor_us / us:.0%}, {self.flops / us / 1e6:.0f})"


def time_layer(model: Model, name: str, tokens: int) -> Line:
    layer = Layer.make(model, FORMATS[name])
    batches = [Batch.draw(model, tokens, seed) for seed in range(16 if tokens <= 64 else 2)]
    distinct = sum(len(batch.ids.unique()) for batch in batches) / len(batches)
    per_token = 6 * model.top_k * model.hidden * model.width
    line = Line(model.name, name, tokens, flops=tokens * per_token)
    line.floor_us = distinct * layer.expert_bytes / BYTES_PER_US
    at_least = 32 if tokens <= 64 else 4
    for label, plan in plans(layer, tokens).items():
        calls: list[Callable[[], object]] = [
            functools.partial(batch.run, plan, layer) for batch in batches
        ]
        try:
            line.trials[label] = graph_us(calls, 3.0, at_least)
        except Exception as error:  # a tile may not fit this card; the others still tell
            print(
                f"{model.name} {name} {tokens} {label}: {type(error).__name__}: {str(error)[:90]}"
            )
    line.route_us = time_route(model, batches)
    with_copies = time_route(model, batches, copies_of(model.experts))
    print(f"{model.name} {tokens}: router {line.route_us:.1f} µs, with copies {with_copies:.1f}")
    told = {label: round(us, 1) for label, us in line.trials.items()}
    print(f"{model.name} {name} {tokens}: {told}", flush=True)
    return line


def time_route(model: Model, batches: list[Batch], copies: ExpertCopies | None = None) -> float:
    weight = (torch.randn(model.experts, model.hidden, device=DEVICE) / 40).bfloat16()
    norm = RmsScale(torch.ones(model.hidden, device=DEVICE).bfloat16(), 1e-6)
    live = torch.tensor([len(batches[0].x)], dtype=torch.int32, device=DEVICE)
    routing = Routing(top_k=model.top_k)
    calls: list[Callable[[], object]] = [
        functools.partial(route, batch.x, weight, routing, live=live, norm=norm, copies=copies)
        for batch in batches
    ]
    return graph_us(calls, 2.0, 32)


def time_chain(model: Model, name: str, tokens: int) -> Line:
    """Times layers one after the other, each with its norm and router, as in a model."""
    count = 4 if model is GPT_OSS else 8
    layers = [Layer.make(model, FORMATS[name]) for _ in range(count)]
    own = {"device": DEVICE, "dtype": torch.bfloat16}
    routers = [torch.randn(model.experts, model.hidden, **own) / 40 for _ in range(count)]
    norm = RmsScale(torch.ones(model.hidden, **own), 1e-6)
    stream = torch.randn(tokens, model.hidden, **own)
    live = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    routing = Routing(top_k=model.top_k)

    def walk(plan: ExpertsPlan) -> None:
        x = stream
        for layer, router in zip(layers, routers, strict=True):
            routed = route(x, router, routing, live=live, norm=norm)
            x = run_experts(
                plan, routed.x, routed.ids, routed.weights, layer.up, layer.down, model.act, x
            )

    line = Line(model.name, name, tokens)
    for label, plan in plans(layers[0], tokens).items():
        line.trials[label] = graph_us([functools.partial(walk, plan)], 3.0, 4) / count
    print(f"{model.name} {name} {tokens}: {line.trials}", flush=True)
    return line


def cases(only: str, tokens_of_each: str) -> list[tuple[str, Model, str, int]]:
    found = [
        (f"{model.name} {name} {tokens}", model, name, tokens)
        for tokens in map(int, tokens_of_each.split(","))
        for model in (QWEN3, GPT_OSS)
        for name in model.formats
    ]
    return [case for case in found if wanted(case[0], only)]


def wanted(name: str, only: str) -> bool:
    return any(part.strip() in name for part in only.split(","))


def compile_all(only: str, tokens_of_each: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields runs with few experts that compile the kernels of the timed cases."""
    for name, model, form, tokens in cases(only, tokens_of_each):
        layer = Layer.make(replace(model, experts=model.top_k), FORMATS[form])
        batch = Batch.draw(layer.model, tokens, 0)
        for plan in plans(replace(layer, model=model), tokens).values():
            yield name, functools.partial(batch.run, plan, layer)


def table(lines: list[Line]) -> Iterator[str]:
    yield "| model | weights | tokens | router, µs | µs (of floor, TFLOP/s), by plan |"
    yield "| --- | --- | ---: | ---: | --- |"
    for line in sorted(lines, key=lambda line: (line.model, line.format, line.tokens)):
        trials = "; ".join(f"{label} {us:.1f}{line.rates(us)}" for label, us in line.trials.items())
        router = f"{line.route_us:.1f}" if line.route_us else "included"
        yield f"| {line.model} | {line.format} | {line.tokens} | {router} | {trials} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="start nothing after this")
    parser.add_argument("--chain", action="store_true", help="layers one after the other")
    parser.add_argument("--tokens", help="default: 1,64,8,2048,256, and 1,2,4 of a chain")
    parser.add_argument("--only", default="", help="cases whose name has one of these")
    options = parser.parse_args()
    tokens = options.tokens or ("1,2,4" if options.chain else "1,64,8,2048,256")
    session = Session()
    session.compile(compile_all(options.only, tokens))
    work = time_chain if options.chain else time_layer
    parts = [
        (case, functools.partial(work, model, name, count))
        for case, model, name, count in cases(options.only, tokens)
    ]
    lines: list[Line] = []
    for line in session.each(parts, until=options.seconds):
        lines.append(line)
        torch.cuda.empty_cache()
    print("\n".join(table(lines)))
    return session.report()


if __name__ == "__main__":
    sys.exit(main())
