"""Weights in few bits against float64: every format the twin knows, and the order of the steps
after the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.reference.quantized import dequantize, quantize_rows, row_scales

FORMATS = {
    "int8": ops.WeightFormat(torch.int8, scales=torch.float32),
    "int8-g16": ops.WeightFormat(torch.int8, scales=torch.float32, group=16),
    "float8_e4m3fn-g32": ops.WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=32),
    "uint4-g16": ops.WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=16),
    "uint4-g16-zeros": ops.WeightFormat(
        torch.uint8, bits=4, scales=torch.float32, group=16, zeros=True
    ),
}


def drawn(format: ops.WeightFormat, outputs: int, inputs: int, before: int = 0) -> ops.Weight:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = ops.Weight.empty(format, outputs, inputs, torch.device("cpu"), before=before)
    low = 0 if format.values == torch.uint8 else -100
    integers = torch.randint(low, 128, weight.values.shape, generator=generator)
    weight.values.copy_(integers.to(format.values))
    assert weight.scales is not None
    weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator) + 0.5)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 16, weight.zeros.shape, generator=generator))
    return weight


def exact(weight: ops.Weight) -> Tensor:
    """Returns the weights in float64, one by one."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=torch.float64)
    scales, zeros, format = weight.scales, weight.zeros, weight.format
    assert scales is not None
    stored = weight.values.double()
    for row in range(weight.outputs):
        for column in range(weight.inputs):
            group = (weight.first + column) // format.group if format.group else 0
            value = float(stored[row, column // format.packed])
            if format.bits == 4:
                value = int(value) >> (4 * (column % 2)) & 15
            zero = format.zero if zeros is None else float(zeros[row, group])
            out[row, column] = (value - zero) * float(scales[row, group])
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("before", [0, 8, 40])
def test_formats_dequantize_as_defined(name: str, before: int) -> None:
    """A rank's share of the inputs may begin anywhere in a group."""
    format = FORMATS[name]
    assert format.key == name
    weight = drawn(format, 6, 56, before)
    expected = exact(weight)
    torch.testing.assert_close(dequantize(weight, torch.float64), expected, rtol=1e-12, atol=0)
    rows = dequantize(weight.rows(2, 5), torch.float64)
    torch.testing.assert_close(rows, expected[2:5], rtol=1e-12, atol=0)
    x = torch.randn(3, 56, dtype=torch.float64)
    torch.testing.assert_close(ops.linear(x, weight), x @ expected.t())
    assert weight.scales is not None
    held = weight.values.nbytes + weight.scales.nbytes
    held += 0 if weight.zeros is None else weight.zeros.nbytes
    if not before:
        assert format.weight_bytes(6, 56) == held


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [None, "gelu", "silu_and_mul"])
def test_steps_after_the_product_run_in_order(dtype: torch.dtype, act: str | None) -> None:
    """First the scales, then the bias, which is not scaled, then the activation, then the
    residual."""
    weight = drawn(FORMATS["int8"], 12, 20)
    weight = ops.Weight(weight.format, weight.values, weight.scales * 0.01)
    width = 6 if act == "silu_and_mul" else 12
    x, bias, residual, gain = (
        torch.randn(*shape, dtype=torch.float64).to(dtype)
        for shape in ((3, 20), (12,), (3, width), (20,))
    )
    normed = ops.rms_norm(x, gain, 1e-5).double()
    y = normed @ weight.values.double().t() * weight.scales.double().t() + bias.double()
    if act == "gelu":
        y = torch.nn.functional.gelu(y)
    elif act == "silu_and_mul":
        y = torch.nn.functional.silu(y[:, :6]) * y[:, 6:]
    norm = ops.RmsScale(gain, 1e-5)
    found = ops.linear(x, weight, bias, residual.clone(), norm, act)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    expected = y + residual.double()
    error = (found.double() - expected).norm() / expected.norm()
    assert found.dtype == dtype
    assert error < tolerance


def test_inputs_are_rounded_by_tokens() -> None:
    plain = drawn(FORMATS["int8"], 4, 32)
    format = ops.WeightFormat(torch.int8, scales=torch.float32, inputs="token")
    weight = ops.Weight(format, plain.values, plain.scales)
    x = torch.randn(3, 32) * torch.tensor([[1.0], [100.0], [0.0]])
    scales = row_scales(x, torch.int8)
    assert scales[2] == 1
    assert torch.equal(scales[:2, 0], x[:2].abs().amax(1) / 127)
    rounded = torch.round(x / scales).clamp(-127, 127)
    assert torch.equal(quantize_rows(x, scales, torch.int8).float(), rounded)
    torch.testing.assert_close(ops.linear(x, weight), ops.linear(rounded * scales, plain))


def test_a_cleared_weight_is_zero() -> None:
    for format in FORMATS.values():
        weight = drawn(format, 4, 32)
        weight.clear()
        assert not dequantize(weight, torch.float32).any()
