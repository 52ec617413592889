"""Products in 8 bits against float64: every format, prologue and epilogue, ragged shapes.

On a GPU the kernels are compiled; on a CPU they run under Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.ops.choose import Policy, use_policy
from quire.ops.reference import activate, rms_norm
from quire.ops.reference.quantized import dequantize, round_inputs
from quire.ops.triton.linear import linear
from quire.ops.triton.products import eight_bit
from quire.ops.triton.products.eight_bit import EightBitTile, product, takes
from quire.ops.triton.products.round_inputs import quantize_inputs
from quire.ops.triton.products.small import LinearArgs
from quire.ops.weight import Weight, WeightFormat
from tests.ops.test_triton_gemm import DEVICE, TOLERANCE, make_args
from tests.ops.test_triton_quantized import drawn

FORMATS = {
    "int8-token": WeightFormat(torch.int8, scales=torch.float32, inputs="token"),
    "int8-tensor": WeightFormat(torch.int8, scales=torch.bfloat16, inputs="tensor"),
    "fp8-token": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, inputs="token"),
    "fp8-tensor": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, inputs="tensor"),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128, inputs="group"),
    "int8-g128": WeightFormat(torch.int8, scales=torch.float32, group=128, inputs="group"),
}


def weight_of(name: str, outputs: int, inputs: int) -> Weight:
    weight = drawn(FORMATS[name], outputs, inputs)
    if FORMATS[name].inputs == "tensor":
        weight = replace(weight, input_scale=torch.full((1,), 0.05, device=DEVICE))
    return weight


def expected(args: LinearArgs) -> Tensor:
    x = args.x if args.norm is None else rms_norm(args.x, *args.norm)
    y = round_inputs(x.double(), args.weight) @ dequantize(args.weight, torch.float64).T
    if args.bias is not None:
        y = y + args.bias.double()
    if args.act is not None:
        y = activate(y, args.act)
    return y if args.residual is None else y + args.residual.double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "act", "splits"),
    [(67, 24, 256, "silu_and_mul", 3), (5, 37, 144, "gelu_tanh", 1), (33, 17, 128, None, 2)],
)
def test_products(
    name: str,
    rows: int,
    outputs: int,
    inputs: int,
    act: str | None,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile = EightBitTile(32, 16, 64, 4, 2, splits)
    monkeypatch.setattr(eight_bit, "tile_for", lambda *_: tile)
    args = make_args(
        rows, outputs, inputs, torch.bfloat16, norm="exact", act=act, bias=True,
        residual=act is not None,
    )  # fmt: skip
    args = replace(args, weight=weight_of(name, args.weight.outputs, inputs))
    assert takes(args.weight)
    found, wanted = product(args).double(), expected(args)
    # If the kernel rounds a normed input to the other neighbour, the input changes by one 8-bit
    # step.
    assert float((found - wanted).norm() / wanted.norm()) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_and_scales_round_as_in_the_reference(name: str) -> None:
    weight = weight_of(name, 4, 256)
    x = torch.randn(6, 256) * torch.tensor([[1.0], [100.0], [1e-3], [0.0], [3.0], [7.0]])
    q, scales = quantize_inputs(x.to(DEVICE), weight, None)
    assert q.dtype == weight.dtype
    assert scales.shape == (6, 2 if "g128" in name else 1)
    restored = q.float() * scales.repeat_interleave(256 // scales.shape[1], 1)
    torch.testing.assert_close(restored, round_inputs(x.to(DEVICE), weight), rtol=1e-6, atol=0)


def test_integers_are_summed_exactly() -> None:
    """Sums beyond 2^24, where fp32 would drop bits."""
    weight = weight_of("int8-token", 8, 4096)
    weight.values.fill_(127)
    weight.values[:, 0] = 126
    weight.scales.fill_(1.0)
    args = LinearArgs(torch.full((3, 4096), 127.0, device=DEVICE), weight)
    q, scales = quantize_inputs(args.x, weight, None)
    found = eight_bit.eight_bit_gemm(q, scales, args, EightBitTile(16, 16, 128, 4, 2))
    assert torch.equal(found, torch.full_like(found, 127.0 * 127 * 4096 - 127))


def test_weights_that_are_multiplied_in_8_bits() -> None:
    for name in FORMATS:
        weight = weight_of(name, 4, 256)
        assert takes(weight)
        assert not takes(replace(weight, format=replace(weight.format, inputs="none")))
        assert not takes(replace(weight, first=8))
    narrow = WeightFormat(torch.int8, scales=torch.float32, group=32, inputs="group")
    assert not takes(drawn(narrow, 4, 256))
    assert not takes(weight_of("int8-token", 4, 100))


def test_layers_take_it_for_many_rows_unless_results_must_be_the_same_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = weight_of("int8-token", 16, 64)
    calls = []
    own = eight_bit.product

    def counted(args: LinearArgs) -> Tensor:
        calls.append(len(args.x))
        return own(args)

    monkeypatch.setattr(sys.modules[linear.__module__], "product", counted)
    for rows in (32, 33):
        x = torch.randn(rows, 64, device=DEVICE, dtype=torch.float16)
        wanted = round_inputs(x, weight).double() @ dequantize(weight, torch.float64).T
        torch.testing.assert_close(linear(x, weight).double(), wanted, rtol=2e-2, atol=1e-3)
    with use_policy(Policy(deterministic=True)):
        linear(x, weight)
    assert calls == [33]
