"""Products of few rows in 16 bits: every prologue and epilogue, compiled, against float64."""

from __future__ import annotations

import itertools

import pytest
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


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kernel}-{plan.bm}-{plan.split_k}")
def test_prologues_and_epilogues(plan: GemmPlan) -> None:
    device = torch.device("cuda", 0)
    kinds = list(itertools.product(EPILOGUES, ((torch.bfloat16, "late"), (torch.float16, "exact"))))
    cases = []
    for (act, bias, residual), (dtype, mode) in kinds:
        norm = not residual or bias
        chosen = GemmPlan(**{**plan.as_json(), "norm": mode if norm else "none"})
        cases.append((chosen, _layer(plan, dtype, norm, act, bias, residual, device)))
    if plan in (PLANS[0], PLANS[3]):
        cases.append((plan, _layer(plan, torch.float32, False, None, True, True, device)))
    outs = [
        torch.full((args.x.shape[0], args.n), float("nan"), dtype=args.x.dtype, device=device)
        for _, args in cases
    ]
    launches = [small.prepare(a, each, out) for (each, a), out in zip(cases, outs, strict=True)]
    with compiling(4):
        for launch in launches:
            launch.run()
    for (each, args), out in zip(cases, outs, strict=True):
        expected = _expected(args)
        for _ in range(2):  # the second finds out whether split counters were reset
            small.run(args, each, out=out)
            error = float((out.double() - expected).norm() / expected.norm())
            assert error < TOLERANCE[args.x.dtype], (each, args.x.dtype, args.act)
