"""Products with weights in few bits, by every kernel that takes them, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops import RmsScale
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.launch import traits
from quire.ops.triton.products import small
from quire.ops.triton.products.eight_bit import eight_bit_gemm, tile_for
from quire.ops.triton.products.plan import LinearArgs, multiplies, shape_of
from quire.ops.triton.products.round_inputs import quantize_inputs
from quire.ops.triton.products.tune import candidates, refinements
from quire.ops.weight import Weight, WeightFormat

FORMATS = {
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "int8-g128": WeightFormat(torch.int8, scales=torch.bfloat16, group=128),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
    "int4-g128": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
    "int4-g128-zeros": WeightFormat(
        torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True
    ),
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.float32),
}
DEVICE = torch.device("cuda", 0)


def draw(form: WeightFormat, outputs: int, inputs: int) -> Weight:
    """Returns a weight of random values; every 8-bit float is a number."""
    weight = Weight.empty(form, outputs, inputs, DEVICE)
    size = weight.values.shape
    if form.bits:
        weight.values.copy_(torch.randint(0, 256, size, device=DEVICE))
    elif form.values == torch.int8:
        weight.values.copy_(torch.randint(-128, 128, size, device=DEVICE))
    else:
        weight.values.copy_((torch.randn(size, device=DEVICE) * 60).clamp(-448, 448))
        # This includes subnormal numbers.
        weight.values.view(torch.uint8)[:, ::7] %= 8
    assert weight.scales is not None
    weight.scales.copy_(torch.rand(weight.scales.shape, device=DEVICE) * 1e-3 + 1e-3)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 17, weight.zeros.shape, device=DEVICE))
    return weight


def expected(args: LinearArgs) -> Tensor:
    y = args.x.double() @ dequantize(args.weight, torch.float64).T
    if args.bias is not None:
        y = y + args.bias.double()
    if args.gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    elif args.act == "gelu_tanh":
        y = torch.nn.functional.gelu(y, approximate="tanh")
    return y if args.residual is None else y + args.residual.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_plans_give_the_product(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wrong = []
    for rows, outputs, inputs, act, bias, residual in (
        (1, 40, 1024, None, False, True),
        (3, 37, 1280, None, True, False),
        (8, 64, 4096, "silu_and_mul", False, False),
        (5, 48, 768, "gelu_tanh", True, True),
        (20, 64, 1024, "silu_and_mul", True, True),
    ):
        width = outputs * (2 if act == "silu_and_mul" else 1)
        args = LinearArgs(
            x=torch.randn(rows, inputs, device=DEVICE, dtype=dtype),
            weight=draw(FORMATS[name], width, inputs),
            bias=torch.randn(width, device=DEVICE, dtype=dtype) if bias else None,
            residual=torch.randn(rows, outputs, device=DEVICE, dtype=dtype) if residual else None,
            act=act,
        )
        want = expected(args)
        shape = shape_of(args)
        plans = candidates(shape, traits(DEVICE).num_sms)
        assert multiplies(shape) == any(plan.kernel == "mma" for plan in plans) == (rows <= 8)
        # Every plan is compiled separately, so only some of them are tested.
        for plan in [small.choose(args), *plans[::5]]:
            if plan.kernel == "torch" or not small._fits(plan.bk, FORMATS[name].group or 1):
                continue
            got = small.run(args, replace(plan, norm="none")).double()
            error = float((got - want).norm() / want.norm())
            if not error < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]:
                wrong.append((rows, outputs, inputs, plan, error))
    assert not wrong


@pytest.mark.parametrize("name", FORMATS)
def test_the_norm_in_a_gemv_on_tensor_cores(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1024, device=DEVICE, dtype=torch.bfloat16)
    gain = torch.rand(1024, device=DEVICE, dtype=torch.bfloat16) + 0.5
    args = LinearArgs(x=x, weight=draw(FORMATS[name], 48, 1024), norm=RmsScale(gain, 1e-6))
    shape = shape_of(args)
    normed = x.double() * torch.rsqrt(x.double().square().mean() + 1e-6) * gain.double()
    want = normed @ dequantize(args.weight, torch.float64).T
    plans = [plan for plan in candidates(shape, 132) if plan.kernel == "mma"]
    assert bool(plans) == multiplies(shape)
    for plan in plans[::8]:
        (late,) = refinements(plan, shape, norms=True)
        got = small.run(args, late).double()
        assert float((got - want).norm() / want.norm()) < 5e-3, late


@pytest.mark.skipif(
    not (torch.cuda.is_available() and traits(DEVICE).gluon), reason="a kernel for Hopper cards"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_products_by_wgmma(name: str, dtype: torch.dtype) -> None:
    from quire.ops.triton.products import hopper_gemm

    torch.manual_seed(0)
    gain = torch.rand(1024, device=DEVICE, dtype=dtype) + 0.5
    for rows, outputs, inputs, act, norm in (
        (9, 520, 1024, None, RmsScale(gain, 1e-6)),
        (64, 304, 1024, "silu_and_mul", RmsScale(gain, 1e-6)),
        (77, 264, 4096, "gelu_tanh", None),
        (300, 1000, 128, None, None),
        (400, 4096, 640, "silu_and_mul", None),
    ):
        width = outputs * (2 if act == "silu_and_mul" else 1)
        args = LinearArgs(
            x=torch.randn(rows, inputs, device=DEVICE, dtype=dtype),
            weight=draw(FORMATS[name], width, inputs),
            bias=torch.randn(width, device=DEVICE, dtype=dtype),
            norm=norm,
            residual=torch.randn(rows, outputs, device=DEVICE, dtype=dtype),
            act=act,
        )
        form = FORMATS[name]
        if dtype == torch.float16 and form.group and form.scales != torch.float16:
            assert not hopper_gemm.takes(args)
            continue
        assert hopper_gemm.takes(args)
        x = args.x if norm is None else ops.rms_norm(args.x, *norm)
        want = expected(replace(args, x=x))
        limit = {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        first = hopper_gemm.product(args)
        assert float((first.double() - want).norm() / want.norm()) < limit, (rows, outputs)
        # The order of sums does not depend on who comes when.
        again = [hopper_gemm.product(args) for _ in range(5)]
        assert all(torch.equal(first, each) for each in again)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and traits(DEVICE).gluon), reason="a kernel for Hopper cards"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_8_bit_floats_in_groups(dtype: torch.dtype) -> None:
    """Rounded inputs times weights, by wgmma and, of one row, within the product."""
    from quire.ops.triton.products import block_gemv, hopper_blocks

    torch.manual_seed(0)
    form = replace(FORMATS["fp8-g128"], inputs="group")
    gain = torch.rand(1024, device=DEVICE, dtype=dtype) + 0.5
    for rows, outputs, inputs, act, norm in (
        (1, 520, 1024, "silu_and_mul", RmsScale(gain, 1e-6)),
        (9, 520, 1024, None, RmsScale(gain, 1e-6)),
        (64, 304, 1024, "silu_and_mul", RmsScale(gain, 1e-6)),
        (77, 264, 4096, "gelu_tanh", None),
        (300, 1000, 128, None, None),
        (700, 12288, 640, "silu_and_mul", None),
    ):
        width = outputs * (2 if act == "silu_and_mul" else 1)
        weight = draw(form, width, inputs)
        args = LinearArgs(
            x=torch.randn(rows, inputs, device=DEVICE, dtype=dtype),
            weight=weight,
            bias=torch.randn(width, device=DEVICE, dtype=dtype),
            norm=norm,
            residual=torch.randn(rows, outputs, device=DEVICE, dtype=dtype),
            act=act,
        )
        kernel = block_gemv if rows == 1 else hopper_blocks
        if rows == 1 and dtype == torch.float16:
            assert not kernel.takes(args)
            continue
        assert kernel.takes(args)
        q, scales = quantize_inputs(args.x, weight, norm)
        x = q.double() * scales.double().repeat_interleave(128, 1)
        want = expected(replace(args, x=x))
        first = ops.linear(args.x, weight, args.bias, args.residual, norm, act)
        limit = {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        assert float((first.double() - want).norm() / want.norm()) < limit, (rows, outputs)
        # The order of sums does not depend on who comes when.
        again = [kernel.product(args) for _ in range(5)]
        assert all(torch.equal(first, each) for each in again)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-g128"])
def test_products_in_8_bits(name: str) -> None:
    """Rounded inputs times weights, by the kernel for any card."""
    torch.manual_seed(0)
    form = replace(FORMATS[name], inputs="group" if FORMATS[name].group else "token")
    for rows, outputs, inputs, act in (
        (5, 512, 1024, None),
        (130, 512, 1024, "silu_and_mul"),
        (700, 4096, 4096, None),
    ):
        x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
        args = LinearArgs(x=x, weight=draw(form, outputs, inputs), act=act)
        q, scales = quantize_inputs(args.x, args.weight, None)
        found = eight_bit_gemm(q, scales, args, tile_for(rows, args)).double()
        x = q.double() * scales.double().repeat_interleave(inputs // scales.shape[1], 1)
        want = expected(replace(args, x=x))
        assert float((found - want).norm() / want.norm()) < 5e-3, (rows, outputs)


def test_rows_that_begin_anywhere_are_read_by_another_kernel() -> None:
    weight = draw(FORMATS["int8"], 32, 1024)
    x = torch.randn(1, 1032, device=DEVICE, dtype=torch.bfloat16)[:, 4:1028]
    args = LinearArgs(x=x, weight=weight)
    assert not multiplies(shape_of(args))
    got = ops.linear(x, weight).double()
    assert float((got - expected(args)).norm() / expected(args).norm()) < 5e-3
