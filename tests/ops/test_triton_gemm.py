"""GEMV and skinny GEMM against float64, every prologue and epilogue, ragged shapes.

On a GPU the kernels are compiled; on a CPU they run under Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.errors import ConfigError
from quire.ops.arguments import RmsScale
from quire.ops.reference import rms_norm
from quire.ops.reference.quantized import dequantize, quantize_rows, row_scales
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GATED, TORCH, GemmPlan
from quire.ops.triton.products.skinny import Workspace
from quire.ops.triton.products.small import LinearArgs
from quire.ops.weight import Weight, WeightFormat
from tests.slow import WHOLE, slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}


def _draw(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def int8(weight: Tensor) -> Weight:
    """Returns the weight in 8 bits, with outputs of different scales."""
    weight = weight * torch.logspace(0, 0.5, len(weight), device=DEVICE).unsqueeze(1)
    scales = row_scales(weight, torch.int8)
    format = WeightFormat(torch.int8, scales=torch.float32)
    return Weight(format, quantize_rows(weight, scales, torch.int8), scales)


def make_args(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float32, *, norm: str | None = None,
    act: str | None = None, bias: bool = False, residual: bool = False, seed: int = 0,
    quantized: bool = False,
) -> LinearArgs:  # fmt: skip
    rows = 2 * n if act in GATED else n
    gain = _draw(k, dtype=dtype, seed=seed + 1, scale=0.3)
    weight = _draw(rows, k, dtype=dtype, seed=seed + 3, scale=k**-0.5)
    return LinearArgs(
        x=_draw(m, k, dtype=dtype, seed=seed + 2, scale=2.0),
        weight=int8(weight) if quantized else Weight.plain(weight),
        bias=_draw(rows, dtype=dtype, seed=seed + 4) if bias else None,
        norm=None if norm is None else RmsScale(gain + 1, 1e-5),
        residual=_draw(m, n, dtype=dtype, seed=seed + 5) if residual else None,
        act=act,
    )


def reference(args: LinearArgs) -> Tensor:
    """The layer in float64."""
    x = args.x.double()
    if args.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.norm.eps)
        x = x * args.norm.weight.double()
    y = x @ dequantize(args.weight, torch.float64).T
    if args.bias is not None:
        y = y + args.bias.double()
    acts = {
        "": lambda v: v,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    }
    if args.gated:
        gate, up = y.chunk(2, -1)
        y = acts[args.act_name](gate) * up
    else:
        y = acts[args.act_name](y)
    return y if args.residual is None else y + args.residual.double()


def check(args: LinearArgs, plan: GemmPlan, tolerance: float | None = None) -> Tensor:
    expected = reference(args)
    out = torch.full(expected.shape, float("nan"), dtype=args.x.dtype, device=DEVICE)
    assert small.run(args, plan, out=out) is out
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (tolerance or TOLERANCE[args.x.dtype])
    return out


GEMV = GemmPlan("gemv", bm=1, bn=4, bk=64, warps=4)
SKINNY = GemmPlan("skinny", bm=16, bn=16, bk=32, warps=4, stages=3)
PLANS = {
    "gemv": GEMV,
    "gemv-whole-row": GemmPlan("gemv", bm=2, bn=2, bk=128, warps=4),
    "gemv-stages": GemmPlan("gemv", bm=4, bn=2, bk=32, warps=4, stages=3),
    "skinny": SKINNY,
    "skinny-split": GemmPlan("skinny", bm=16, bn=16, bk=32, warps=4, stages=3, split_k=2),
    "skinny-swap": GemmPlan("skinny", bm=16, bn=32, bk=32, warps=4, stages=3, swap=True),
}


@pytest.mark.parametrize(
    ("bias", "residual"), [(False, False), slow(True, False), slow(False, True), (True, True)]
)
@pytest.mark.parametrize("act", [None, "silu_and_mul"])
@pytest.mark.parametrize("norm", [None, "exact", "late"])
@pytest.mark.parametrize("name", PLANS)
def test_every_combination(
    name: str, norm: str | None, act: str | None, bias: bool, residual: bool
) -> None:
    plan = PLANS[name]
    rows = min(plan.bm, 5)
    args = make_args(rows, 40, 96, norm=norm, act=act, bias=bias, residual=residual)
    plan = GemmPlan(**{**_fields(plan), "norm": norm or "none"})
    check(args, plan)


def _fields(plan: GemmPlan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in GemmPlan.__dataclass_fields__}


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("plan", [GEMV, SKINNY], ids=lambda plan: plan.kernel)
def test_activations(plan: GemmPlan, act: str) -> None:
    check(make_args(1, 24, 64, act=act), plan)


@pytest.mark.parametrize("plan", [GEMV, SKINNY], ids=lambda plan: plan.kernel)
def test_norm_weights_in_fp32_round_once(plan: GemmPlan) -> None:
    """States are rounded exactly where the twin rounds them."""
    args = make_args(1, 24, 64, torch.float16, norm="exact")
    assert args.norm is not None
    wide = RmsScale(args.norm.weight.float() + 2**-9, args.norm.eps)
    normed = replace(args, x=rms_norm(args.x, *wide), norm=None)
    exact = GemmPlan(**{**_fields(plan), "norm": "exact"})
    assert torch.equal(small.run(replace(args, norm=wide), exact), small.run(normed, plan))


@pytest.mark.parametrize("norm", [None, "exact", "late"])
@pytest.mark.parametrize("act", [None, "silu_and_mul"])
@pytest.mark.parametrize("name", PLANS)
def test_int8_weights(name: str, act: str | None, norm: str | None) -> None:
    plan = GemmPlan(**{**_fields(PLANS[name]), "norm": norm or "none"})
    both = norm is None or WHOLE in os.environ
    for dtype in (torch.float32, torch.bfloat16)[: 1 + both]:
        args = make_args(
            min(plan.bm, 5), 37, 100, dtype, norm=norm, act=act, bias=True, residual=True,
            quantized=True,
        )  # fmt: skip
        # The normed inputs are rounded too, and the gate multiplies their error.
        check(args, plan, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 33), (17, 100), (33, 64)])
@pytest.mark.parametrize("name", PLANS)
def test_ragged_shapes(name: str, n: int, k: int) -> None:
    args = make_args(PLANS[name].bm, n, k, norm="exact", act="silu_and_mul", residual=True)
    check(args, PLANS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemv-whole-row", "skinny", "skinny-split", "skinny-swap"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    for norm in (None, "exact", "late"):
        args = make_args(2, 40, 96, dtype, norm=norm, bias=True, residual=norm is None)
        check(args, GemmPlan(**{**_fields(PLANS[name]), "norm": norm or "none"}))


def test_fewer_rows_than_the_tile_and_strided_operands() -> None:
    wide = make_args(3, 20, 160, seed=7)
    args = LinearArgs(x=wide.x[:, 32:128], weight=Weight.plain(wide.weight.values[:, 64:160]))
    for name in ("gemv-stages", "skinny", "skinny-split"):
        check(args, PLANS[name])


def test_more_rows_than_one_tile() -> None:
    args = make_args(37, 24, 64, norm="exact", residual=True)
    check(args, PLANS["skinny"])
    check(args, PLANS["skinny-split"])


def test_out_may_be_the_residual_and_wider_than_x() -> None:
    args = make_args(2, 24, 64, torch.bfloat16, residual=True)
    expected = reference(args)
    assert args.residual is not None
    small.run(args, PLANS["gemv-whole-row"], out=args.residual)
    assert (args.residual.double() - expected).norm() / expected.norm() < 8e-3
    logits = small.run(
        make_args(2, 24, 64, torch.bfloat16), PLANS["skinny"], out_dtype=torch.float32
    )
    assert logits.dtype == torch.float32


def test_split_counters_return_to_zero_and_the_order_is_fixed() -> None:
    args = make_args(5, 40, 192)
    workspace = Workspace.allocate(DEVICE)
    plan = GemmPlan("skinny", bm=16, bn=16, bk=32, split_k=3)
    first = small.run(args, plan, workspace=workspace)
    assert int(workspace.counters.abs().sum()) == 0
    for _ in range(3):
        assert torch.equal(small.run(args, plan, workspace=workspace), first)


def test_a_row_does_not_depend_on_its_batch_with_the_fixed_plan() -> None:
    args = make_args(70, 64, 64)
    together = small.run_fixed(args, rms_norm=lambda x, norm: x)
    for row in (0, 17, 69):
        alone = LinearArgs(x=args.x[row : row + 1], weight=args.weight)
        assert torch.equal(small.run_fixed(alone, rms_norm=lambda x, norm: x)[0], together[row])


def test_small_linear_takes_the_separate_norm_or_declines() -> None:
    calls = []

    def rms_norm(x: Tensor, norm: RmsScale) -> Tensor:
        calls.append(x.shape)
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
        return ((x.float() * scale).to(x.dtype) * norm.weight).to(x.dtype)

    args = make_args(1, 24, 64, torch.float16, norm="exact")
    y = small.small_linear(args, rms_norm=rms_norm)
    assert y is not None
    assert not calls
    args = make_args(8, 24, 64, torch.float16, norm="exact")
    y = small.small_linear(args, rms_norm=rms_norm)
    assert y is not None
    assert len(calls) == 1
    assert (y.double() - reference(args)).norm() / reference(args).norm() < 1e-2
    assert small.small_linear(make_args(600, 8, 16), rms_norm=rms_norm) is None


def test_no_rows() -> None:
    assert small.run(make_args(0, 8, 16), GEMV).shape == (0, 8)


def test_bad_input_is_a_typed_error() -> None:
    args = make_args(2, 8, 16)
    with pytest.raises(ConfigError, match="for 1 rows, but x has 2"):
        small.run(args, GEMV)
    with pytest.raises(ConfigError, match="not a kernel of this package"):
        small.run(args, TORCH)
    with pytest.raises(ConfigError, match="unknown activation"):
        small.run(LinearArgs(args.x, args.weight, act="swish"), SKINNY)
    with pytest.raises(ConfigError, match="does not fit"):
        small.run(LinearArgs(args.x[:, :8], args.weight), SKINNY)
    with pytest.raises(ConfigError, match="contiguous"):
        small.run(LinearArgs(args.x[:, ::2], Weight.plain(args.weight.values[:, ::2])), SKINNY)
    five = WeightFormat(torch.int8, scales=torch.float32, group=5)
    with pytest.raises(ConfigError, match="no kernel loads weights of the format int8-g5"):
        small.run(LinearArgs(args.x, Weight.empty(five, 8, 16, DEVICE)), SKINNY)
    with pytest.raises(ConfigError, match="residual"):
        small.run(LinearArgs(args.x, args.weight, residual=args.x), SKINNY)
