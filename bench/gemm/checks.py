"""Every prologue and epilogue, compiled, against float64 on the card itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.ops import RmsScale, Weight
from quire.ops.triton.launch import compiling
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GATED, GemmPlan, LinearArgs

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PLANS = (
    GemmPlan("gemv", bm=1, bn=4, bk=512, warps=4),
    GemmPlan("gemv", bm=4, bn=2, bk=1024, warps=4),
    GemmPlan("gemv", bm=2, bn=2, bk=256, warps=2, stages=3),
    GemmPlan("skinny", bm=16, bn=32, bk=64, stages=3, prefetch=256),
    GemmPlan("skinny", bm=16, bn=32, bk=64, stages=4, split_k=4, prefetch=256),
    GemmPlan("skinny", bm=32, bn=64, bk=64, stages=3, swap=True),
    GemmPlan("skinny", bm=64, bn=64, bk=64, stages=3, split_k=2),
)
EPILOGUES = ((None, False, True), ("silu_and_mul", False, False), ("gelu_tanh", True, True))
"""act, bias, residual"""


def _layer(plan: GemmPlan, dtype: torch.dtype, norm: bool, act: str | None, bias: bool,
           residual: bool, device: torch.device) -> LinearArgs:  # fmt: skip
    """Ragged on purpose: neither N nor K is a multiple of the tile."""
    m = 3 if plan.bm == 4 else plan.bm - (plan.bm > 2)
    n, k = 520 - 3, 1024 - 24
    rows = 2 * n if act in GATED else n

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    return LinearArgs(
        x=draw(m, k), weight=Weight.plain(draw(rows, k) * k**-0.5),
        bias=draw(rows) if bias else None,
        norm=RmsScale(draw(k).abs(), 1e-6) if norm else None,
        residual=draw(m, n) if residual else None, act=act,
    )  # fmt: skip


def _expected(args: LinearArgs) -> Tensor:
    x = args.x.double()
    if args.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.norm.eps)
        x = x * args.norm.weight.double()
    y = x @ args.weight.values.double().T
    if args.bias is not None:
        y = y + args.bias.double()
    if args.gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    elif args.act:
        y = torch.nn.functional.gelu(y, approximate="tanh")
    return y if args.residual is None else y + args.residual.double()


def check_combinations(device: torch.device, workers: int) -> Iterator[str]:
    """Yields a line for each combination whose result is off, or which raised."""
    cases = []
    for plan, (act, bias, residual) in itertools.product(PLANS, EPILOGUES):
        for dtype, mode in ((torch.bfloat16, "late"), (torch.float16, "exact")):
            norm = not residual or bias
            chosen = GemmPlan(**{**plan.as_json(), "norm": mode if norm else "none"})
            cases.append((chosen, _layer(plan, dtype, norm, act, bias, residual, device)))
    cases.append((PLANS[0], _layer(PLANS[0], torch.float32, True, None, True, True, device)))
    cases.append((PLANS[3], _layer(PLANS[3], torch.float32, True, None, True, True, device)))
    outs = [torch.full((a.x.shape[0], a.n), float("nan"), dtype=a.x.dtype, device=device)
            for _, a in cases]  # fmt: skip
    launches = [small.prepare(a, plan, out) for (plan, a), out in zip(cases, outs, strict=True)]
    with compiling(workers):
        for launch in launches:
            launch.run()
    for (plan, args), out in zip(cases, outs, strict=True):
        label = f"{plan.as_json()} {args.x.dtype} norm={args.norm is not None} act={args.act}"
        try:
            expected = _expected(args)
            for attempt in range(2):  # the second finds out whether split counters were reset
                small.run(args, plan, out=out)
                error = float((out.double() - expected).norm() / expected.norm())
                if not error < TOLERANCE[args.x.dtype]:
                    yield f"{label}: error {error:.2e} (run {attempt})"
        except Exception as error:
            yield f"{label}: {type(error).__name__} {str(error)[:160]}"
