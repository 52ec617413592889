"""Random linear layers in every weight format, for the scripts that time products."""

from __future__ import annotations

import torch
from shapes import Shape
from timing import DEVICE
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.weight import Weight, WeightFormat

BANDWIDTH = 4.24e6
"""Bytes per µs of a GEMV, measured on an H200."""
FORMATS = {
    "bf16": None,
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "int8-g128": WeightFormat(torch.int8, scales=torch.bfloat16, group=128),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
    "int4-zeros": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True),
    "w8a8": WeightFormat(torch.int8, scales=torch.float32, inputs="token"),
    "w8a8_fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, inputs="token"),
    "fp8-blocks": WeightFormat(
        torch.float8_e4m3fn, scales=torch.float32, group=128, inputs="group"
    ),
}
"""`--quantization int4` makes int4-zeros. None: 16 bits."""
FEW_BITS = [name for name, form in FORMATS.items() if form is not None and form.inputs == "none"]
"""Formats whose inputs keep 16 bits."""


def values(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE) * scale


def draw(name: str, outputs: int, inputs: int) -> Weight:
    """Returns a random weight of a format; no 8-bit float is a NaN."""
    form = FORMATS[name]
    if form is None:
        return Weight.plain(values(outputs, inputs, scale=0.03))
    weight = Weight.empty(form, outputs, inputs, torch.device(DEVICE))
    stored = weight.values.view(torch.uint8).random_(0, 256)
    largest = 8 if form.bits else 128
    if form.values == torch.float8_e4m3fn:
        stored.bitwise_and_(0xBF)  # up to 1.875
        largest = 1
    if weight.scales is not None:
        weight.scales.uniform_(0.01 / largest, 0.03 / largest)
    if weight.zeros is not None:
        weight.zeros.random_(0, 17)
    return weight


def layer(model: Shape, part: str, rows: int, weight: Weight) -> LinearArgs:
    """Returns a product of a decoder layer as the engine runs it.

    qkv and gate_up have a norm, gate_up an activation, o and down a residual.
    """
    x, bias = values(rows, weight.inputs), None
    if part in ("o", "down"):
        return LinearArgs(x, weight, residual=values(rows, weight.outputs))
    if part == "qkv" and model.bias:
        bias = values(weight.outputs)
    act = "silu_and_mul" if part == "gate_up" else None
    norm = RmsScale(values(weight.inputs).abs(), 1e-6)
    return LinearArgs(x, weight, bias, norm=norm, act=act)
