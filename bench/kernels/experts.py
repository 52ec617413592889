"""Experts on this GPU: every kernel against its twin, then times of whole layers, with tiles to
choose from.

    PYTHONPATH=src python bench/kernels/experts.py [--seconds 100] [--sweep KIND] [--only TEXT]
                                                   [--tokens 1,64,8,2048,256] [--compile-only]

Times the router and the experts of one layer of Qwen3-30B-A3B and gpt-oss-20b for 1 to 2048 tokens
on random routes. The share compares a time with reading each chosen expert's weights once at
4.0 TB/s. The table also times the kernels that run with `experts_mma` or `hopper_experts` disabled.
For many tokens it times the other order of operands, and weights that are not expanded.

--sweep KIND     time other tiles, too, and print each, the best first. KIND is mma (`experts_mma`,
                 checked first), loops (the other kernels), router or all
--only TEXT      cases whose name contains one of these texts, separated by commas
--compile-only   fill Triton's cache; several processes may do so at once

A failing check or configuration is reported and not fatal. Cases without time left are named.
Without a GPU the script only checks, under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from session import Session
from timing import DEVICE, graph_us
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.experts import SILU, ExpertCopies, ExpertWeights, Routing, Swiglu, expands
from quire.ops.reference import experts as twins
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.experts.experts import run_experts, takes_integers, takes_mma, takes_ring
from quire.ops.triton.experts.plan import (
    GEMV_TOKENS,
    ExpertsPlan,
    ExpertsShape,
    MmaTile,
    RingTile,
    Tile,
    bits_of,
    plan_for,
)
from quire.ops.triton.experts.route import RoutePlan, route, route_plan
from quire.ops.triton.launch import compiling
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
    "Qwen3-30B-A3B", 2048, 128, 8, 768, SILU, False, ("bf16", "fp8-g128", "int8", "int4-g128")
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


# -- checks --------------------------------------------------------------------------------------


def checks(sweep: str) -> Iterator[tuple[str, Callable[[], float]]]:
    small = DEVICE == "cpu"
    for model in (QWEN3, GPT_OSS):
        own = replace(model, experts=8, top_k=4)
        some = replace(model, experts=2 * model.top_k)
        if small:
            own = replace(own, hidden=128, width=64)
        for tokens in (3, 20) if small else (1, 8, 20, 64, 300):
            yield f"router {model.name} {tokens}", functools.partial(check_route, own, tokens)
            swept = sweep in ("router", "all") and tokens in (1, 64)
            for label, route_of in (route_plans(model, tokens) if swept else {}).items():
                yield (
                    f"router {model.name} {tokens} {label}",
                    functools.partial(check_route, model, tokens, route_of),
                )
        for name in FORMATS if model is QWEN3 else model.formats:
            for tokens in (2, 20) if small else (1, 8, 20, 64, 300):
                yield (
                    f"{model.name} {name} {tokens}",
                    functools.partial(check_layer, own, name, tokens),
                )
        four_bits = "int4-g128" if model is QWEN3 else "mxfp4"
        for name in (four_bits,) if sweep in ("mma", "all") else ():
            for tokens in (2, 50):
                for label, plan in mma_plans(tokens).items():
                    yield (
                        f"{model.name} {name} {tokens} {label}",
                        functools.partial(check_layer, some, name, tokens, plan),
                    )


def check_route(model: Model, tokens: int, plan: RoutePlan | None = None) -> float:
    x = torch.randn(tokens, model.hidden, device=DEVICE).bfloat16()
    weight = (torch.randn(model.experts, model.hidden, device=DEVICE) / 40).bfloat16()
    norm = RmsScale(torch.rand(model.hidden, device=DEVICE).bfloat16(), 1e-6)
    live = torch.tensor([tokens - 1], dtype=torch.int32, device=DEVICE)
    args = (x, weight, Routing(top_k=model.top_k))
    found = route(*args, live=live, norm=norm, copies=copies_of(model.experts), plan=plan)
    expected = twins.route(*args, live=live, norm=norm, copies=copies_of(model.experts))
    same = (found.ids.sort(1).values == expected.ids.sort(1).values).all(1).float().mean()
    if same < 0.9:
        return float("inf")
    found = route(*args, live=live, norm=norm, plan=plan)
    expected = twins.route(*args, live=live, norm=norm)
    if (found.ids[-1] >= 0).any():
        return float("inf")
    # Scores that round differently may change places.
    same = (found.ids.sort(1).values == expected.ids.sort(1).values).all(1).float().mean()
    error = (found.weights - expected.weights).abs().max() / 1e-2
    return float(error) if same > 0.9 else float("inf")


def copies_of(experts: int) -> ExpertCopies:
    """Returns copies on two ranks, the second of which this is: both have every second expert, and
    the first has the others."""
    both = torch.arange(experts, device=DEVICE) % 2 == 0
    slots = torch.full((experts, 2), -1, dtype=torch.int32, device=DEVICE)
    slots[both, 1] = torch.arange(int(both.sum()), dtype=torch.int32, device=DEVICE)
    return ExpertCopies(1 + both.int(), slots, torch.zeros_like(slots[:, 0]))


def check_layer(model: Model, name: str, tokens: int, plan: ExpertsPlan | None = None) -> float:
    layer = Layer.make(model, FORMATS[name])
    batch = Batch.draw(model, tokens, 0)
    batch.ids[-1, 0] = -1
    found = batch.run(plan or plan_of(layer, tokens), layer)

    def exact(linear: ExpertWeights) -> ExpertWeights:
        values = dequantize(linear.weight, torch.float64)
        bias = None if linear.bias is None else linear.bias.double()
        return ExpertWeights(Weight.plain(values), linear.experts, bias)

    weights = batch.weights.double()
    expected = twins.experts_mlp(
        batch.x.double(), batch.ids, weights, exact(layer.up), exact(layer.down), model.act,
        batch.x.double(),
    )  # fmt: skip
    return float((found.double() - expected).norm() / expected.norm() / 1e-2)


# -- times ---------------------------------------------------------------------------------------


def plans(layer: Layer, tokens: int, sweep: str) -> dict[str, ExpertsPlan]:
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
    known = tokens <= GEMV_TOKENS or bits < 8
    if sweep in ("mma", "all") and tokens <= 256 and known and has_mma(layer):
        found.update(mma_plans(tokens))
    if sweep in ("loops", "all"):
        found.update(gemv_plans(layer) if tokens <= 16 else {})
        found.update(grouped_plans(tokens, bits) if tokens >= 8 else {})
    return found


def turned(plan: ExpertsPlan) -> ExpertsPlan:
    """Returns a grouped plan with the other order of operands."""
    up, down = plan.up, plan.down
    assert isinstance(up, Tile)
    assert isinstance(down, Tile)
    return replace(plan, up=replace(up, swap=not up.swap), down=replace(down, swap=not down.swap))


def gemv_plans(layer: Layer) -> dict[str, ExpertsPlan]:
    """Returns plans of few tokens: each product's tile beside the default of the other. Their times
    add up."""
    found = {}
    chosen = plan_of(layer, GEMV_TOKENS, mma=False, integers=False)
    for up in (Tile(1, 2, 2048, 4), Tile(1, 4, 512, 4, 3), Tile(1, 4, 1024, 4, 2),
               Tile(1, 4, 1024, 4, 3), Tile(1, 4, 2048, 8), Tile(1, 8, 512, 4, 3),
               Tile(1, 8, 512, 8), Tile(1, 16, 256, 4, 3)):  # fmt: skip
        found[f"gemv up {_name(up)}"] = replace(chosen, up=up)
    for down in (Tile(1, 4, 256, 4), Tile(1, 4, 512, 4), Tile(1, 4, 1024, 4),
                 Tile(1, 8, 256, 4, 2), Tile(1, 8, 512, 8), Tile(1, 16, 128, 4),
                 Tile(1, 16, 256, 8)):  # fmt: skip
        found[f"gemv down {_name(down)}"] = replace(chosen, down=down)
    return found


def grouped_plans(tokens: int, bits: int) -> dict[str, ExpertsPlan]:
    """Returns plans of sorted tokens, with as many weight rows in a tile of either product."""
    found = {}
    if tokens <= 256:
        sizes = [
            (bm, *own) for bm in (16, 32)
            for own in ((32, 128, 4, 4), (64, 64, 4, 4), (32, 64, 4, 5), (64, 128, 4, 3),
                        (64, 64, 8, 4), (128, 64, 8, 3))
        ]  # fmt: skip
    else:
        for stages in (3, 4):
            own = RingTile(stages)
            found[f"ring {stages}"] = ExpertsPlan("grouped", own, own, expand=bits < 16)
        sizes = [(64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 64, 8, 4), (128, 64, 64, 8, 3),
                 (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 6)]  # fmt: skip
    for bm, bn, bk, warps, stages in sizes:
        for swap in (False, True):
            tiles = [Tile(bm, wide, bk, warps, stages, swap) for wide in (bn, 2 * bn)]
            found[f"grouped {_name(tiles[0])}"] = ExpertsPlan("grouped", *tiles)
            if bits < 16 and tokens > 256 and not swap:
                name = f"grouped {_name(tiles[0])} expanded"
                found[name] = ExpertsPlan("grouped", *tiles, expand=True)
    return found


def mma_plans(tokens: int) -> dict[str, ExpertsPlan]:
    """Returns plans on tensor cores to choose from. For few tokens each product's tile stands
    beside a usual one of the other; else both have the same."""
    found = {}
    if tokens <= GEMV_TOKENS:
        usual = ExpertsPlan("gemv", MmaTile(1, 0, 4, 1), MmaTile(1, 0, 8, 2))
        for early in (False, True):
            for rows, warps, chunks in ((1, 4, 1), (1, 4, 2), (1, 2, 1), (1, 2, 2), (1, 2, 4),
                                        (1, 1, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)):  # fmt: skip
                up = MmaTile(rows, 0, warps, chunks, early)
                found[f"up {_name(up)}"] = replace(usual, up=up)
        for warps, chunks in ((4, 2), (8, 1), (8, 2), (8, 3), (8, 6), (16, 1), (16, 2), (16, 3)):
            down = MmaTile(1, 0, warps, chunks)
            found[f"down {_name(down)}"] = replace(usual, down=down)
        return found
    for early in (False, True):
        for rows, columns, warps, chunks in (
            (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1), (2, 1, 2, 1), (1, 1, 2, 2), (1, 1, 1, 2),
            (2, 2, 1, 1), (4, 1, 1, 1),
        ):  # fmt: skip
            if rows * columns * chunks > 2 and early:  # more than registers hold
                continue
            tile = MmaTile(rows, columns, warps, chunks, early)
            found[_name(tile)] = ExpertsPlan("grouped", tile, tile)
    alone = MmaTile(2, 1, 1, 1, early=True)
    for up, down in ((alone, MmaTile(2, 1, 2, 1, early=True)), (MmaTile(1, 1, 2, 1, True), alone),
                     (MmaTile(2, 1, 2, 1, early=True), alone)):  # fmt: skip
        found[f"up {_name(up)} down {_name(down)}"] = ExpertsPlan("grouped", up, down)
    return found


def route_plans(model: Model, tokens: int) -> dict[str, RoutePlan]:
    """Returns plans of the router to choose from."""
    found = {"default": route_plan(tokens, model.hidden, model.experts, False)}
    whole = 1 << (model.hidden - 1).bit_length()
    if tokens <= 64:
        for be in (2, 4):
            found[f"gemv e{be}"] = RoutePlan(1, be, whole, 4, dot=False, counted=True)
    if tokens >= 8:
        wide = min(128, model.experts)
        for be, splits, bk, warps, squared in (
            (16, 8, 128, 4, 8), (32, 8, 128, 4, 8), (32, 8, 128, 8, 8), (32, 16, 128, 8, 8),
            (wide, 4, 128, 8, 8), (wide, 8, 256, 8, 4), (wide, 16, 128, 8, 8), (64, 8, 128, 8, 8),
        ) if tokens <= 512 else (
            (64, 1, 128, 4, 1), (wide, 1, 128, 4, 8), (wide, 2, 128, 4, 8), (wide, 2, 128, 8, 8),
            (wide, 4, 128, 8, 8), (32, 2, 128, 8, 8),
        ):  # fmt: skip
            own = RoutePlan(16, min(be, wide), bk, warps, 3, splits=splits, squared=squared)
            found[f"dot e{own.be}s{splits}k{bk}w{warps}q{squared}"] = own
    return found


def _name(tile: Tile | MmaTile | RingTile) -> str:
    if isinstance(tile, RingTile):
        return f"ring {tile.stages}"
    if isinstance(tile, MmaTile):
        early = "e" if tile.early else ""
        return f"mma r{tile.rows}n{tile.columns}w{tile.warps}c{tile.chunks}{early}"
    swap = "s" if tile.swap else ""
    return f"{tile.bm}x{tile.bn}x{tile.bk}w{tile.warps}p{tile.stages}{swap}"


@dataclass
class Line:
    model: str
    format: str
    tokens: int
    route_us: float
    trials: dict[str, float]
    floor_us: float
    flops: float


def time_layer(model: Model, name: str, tokens: int, sweep: str) -> Line:
    layer = Layer.make(model, FORMATS[name])
    batches = [Batch.draw(model, tokens, seed) for seed in range(16 if tokens <= 64 else 2)]
    distinct = sum(len(batch.ids.unique()) for batch in batches) / len(batches)
    per_token = 6 * model.top_k * model.hidden * model.width
    line = Line(model.name, name, tokens, float("nan"), {}, 0.0, tokens * per_token)
    line.floor_us = distinct * layer.expert_bytes / BYTES_PER_US
    at_least = 32 if tokens <= 64 else 4
    for label, plan in plans(layer, tokens, sweep).items():
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
    best = min(line.trials, key=line.trials.__getitem__, default="")
    print(
        f"{model.name} {name} {tokens}: best {best} {line.trials.get(best, 0):.1f} µs", flush=True
    )
    if sweep:
        order = sorted(line.trials, key=line.trials.__getitem__)
        print("; ".join(f"{label} {line.trials[label]:.1f}" for label in order), flush=True)
    return line


def time_route(
    model: Model, batches: list[Batch], copies: ExpertCopies | None = None,
    plan: RoutePlan | None = None,
) -> float:  # fmt: skip
    weight = (torch.randn(model.experts, model.hidden, device=DEVICE) / 40).bfloat16()
    norm = RmsScale(torch.ones(model.hidden, device=DEVICE).bfloat16(), 1e-6)
    live = torch.tensor([len(batches[0].x)], dtype=torch.int32, device=DEVICE)
    calls: list[Callable[[], object]] = [
        functools.partial(
            route,
            batch.x,
            weight,
            Routing(top_k=model.top_k),
            live=live,
            norm=norm,
            copies=copies,
            plan=plan,
        )
        for batch in batches
    ]
    return graph_us(calls, 2.0, 32)


def time_routes(model: Model, tokens: int) -> None:
    """Prints what the router takes with each of its plans, the best first."""
    batches = [Batch.draw(model, tokens, seed) for seed in range(4)]
    found = {}
    for label, plan in route_plans(model, tokens).items():
        try:
            found[label] = time_route(model, batches, plan=plan)
        except Exception as error:
            print(f"router {label}: {type(error).__name__}: {str(error)[:90]}")
    order = sorted(found, key=found.__getitem__)
    print(
        f"ROUTER {model.name} {tokens}: "
        + "; ".join(f"{label} {found[label]:.1f}" for label in order),
        flush=True,
    )


def compile_routes(model: Model, tokens: int) -> None:
    weight = torch.randn(model.experts, model.hidden, device=DEVICE).bfloat16()
    norm = RmsScale(torch.ones(model.hidden, device=DEVICE).bfloat16(), 1e-6)
    live = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    batch = Batch.draw(model, tokens, 0)
    for plan in route_plans(model, tokens).values():
        route(batch.x, weight, Routing(top_k=model.top_k), live=live, norm=norm, plan=plan)


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


def compile_all(only: str, tokens_of_each: str, sweep: str) -> None:
    """Everything that is timed, on all cores at once."""
    with compiling(os.cpu_count() or 4):
        for _, model, name, tokens in cases(only, tokens_of_each):
            layer = Layer.make(replace(model, experts=model.top_k), FORMATS[name])
            real = replace(layer, model=model)
            batch = Batch.draw(layer.model, tokens, 0)
            for plan in plans(real, tokens, sweep).values():
                batch.run(plan, layer)


def table(lines: list[Line]) -> Iterator[str]:
    head = ("model", "weights", "tokens", "router µs", "before µs", "experts µs", "of floor",
            "TFLOP/s", "best µs", "of floor", "with")  # fmt: skip
    rows = [head]
    for line in sorted(lines, key=lambda line: (line.model, line.format, line.tokens)):
        if not line.trials:
            continue
        default = line.trials.get("default", float("nan"))
        label = min(line.trials, key=line.trials.__getitem__)
        best = line.trials[label]
        rows.append((
            line.model, line.format, str(line.tokens), f"{line.route_us:.1f}",
            f"{line.trials.get('before', default):.1f}", f"{default:.1f}",
            f"{line.floor_us / default:.0%}", f"{line.flops / default / 1e6:.0f}", f"{best:.1f}",
            f"{line.floor_us / best:.0%}", label,
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time experts.")
    parser.add_argument("--seconds", type=float, default=100.0, help="start nothing after this")
    parser.add_argument("--sweep", choices=("", "router", "mma", "loops", "all"), default="")
    parser.add_argument("--tokens", default="1,64,8,2048,256")
    parser.add_argument("--only", default="", help="cases whose name has one of these")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--compile-only", action="store_true", help="only fill Triton's cache")
    options = parser.parse_args()
    session = Session()
    if not options.no_checks:
        own = [check for check in checks(options.sweep) if wanted(check[0], options.only)]
        if DEVICE == "cuda":
            with compiling(os.cpu_count() or 4):
                for _, check in own:
                    try:
                        check()
                    except Exception as error:  # it is told when it runs
                        print(f"compiling: {type(error).__name__}: {str(error)[:90]}")
            print(f"checks compiled after {session.seconds:.0f} s", flush=True)
        if not options.compile_only:
            session.check(own, until=0.5 * options.seconds)
    lines: list[Line] = []
    if DEVICE == "cuda":
        swept = options.sweep in ("router", "all")
        sizes = [int(tokens) for tokens in options.tokens.split(",")] if swept else []
        models = [m for m in (QWEN3, GPT_OSS) if wanted(f"router {m.name}", options.only)]
        with compiling(os.cpu_count() or 4):
            for model in models:
                for tokens in sizes:
                    compile_routes(model, tokens)
        print(f"routers compiled after {session.seconds:.0f} s", flush=True)
        compile_all(options.only, options.tokens, options.sweep)
        print(f"compiled after {session.seconds:.0f} s", flush=True)
        if options.compile_only:
            return 0
        for model in models:
            for tokens in sizes:
                time_routes(model, tokens)
        parts = [
            (case, functools.partial(time_layer, model, name, tokens, options.sweep))
            for case, model, name, tokens in cases(options.only, options.tokens)
        ]
        for line in session.each(parts, until=options.seconds):
            lines.append(line)
            torch.cuda.empty_cache()
    print("\n".join(table(lines)))
    if session.skipped:
        print(f"skipped for lack of time: {', '.join(session.skipped)[:2000]}")
    print(f"{session.seconds:.0f} s; {len(session.failed)} failures")
    print("".join(f"  {line}\n" for line in session.failed), end="")
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
