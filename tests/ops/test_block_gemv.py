"""Products of one row and 8-bit float weights, which round the row in the same kernel, against
float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops.arguments import RmsScale
from quire.ops.reference import activate
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.products.block_gemv import BlockPlan, block_gemv, plans_of, takes
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.triton.products.round_inputs import quantize_inputs
from quire.ops.weight import Weight, WeightFormat
from tests.ops import ptx

if not torch.cuda.is_available():
    ptx.install()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORM = WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128, inputs="group")


def drawn(outputs: int, inputs: int) -> Weight:
    weight = Weight.empty(FORM, outputs, inputs, DEVICE)
    weight.values.copy_((torch.randn(outputs, inputs, device=DEVICE) * 60).clamp(-448, 448))
    # This includes subnormal numbers.
    weight.values.view(torch.uint8)[:, ::7] %= 8
    assert weight.scales is not None
    weight.scales.uniform_(0.005, 0.015)
    return weight


# Outputs, inputs, plan.
WHOLE = 40, 1024, BlockPlan(2, 8, 0)
TURNS = 40, 512, BlockPlan(1, 4, 2)
PARTS = 20, 768, BlockPlan(2, 2, 1)
Case = tuple[int, int, BlockPlan]


@pytest.mark.parametrize(
    ("case", "act", "norm", "residual"),
    [
        (WHOLE, None, False, True),
        (WHOLE, "gelu_tanh", True, True),
        (TURNS, "silu_and_mul", True, False),
        (PARTS, "silu_and_mul", False, True),
        (PARTS, None, True, False),
    ],
)
def test_products(case: Case, act: str | None, norm: bool, residual: bool) -> None:
    """Inputs of a group may be far larger than others, or all 0. The row is rounded as by the
    separate rounding kernel, so only the rounding of sums differs."""
    torch.manual_seed(0)
    outputs, inputs, plan = case
    weight = drawn(outputs * (2 if act == "silu_and_mul" else 1), inputs)
    x = torch.randn(1, inputs, device=DEVICE).bfloat16()
    x[:, 7] *= 200
    x[:, 128:256] = 0
    gain = torch.rand(inputs, device=DEVICE).bfloat16() + 0.5
    args = LinearArgs(
        x, weight, torch.randn(weight.outputs, device=DEVICE).bfloat16(),
        RmsScale(gain, 1e-6) if norm else None,
        torch.randn(1, outputs, device=DEVICE).bfloat16() if residual else None, act,
    )  # fmt: skip
    assert takes(args)
    out = torch.full((1, outputs), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    block_gemv(args, out, plan, pdl=False).run()
    q, scales = quantize_inputs(x, weight, args.norm)
    exact = q.double() * scales.double().repeat_interleave(128, 1)
    assert args.bias is not None
    wanted = exact @ dequantize(weight, torch.float64).T + args.bias.double()
    if act is not None:
        wanted = activate(wanted, act)
    if args.residual is not None:
        wanted = wanted + args.residual.double()
    assert float((out.double() - wanted).norm() / wanted.norm()) < 5e-3


def test_layers_that_the_kernel_supports() -> None:
    args = LinearArgs(torch.ones(1, 512, device=DEVICE).bfloat16(), drawn(16, 512))
    assert takes(args)
    assert plans_of(args)
    refused = [
        replace(args, x=args.x.half()),
        replace(args, x=args.x.repeat(2, 1)),
        replace(args, apart=True),
        replace(args, weight=replace(args.weight, first=8)),
        replace(args, weight=replace(args.weight, format=replace(FORM, inputs="none"))),
        replace(args, norm=RmsScale(torch.ones(512, device=DEVICE), 1e-6)),
    ]
    assert not any(takes(each) for each in refused)
