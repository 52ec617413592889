"""Router and experts of a few tokens, layer after layer as in a model, on this GPU: checks against
float64, then µs of a layer by plan.

    PYTHONPATH=src python bench/kernels/experts_one.py [--seconds 100] [--only TEXT] [--tokens 1,4]
                                                       [--sweep] [--compile PART/PARTS]

A graph walks over eight layers of Qwen3-30B-A3B or four of gpt-oss-20b, whose experts together are
larger than L2: norm and router, then the experts and their residual, which the next layer takes.
--sweep: every pair of other tiles of the two products, by warps and pieces ahead; the best are
shown. --only: formats whose name has one of these in it. --compile 0/6: only fills Triton's cache
with a sixth of the kernels, so that six may run at once. Prints a table at the end.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from experts import FORMATS, GPT_OSS, QWEN3, Batch, Layer, Model, check_layer, plan_of
from session import Session
from timing import DEVICE, graph_us
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.experts import Routing
from quire.ops.triton.experts.experts import run_experts
from quire.ops.triton.experts.plan import ExpertsPlan, IntegerTile
from quire.ops.triton.experts.route import route
from quire.ops.triton.launch import compiling

CASES = (
    (QWEN3, "int4-g128"), (QWEN3, "bf16"), (GPT_OSS, "mxfp4"), (QWEN3, "int8"),
    (QWEN3, "fp8-g128"), (QWEN3, "fp8"),
)  # fmt: skip
UP = ((4, 1), (4, 2), (4, 3), (2, 4), (8, 1))
DOWN = ((8, 3), (8, 2), (8, 1), (4, 6), (4, 3), (16, 1), (16, 2))
SHOWN = 8
"""Plans of a sweep that are shown beside the usual ones: the best."""


def found_plans(layer: Layer, tokens: int, *, sweep: bool) -> dict[str, ExpertsPlan]:
    """Returns plans by name: the one that is chosen, and the one without `experts_integer`."""
    found = {
        "now": plan_of(layer, tokens), "before": plan_of(layer, tokens, integers=False),
        "loops": plan_of(layer, tokens, mma=False, integers=False),
    }  # fmt: skip
    now = found["now"]
    if not isinstance(now.up, IntegerTile):
        return {"now": now}
    if found["loops"] == found["before"]:
        del found["loops"]
    # Of 8 bits a piece takes 32 registers of a thread.
    most = 3 if layer.up.weight.format.bits == 0 else 6
    for up, down in itertools.product(UP, DOWN) if sweep else ():
        if max(up[1], down[1]) <= most:
            tiles = IntegerTile(*up), IntegerTile(*down)
            found["w{}a{} w{}a{}".format(*up, *down)] = replace(now, up=tiles[0], down=tiles[1])
    found["up before"] = replace(found["before"], down=now.down)
    found["down before"] = replace(found["before"], up=now.up)
    return found


class Chain:
    """Layers one behind the other."""

    def __init__(self, model: Model, name: str, count: int) -> None:
        self.model = model
        self.layers = [Layer.make(model, FORMATS[name]) for _ in range(count)]
        own = {"device": DEVICE, "dtype": torch.bfloat16}
        self.routers = [torch.randn(model.experts, model.hidden, **own) / 40 for _ in range(count)]
        self.norm = RmsScale(torch.ones(model.hidden, **own), 1e-6)

    def calls(self, plan: ExpertsPlan, tokens: int) -> list[Callable[[], object]]:
        torch.manual_seed(tokens)
        stream = torch.randn(tokens, self.model.hidden, device=DEVICE, dtype=torch.bfloat16)
        live = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
        routing = Routing(top_k=self.model.top_k)

        def call(index: int, x: Tensor) -> Tensor:
            layer = self.layers[index]
            own = route(x, self.routers[index], routing, live=live, norm=self.norm)
            return run_experts(
                plan, own.x, own.ids, own.weights, layer.up, layer.down, self.model.act, x
            )

        def walk() -> None:
            x = stream
            for index in range(len(self.layers)):
                x = call(index, x)

        return [walk]


def compile_part(part: int, parts: int, only: str, tokens: list[int], *, sweep: bool) -> None:
    at = 0
    for model, name in wanted(only):
        chain = Chain(replace(model, experts=model.top_k), name, 1)
        real = replace(chain.layers[0], model=model)
        seen: set[object] = set()
        for count in tokens:
            for plan in found_plans(real, count, sweep=sweep).values():
                if {plan.up, plan.down} <= seen:
                    continue
                seen |= {plan.up, plan.down}
                at += 1
                if at % parts == part:
                    with compiling(1):
                        Batch.draw(chain.model, count, 0).run(plan, real)
        if at % parts == part:
            with compiling(1):
                chain.calls(found_plans(real, 1, sweep=False)["now"], 1)[0]()


def wanted(only: str) -> list[tuple[Model, str]]:
    return [case for case in CASES if any(part in case[1] for part in only.split(","))]


def check_all(only: str, *, sweep: bool) -> Iterator[tuple[str, Callable[[], float]]]:
    for model, name in wanted(only):
        some = replace(model, experts=2 * model.top_k)
        real = Layer.make(replace(model, experts=1), FORMATS[name])
        for count in (1, 3):
            plans = found_plans(replace(real, model=model), count, sweep=sweep and count == 1)
            seen: set[object] = set()
            for label, plan in plans.items():
                if {plan.up, plan.down} <= seen:
                    continue
                seen |= {plan.up, plan.down}
                yield (
                    f"{name} {count} {label}",
                    functools.partial(check_layer, some, name, count, plan),
                )


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the experts of few tokens, as in a model.")
    parser.add_argument("--seconds", type=float, default=100.0, help="start nothing after this")
    parser.add_argument("--only", default="")
    parser.add_argument("--tokens", default="1,2,4")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", default="", metavar="PART/PARTS")
    options = parser.parse_args()
    tokens = [int(count) for count in options.tokens.split(",")]
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        compile_part(part, parts, options.only, tokens, sweep=options.sweep)
        return 0
    session = Session()
    session.check(check_all(options.only, sweep=options.sweep), until=0.5 * options.seconds)
    rows: list[tuple[str, str, int, str, float]] = []
    if DEVICE == "cuda":
        for model, name in wanted(options.only):
            rows += timed(session, model, name, tokens, options)
            torch.cuda.empty_cache()
    print(f"{'model':14} {'weights':10} {'tokens':>6}  µs of a layer with its router, by plan")
    for model_name, name, count in dict.fromkeys(row[:3] for row in rows):
        own = sorted(
            (row[3:] for row in rows if row[:3] == (model_name, name, count)),
            key=lambda row: row[1],
        )
        swept = [row for row in own if row[0][0] == "w"][SHOWN:]
        text = "; ".join(f"{label} {us:.2f}" for label, us in own if (label, us) not in swept)
        print(f"{model_name:14} {name:10} {count:6}  {text}")
    if session.skipped:
        print(f"skipped for lack of time: {', '.join(session.skipped)[:2000]}")
    print(f"{session.seconds:.0f} s; {len(session.failed)} failures")
    print("".join(f"  {line}\n" for line in session.failed), end="")
    return 1 if session.failed else 0


def timed(
    session: Session, model: Model, name: str, tokens: list[int], options: argparse.Namespace
) -> list[tuple[str, str, int, str, float]]:
    """Returns µs by model, format, tokens and plan."""
    count = 4 if model is GPT_OSS else 8
    if session.seconds > options.seconds:
        session.skipped.append(name)
        return []
    chain = Chain(model, name, count)
    rows = []

    def time(label: str, plan: ExpertsPlan, size: int) -> tuple[str, float]:
        return label, graph_us(chain.calls(plan, size), 3.0, 4) / count

    for size in tokens:
        own = found_plans(chain.layers[0], size, sweep=options.sweep)
        # The first again, last: what differs is noise.
        for label, plan in (*own.items(), *list(own.items())[:1]):
            part = f"{name} {size} {label}", functools.partial(time, label, plan, size)
            for found, us in session.each([part], until=options.seconds):
                rows.append((model.name, name, size, found, us))
    return rows


if __name__ == "__main__":
    sys.exit(main())
