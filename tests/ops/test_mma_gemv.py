"""Products of two to sixteen rows and weights of 16 bits on tensor cores, against float64."""

from __future__ import annotations

import pytest
import torch

from quire.ops.arguments import RmsScale
from quire.ops.triton.launch import DeviceTraits
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GemmPlan, LinearArgs, multiplies, norms_late, shape_of
from quire.ops.triton.products.table import heuristic
from quire.ops.weight import Weight
from tests.ops import ptx

if not torch.cuda.is_available():
    ptx.install()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CARD = DeviceTraits((9, 0), 132, 1 << 17, pdl=True, bf16=True)
# Rows of x, outputs, inputs, warps, chunks of each.
WHOLE = 2, 40, 512, 4, 4
TURNS = 5, 33, 768, 2, 4
CUT = 8, 24, 352, 4, 2
TWO_BLOCKS = 13, 40, 512, 2, 4


@pytest.mark.parametrize(
    ("case", "dtype", "act", "norm"),
    [
        (WHOLE, torch.bfloat16, None, True),
        (TURNS, torch.bfloat16, "silu_and_mul", True),
        (CUT, torch.bfloat16, "gelu_tanh", True),
        (CUT, torch.float16, None, False),
        (TWO_BLOCKS, torch.bfloat16, None, True),
        (TWO_BLOCKS, torch.float16, "silu_and_mul", False),
    ],
)
def test_products(
    case: tuple[int, int, int, int, int], dtype: torch.dtype, act: str | None, norm: bool
) -> None:
    torch.manual_seed(0)
    rows, outputs, inputs, warps, count = case
    gated = act == "silu_and_mul"
    width = outputs * (2 if gated else 1)
    weight = Weight.plain(torch.randn(width, inputs, device=DEVICE).to(dtype) / 16)
    x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    x *= torch.arange(1, rows + 1, device=DEVICE).to(dtype)[:, None]
    bias, residual = (
        torch.randn(*size, device=DEVICE).to(dtype) for size in ((width,), (rows, outputs))
    )
    scale = RmsScale(torch.rand(inputs, device=DEVICE).to(dtype) + 0.5, 1e-6) if norm else None
    args = LinearArgs(x, weight, bias, scale, residual, act)  # type: ignore[arg-type]
    plan = GemmPlan(
        "mma", bm=8 if rows <= 8 else 16, bn=8 if gated else 16, bk=32, warps=warps, stages=count,
        norm="late" if norm else "none",
    )  # fmt: skip
    found = small.run(args, plan).double()
    wide = x.double()
    if scale is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + scale.eps)
        wide = wide * scale.weight.double()
    y = wide @ weight.values.double().T + bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    elif act:
        y = torch.nn.functional.gelu(y, approximate="tanh")
    y = y + residual.double()
    assert (found - y).norm() / y.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-3)


def test_the_kernel_is_chosen_for_few_rows() -> None:
    def args(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> LinearArgs:
        weight = Weight.plain(torch.empty(64, inputs, dtype=dtype))
        return LinearArgs(torch.empty(rows, inputs, dtype=dtype), weight)

    for rows, kernel in ((1, "gemv"), (2, "mma"), (8, "mma"), (17, "skinny")):
        assert heuristic(shape_of(args(rows, 1024)), CARD).kernel == kernel
    # Rows of 16 bits that begin between multiples of 16 bytes, a part of a chunk, and fp32.
    assert not multiplies(shape_of(args(2, 1016)))
    assert not multiplies(shape_of(args(2, 1024, torch.float32)))
    wide = args(2, 1056)
    cut = LinearArgs(wide.x[:, 8:1032], Weight.plain(wide.weight.values[:, 4:1028]))
    assert not multiplies(shape_of(cut))
    assert norms_late(shape_of(args(8, 1024)))
    assert not norms_late(shape_of(args(8, 1024, torch.float16)))
