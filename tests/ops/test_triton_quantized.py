"""Kernels over weights in few bits against float64: every format they load, every tile, ragged
shapes.

On a GPU the kernels are compiled; on a CPU they run under Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.errors import ConfigError
from quire.ops.reference.quantized import dequantize, round_inputs
from quire.ops.triton.launch import DeviceTraits
from quire.ops.triton.linear import linear
from quire.ops.triton.products import quantized_tiles, small
from quire.ops.triton.products.plan import GemmPlan, Shape, shape_of, streams
from quire.ops.triton.products.round_inputs import round_inputs as rounded_by_kernel
from quire.ops.triton.products.small import LinearArgs
from quire.ops.triton.products.table import heuristic, key_of
from quire.ops.weight import Weight, WeightFormat
from tests.ops.test_triton_gemm import DEVICE, PLANS, TOLERANCE, _fields, check, make_args

FORMATS = {
    "uint4": WeightFormat(torch.uint8, bits=4, scales=torch.float32),
    "uint4-zeros": WeightFormat(torch.uint8, bits=4, scales=torch.float16, zeros=True),
    "uint4-g16": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=16),
    "uint4-g32-zeros": WeightFormat(
        torch.uint8, bits=4, scales=torch.bfloat16, group=32, zeros=True
    ),
    "uint4-g128-zeros": WeightFormat(
        torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True
    ),
    "int8-g32": WeightFormat(torch.int8, scales=torch.float16, group=32),
    "int8-zeros": WeightFormat(torch.int8, scales=torch.float32, zeros=True),
    "int8-g64-zeros": WeightFormat(torch.int8, scales=torch.float32, group=64, zeros=True),
    "float8_e4m3fn": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "float8_e4m3fn-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
}
H200 = DeviceTraits((9, 0), 132, 232448, pdl=True, bf16=True)


def drawn(format: WeightFormat, outputs: int, inputs: int, before: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = Weight.empty(format, outputs, inputs, torch.device("cpu"), before=before)
    low, high = (0, 256) if format.bits else (-127, 128)
    integers = torch.randint(low, high, weight.values.shape, generator=generator)
    values = integers.float() / (40 if format.values.is_floating_point else 1)
    weight.values.copy_(values.to(format.values))
    assert weight.scales is not None
    top = 16 if format.bits else 100
    unit = (torch.rand(weight.scales.shape, generator=generator) + 0.5) / (top * inputs**0.5)
    weight.scales.copy_(unit)
    if weight.zeros is not None:
        low, high = (0, 16) if format.bits else (-128, 128)
        weight.zeros.copy_(torch.randint(low, high, weight.zeros.shape, generator=generator))
    moved = (None if t is None else t.to(DEVICE) for t in (weight.scales, weight.zeros))
    scales, zeros = moved
    return replace(weight, values=weight.values.to(DEVICE), scales=scales, zeros=zeros)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, plan: str) -> None:
    """Norm in front, bias, activation and residual behind; the last tile and group are cut."""
    tile = PLANS[plan]
    act = "silu_and_mul" if plan in ("gemv", "skinny-split", "skinny-swap") else None
    norm, dtype = ("late", torch.float32) if "zeros" in name else ("exact", torch.bfloat16)
    args = make_args(min(tile.bm, 3), 13, 152, dtype, norm=norm, act=act, bias=True, residual=True)
    args = replace(args, weight=drawn(FORMATS[name], args.weight.outputs, 152))
    assert FORMATS[name].key == name
    check(args, GemmPlan(**{**_fields(tile), "norm": norm}), 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_may_be_smaller_or_larger_than_groups(name: str) -> None:
    for bk in (32, 256):
        args = make_args(1, 6, 256)
        args = replace(args, weight=drawn(FORMATS[name], 6, 256))
        check(args, GemmPlan("gemv", bm=1, bn=2, bk=bk), 1e-5)
        check(args, GemmPlan("skinny", bm=16, bn=16, bk=bk), 1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_whole_weights(name: str) -> None:
    weight = drawn(FORMATS[name], 21, 312)
    expected = dequantize(weight, torch.float64)
    found = quantized_tiles.dequantize(weight, torch.float32).double()
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    own = quantized_tiles.dequantize(weight.rows(3, 9), torch.bfloat16).double()
    assert (own - expected[3:9]).abs().max() <= 8e-3 * expected.abs().max()


@pytest.mark.parametrize("rows", [1, 9, 70, 300])
@pytest.mark.parametrize("name", ["uint4-g128-zeros", "float8_e4m3fn-g128", "float8_e4m3fn"])
def test_any_number_of_rows(name: str, rows: int) -> None:
    args = make_args(rows, 16, 256, torch.float16, bias=True)
    weight = drawn(FORMATS[name], 16, 256)
    y = linear(args.x, weight, args.bias).double()
    expected = args.x.double() @ dequantize(weight, torch.float64).T + args.bias.double()
    assert (y - expected).norm() / expected.norm() < 3e-3


def test_weights_no_kernel_loads_are_dequantized_whole() -> None:
    cut = drawn(FORMATS["uint4-g32-zeros"], 8, 40, before=24)
    odd = drawn(FORMATS["uint4-g16"], 8, 44)
    e2m1 = WeightFormat(torch.uint8, bits=4, scales=torch.float8_e8m0fnu, group=32, code="e2m1")
    ordered = WeightFormat(torch.uint8, bits=4, scales=torch.float32, group=32, ordered=True)
    mixed = Weight.empty(ordered, 8, 64, DEVICE)
    assert mixed.groups is not None
    assert mixed.scales is not None
    mixed.values.fill_(0x5A)
    mixed.scales.copy_(torch.rand(8, 2))
    mixed.groups.copy_(torch.arange(64) % 2)
    micro = Weight.empty(e2m1, 8, 64, DEVICE)
    micro.clear()
    micro.values.fill_(0x5A)
    for weight in (cut, odd, mixed, micro):
        assert not streams(weight)
        x = torch.randn(3, weight.inputs, device=DEVICE)
        expected = x.double() @ dequantize(weight, torch.float64).T
        torch.testing.assert_close(linear(x, weight).double(), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ConfigError, match="no kernel loads"):
            small.run(LinearArgs(x, weight), PLANS["skinny"])


@pytest.mark.parametrize("inputs", ["token", "tensor", "group"])
@pytest.mark.parametrize("values", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_inputs(values: torch.dtype, inputs: str, dtype: torch.dtype) -> None:
    group = 32 if inputs == "group" else 0
    format = WeightFormat(values, scales=torch.float32, group=group, inputs=inputs)
    for before in (0, 8):
        weight = Weight.empty(format, 4, 104, DEVICE, before=before)
        if weight.input_scale is not None:
            weight.input_scale.fill_(0.02)
        x = (torch.randn(5, 104) * torch.tensor([[1.0], [100.0], [1e-3], [0.0], [3.0]])).to(dtype)
        x = x.to(DEVICE)
        expected, found = round_inputs(x, weight), rounded_by_kernel(x, weight)
        assert found.dtype == dtype
        rtol = 1e-2 if dtype.itemsize == 2 else 1e-6
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


def test_a_norm_on_tensor_cores_is_of_one_row_and_of_the_weights_dtype() -> None:
    plan = GemmPlan("mma", bm=8, bn=16, bk=128, warps=4, norm="late")
    weight = drawn(FORMATS["uint4-g128-zeros"], 32, 512)
    one = replace(make_args(1, 32, 512, torch.bfloat16, norm="late"), weight=weight)
    launch = small.prepare(one, plan, torch.empty(1, 32, dtype=torch.bfloat16), pdl=False)
    assert launch.options["NORM"] is True
    assert one.norm is not None
    wide = replace(one, norm=one.norm._replace(weight=one.norm.weight.float()))
    two = replace(make_args(2, 32, 512, torch.bfloat16, norm="late"), weight=weight)
    for args in (wide, two, replace(one, x=one.x.half())):
        with pytest.raises(ConfigError, match="does not support this layer"):
            small.prepare(args, plan, torch.empty(len(args.x), 32, dtype=args.x.dtype), pdl=False)


def test_rules_of_thumb_for_few_bits() -> None:
    format = FORMATS["uint4-g128-zeros"]
    for m in (1, 4, 8, 64, 128, 256):
        for n, k, gated in ((4096, 4096, False), (12288, 4096, True), (256, 128, False)):
            shape = Shape(m, n, k, torch.bfloat16, True, gated, format)
            plan = heuristic(shape, H200)
            assert plan.kernel == ("integer" if m == 1 else "mma" if m <= 8 else "skinny")
            assert plan.kernel != "skinny" or plan.bm <= 128
            # The tensor-core kernel does not support unaligned rows.
            plan = heuristic(shape._replace(aligned=False), H200)
            assert plan.kernel == ("gemv" if m <= 4 else "skinny")
            rows = plan.bn * (2 if gated else 1)
            if plan.kernel == "gemv":
                assert 2 <= rows <= 8
                assert plan.bk == min(k, 1024)
            else:
                assert plan.bm <= 128
    shape = Shape(1, 4096, 4096, torch.bfloat16, False, False, format)
    assert key_of(shape) == "bfloat16/m1/n4096/k4096/uint4-g128-zeros"
    args = make_args(1, 8, 128)
    token = replace(format, inputs="token")
    assert shape_of(replace(args, weight=drawn(token, 8, 128))).format == format
    with pytest.raises(ConfigError, match="tiles of 48 inputs cut groups of 128"):
        small.run(replace(args, weight=drawn(format, 8, 128)), GemmPlan("gemv", bm=1, bn=2, bk=48))
