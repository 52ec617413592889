"""Products of few rows and weights of 4 or 8 bits in integers, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.errors import ConfigError
from quire.ops.arguments import RmsScale
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.launch import DeviceTraits
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GemmPlan, LinearArgs, Shape, counts, integer_segments
from quire.ops.triton.products.table import heuristic, plan_for
from quire.ops.weight import Weight, WeightFormat
from tests.ops import ptx

if not torch.cuda.is_available():
    ptx.install()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128)
ZEROS = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True)
BYTES = WeightFormat(torch.int8, scales=torch.float32)
# Rows of x, outputs, inputs, warps, chunks of each, programs.
WHOLE = 1, 40, 1024, 2, 4, 0
TURNS = 1, 40, 1024, 1, 8, 2
CUT = 3, 20, 2560, 2, 12, 1
FOUR = 4, 33, 1536, 4, 4, 0
# Groups not in fours: one chunk is missing; two rows in three segments, two of which lack a chunk.
NINE = 1, 40, 1152, 2, 5, 0
SEGMENTS = 2, 40, 2048, 2, 3, 1
# With 8 bits: all at once, and three rows in two segments, one chunk missing.
SHORT = 1, 24, 512, 2, 2, 1
LONG = 3, 20, 1920, 4, 2, 1
Case = tuple[int, int, int, int, int, int]


def drawn(form: WeightFormat, outputs: int, inputs: int) -> Weight:
    weight = Weight.empty(form, outputs, inputs, DEVICE)
    weight.values.view(torch.uint8).random_(0, 256)
    assert weight.scales is not None
    weight.scales.uniform_(0.005, 0.015).div_(1 if form.bits else 16)
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
        (NINE, ZEROS, "silu_and_mul", True),
        (SEGMENTS, PLAIN, None, False),
        (SHORT, BYTES, "silu_and_mul", True),
        (LONG, BYTES, None, False),
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
    found = small.run(args, plan).double()
    wide = x.double()
    if scale is not None:
        # x times the norm's weights is rounded before the sum of squares is known.
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + scale.eps)
        wide = (x * scale.weight).double() * inverse
    y = wide @ dequantize(weight, torch.float64).T + bias.double()
    if act:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    y = y + residual.double()
    assert (found - y).norm() / y.norm() < 6e-3
    x[0, 300] = torch.nan
    assert small.run(args, plan)[0].isnan().all()


def test_the_kernel_is_chosen_for_one_row() -> None:
    """Warps have all chunks of a row in as few segments as registers and shared memory allow."""
    card = DeviceTraits((9, 0), 132, 1 << 17, pdl=True, bf16=True)
    for form, inputs, warps, count, segments in (
        (ZEROS, 512, 1, 4, 1), (ZEROS, 3072, 4, 6, 1), (ZEROS, 12288, 16, 6, 1),
        (ZEROS, 5120, 8, 5, 1), (ZEROS, 8960, 8, 9, 1), (ZEROS, 25600, 8, 13, 2),
        (BYTES, 4096, 8, 4, 1),
    ):  # fmt: skip
        shape = Shape(1, 4096, inputs, torch.bfloat16, True, False, form)
        plan = heuristic(shape, card)
        assert (plan.kernel, plan.norm) == ("integer", "late")
        assert (plan.warps, plan.stages, integer_segments(inputs, plan)) == (warps, count, segments)
    shape = Shape(1, 4096, 4096, torch.bfloat16, format=ZEROS)
    for other in (
        shape._replace(m=2), shape._replace(dtype=torch.float16),
        shape._replace(k=12288, format=BYTES),
    ):  # fmt: skip
        assert heuristic(other, card).kernel == "mma"
    assert heuristic(shape, replace(card, capability=(8, 0))).kernel == "mma"
    # A key does not tell the dtype of scales.
    wide = replace(ZEROS, scales=torch.float32)
    assert plan_for(shape, "NVIDIA H200", card).kernel == "integer"
    assert plan_for(shape._replace(format=wide), "NVIDIA H200", card).kernel == "mma"


def test_layers_that_the_kernel_supports() -> None:
    shape = Shape(1, 4096, 4096, torch.bfloat16, format=ZEROS)
    assert counts(shape)
    assert counts(shape._replace(m=4))
    assert counts(shape._replace(k=12288))
    assert counts(shape._replace(k=4096 + 128))
    assert counts(shape._replace(format=BYTES))
    for other in (
        shape._replace(m=5), shape._replace(dtype=torch.float16), shape._replace(k=4096 + 64),
        shape._replace(format=replace(ZEROS, group=64)),
        shape._replace(format=replace(BYTES, group=128)),
        shape._replace(format=replace(BYTES, values=torch.float8_e4m3fn)),
        shape._replace(aligned=False),
    ):  # fmt: skip
        assert not counts(other)
    args = LinearArgs(
        torch.zeros(5, 512, dtype=torch.bfloat16, device=DEVICE), drawn(ZEROS, 8, 512)
    )
    with pytest.raises(ConfigError, match="does not support"):
        small.run(args, GemmPlan("integer", bm=4, bn=16, bk=128, warps=1, stages=4))
