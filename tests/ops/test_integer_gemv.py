"""Products of few rows and 4-bit weights in integers, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.errors import ConfigError
from quire.ops.arguments import RmsScale
from quire.ops.reference.quantized import dequantize
from quire.ops.triton import gemm
from quire.ops.triton.gemm_plan import GemmPlan, LinearArgs, Shape, counts
from quire.ops.triton.gemm_table import heuristic, plan_for
from quire.ops.triton.launch import DeviceTraits
from quire.ops.weight import Weight, WeightFormat
from tests.ops import ptx

if not torch.cuda.is_available():
    ptx.install()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128)
ZEROS = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True)
# Rows of x, outputs, inputs, warps, chunks of each, programs.
WHOLE = 1, 40, 1024, 2, 4, 0
TURNS = 1, 40, 1024, 1, 8, 2
CUT = 3, 20, 2560, 2, 12, 1
FOUR = 4, 33, 1536, 4, 4, 0
Case = tuple[int, int, int, int, int, int]


def drawn(form: WeightFormat, outputs: int, inputs: int) -> Weight:
    weight = Weight.empty(form, outputs, inputs, DEVICE)
    weight.values.random_(0, 256)
    assert weight.scales is not None
    weight.scales.uniform_(0.005, 0.015)
    if weight.zeros is not None:
        weight.zeros.random_(0, 17)
    return weight


@pytest.mark.parametrize(
    ("case", "form", "act", "norm"),
    [
        (WHOLE, ZEROS, None, False),
        (TURNS, PLAIN, "silu_and_mul", True),
        (CUT, PLAIN, "silu_and_mul", False),
        (FOUR, ZEROS, None, False),
    ],
)
def test_products(case: Case, form: WeightFormat, act: str | None, norm: bool) -> None:
    """Inputs of a group may be far larger than others, tiny, or all 0."""
    torch.manual_seed(0)
    rows, outputs, inputs, warps, count, programs = case
    weight = drawn(form, outputs * (2 if act else 1), inputs)
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    x[:, 7] *= 200
    x[:, 128:256] = 0
    x[:, -128:] *= 1e-3
    bias, residual = (
        torch.randn(*size, device=DEVICE).bfloat16()
        for size in ((weight.outputs,), (rows, outputs))
    )
    scale = RmsScale(torch.rand(inputs, device=DEVICE).bfloat16() + 0.5, 1e-6) if norm else None
    args = LinearArgs(x, weight, bias, scale, residual, act)  # type: ignore[arg-type]
    plan = GemmPlan(
        "integer", bm=4, bn=8 if act else 16, bk=128, warps=warps, stages=count,
        programs=programs, norm="late" if norm else "none",
    )  # fmt: skip
    found = gemm.run(args, plan).double()
    wide = x.double()
    if scale is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + scale.eps)
        wide = wide * scale.weight.double()
    y = wide @ dequantize(weight, torch.float64).T + bias.double()
    if act:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    y = y + residual.double()
    assert (found - y).norm() / y.norm() < 6e-3
    x[0, 300] = torch.nan
    assert gemm.run(args, plan)[0].isnan().all()


def test_it_is_chosen_for_one_row() -> None:
    """All of a row is under way at once, or another kernel is chosen."""
    card = DeviceTraits((9, 0), 132, 1 << 17, pdl=True, bf16=True)
    for inputs, even in ((512, True), (3072, True), (12288, True), (5120, False), (25600, False)):
        shape = Shape(1, 4096, inputs, torch.bfloat16, True, False, ZEROS)
        plan = heuristic(shape, card)
        assert (plan.kernel == "integer") == even
        assert not even or plan.warps * plan.stages * 128 == inputs
        assert not even or plan.norm == "late"
    shape = Shape(1, 4096, 4096, torch.bfloat16, format=ZEROS)
    for other in (shape._replace(m=2), shape._replace(dtype=torch.float16)):
        assert heuristic(other, card).kernel == "mma"
    assert heuristic(shape, replace(card, capability=(8, 0))).kernel == "mma"
    # A key does not tell the dtype of scales.
    wide = replace(ZEROS, scales=torch.float32)
    assert plan_for(shape, "NVIDIA H200", card).kernel == "integer"
    assert plan_for(shape._replace(format=wide), "NVIDIA H200", card).kernel == "mma"


def test_what_it_takes() -> None:
    shape = Shape(1, 4096, 4096, torch.bfloat16, format=ZEROS)
    assert counts(shape)
    assert counts(shape._replace(m=4))
    assert counts(shape._replace(k=12288))
    for other in (
        shape._replace(m=5), shape._replace(dtype=torch.float16), shape._replace(k=4096 + 128),
        shape._replace(m=2, k=12288), shape._replace(format=replace(ZEROS, group=64)),
        shape._replace(format=WeightFormat(torch.int8, scales=torch.float32)),
        shape._replace(aligned=False),
    ):  # fmt: skip
        assert not counts(other)
    args = LinearArgs(
        torch.zeros(5, 512, dtype=torch.bfloat16, device=DEVICE), drawn(ZEROS, 8, 512)
    )
    with pytest.raises(ConfigError, match="do not take"):
        gemm.run(args, GemmPlan("integer", bm=4, bn=16, bk=128, warps=1, stages=4))
