"""Sums by segments: twins and kernels against float64, and the same bits for any distribution of
segments to programs and any batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.layers.fixed_sums import segment_count
from quire.ops.experts import SILU, ExpertWeights
from quire.ops.reference import experts as twins
from quire.ops.reference import segments as reference
from quire.ops.reference.quantized import dequantize
from quire.ops.reference.segments import columns
from quire.ops.triton.collectives import segments as kernels
from quire.ops.triton.experts import experts as expert_kernels
from quire.ops.weight import Weight, WeightFormat
from tests.ops.test_triton_experts import GPT_OSS, exact, layer
from tests.ops.test_triton_gemm import DEVICE
from tests.ops.test_triton_quantized import FORMATS, drawn
from tests.slow import slow

SIDES = {"kernels": DEVICE, "twins": "cpu"}
NAMES = ("bfloat16", "float32", "uint4", "uint4-g16", "float8_e4m3fn", "int8-g32")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(name: str, outputs: int, inputs: int, device: str) -> Weight:
    if name in FORMATS:
        weight = drawn(FORMATS[name], outputs, inputs)
        return weight if device == DEVICE else Weight(**_moved(weight, device))
    values = noise(outputs, inputs, seed=1) * inputs**-0.5
    return Weight.plain(values.to(getattr(torch, name)).to(device))


def _moved(weight: Weight, device: str) -> dict[str, Any]:
    fields = {name: getattr(weight, name) for name in weight.__slots__}
    return {n: t.to(device) if isinstance(t, Tensor) else t for n, t in fields.items()}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", [n if n in NAMES[:4] else slow(n) for n in NAMES])
def test_ranks_add_up_to_one(name: str, side: str) -> None:
    """The length of segments is not a multiple of any tile."""
    ops, device = kernels if side == "kernels" else reference, SIDES[side]
    inputs, outputs = 8 * (96 if name == "int8-g32" else 48), 70
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    weight = made(name, outputs, inputs, device)
    assert segment_count(inputs, weight.format) == 8
    x = noise(5, inputs).to(dtype).to(device)
    bias, residual = (noise(*s, seed=2).to(dtype).to(device) for s in ((outputs,), (5, outputs)))
    whole = ops.segment_sum(x, weight, 8, dtype, bias, residual)
    exact_sum = x.double() @ dequantize(weight, torch.float64).t() + bias + residual
    error = (whole.double() - exact_sum).norm() / exact_sum.norm()
    assert error < TOLERANCE[dtype]
    alone = ops.segment_sum(x[3:4], weight, 8, dtype, bias, residual[3:4])
    assert torch.equal(whole[3:4], alone)
    for world in (2, 4, 8):
        each = inputs // world
        parts = [
            ops.segment_sum(
                x[:, first : first + each].contiguous(),
                Weight(**_contiguous(columns(weight, first, first + each))),
                8 // world, torch.float32,
            )
            for first in range(0, inputs, each)
        ]  # fmt: skip
        assert torch.equal(ops.add_pairs(torch.stack(parts), dtype, bias, residual), whole)


@pytest.mark.parametrize("swap", [False, True])
def test_programs_may_share_a_tiles_segments(swap: bool) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, residual = noise(37, 8 * 64).to(DEVICE, dtype), noise(37, 70).to(DEVICE, dtype)
    weight = made(str(dtype).removeprefix("torch."), 70, 8 * 64, DEVICE)

    def by(programs: int) -> Tensor:
        plan = kernels.SumPlan(64, 64, 64, programs, swap=swap)
        return kernels.segment_sum(x, weight, 8, dtype, None, residual, plan=plan)

    alone = by(1)
    error = alone.double() - (x.double() @ weight.values.double().t() + residual.double())
    assert error.norm() / alone.double().norm() < TOLERANCE[dtype]
    for programs in (2, 4, 8, 8):
        assert torch.equal(by(programs), alone)


def _contiguous(weight: Weight) -> dict[str, Any]:
    fields = {name: getattr(weight, name) for name in weight.__slots__}
    return {n: t.contiguous() if isinstance(t, Tensor) else t for n, t in fields.items()}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["float32", slow("uint4-g16")])
def test_experts_of_ranks_add_up_to_one(name: str, side: str) -> None:
    ops, device = (expert_kernels, DEVICE) if side == "kernels" else (reference, "cpu")
    experts, hidden, width = 4, 32, 128
    parts = layer(FORMATS.get(name), experts, hidden, width, torch.float32, bias=True)
    up, down = (part._replace(weight=Weight(**_moved(part.weight, device))) for part in parts)
    up, down = (part._replace(bias=part.bias.to(device)) for part in (up, down))
    x, scores = noise(8, hidden).to(device), noise(8, experts, seed=7).to(device)
    ids = scores.argsort(1)[:, :2].int()
    ids[2] = -1
    weights = scores.sigmoid().gather(1, ids.clamp(min=0).long()) * (ids >= 0)
    add = (kernels if side == "kernels" else reference).add_pairs
    whole = ops.expert_segments(x, ids, weights, up, down, GPT_OSS, 8)
    expected = twins.experts_mlp(x.double(), ids, weights, exact(up), exact(down), GPT_OSS)
    total = add(whole, torch.float32)
    assert (total.double() - expected).norm() / expected.norm() < 3e-6
    alone = ops.expert_segments(x[7:8], ids[7:8], weights[7:8], up, down, GPT_OSS, 8)
    assert torch.equal(alone, whole[:, 7:8])
    halves = []
    for first in (0, width // 2):
        end = first + width // 2
        rows = torch.arange(experts * 2 * width).view(experts, 2, width)[:, :, first:end].flatten()
        own_up = ExpertWeights(_rows(up.weight, rows), experts, _part_of_bias(up, first, end))
        half = Weight(**_contiguous(columns(down.weight, first, end)))
        own_down = ExpertWeights(half, experts, None if first else down.bias)
        halves.append(ops.expert_segments(x, ids, weights, own_up, own_down, GPT_OSS, 4))
    assert torch.equal(torch.cat(halves), whole)
    sums = torch.stack([add(half, torch.float32) for half in halves])
    assert torch.equal(add(sums, torch.float32), total)


def _rows(weight: Weight, rows: Tensor) -> Weight:
    fields = {name: getattr(weight, name) for name in weight.__slots__}
    return Weight(**{n: t[rows] if isinstance(t, Tensor) else t for n, t in fields.items()})


def _part_of_bias(up: ExpertWeights, first: int, end: int) -> Tensor:
    return up.bias.view(up.experts, 2, -1)[:, :, first:end].flatten(1)


def test_no_tokens() -> None:
    weight = made("float32", 8, 64, DEVICE)
    none = torch.empty(0, 64, device=DEVICE)
    assert kernels.segment_sum(none, weight, 8, torch.float32).shape == (0, 8)
    experts = layer(None, 2, 64, 64, torch.float32, bias=False)
    ids = torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    found = expert_kernels.expert_segments(none, ids, ids.float(), *experts, SILU, 8)
    assert found.shape == (8, 0, 64)


@pytest.mark.parametrize(
    ("inputs", "form", "count"),
    [
        (4096, WeightFormat(torch.bfloat16), 8),
        (4096, WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128), 8),
        (2880, WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=32), 2),
        (9728, WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128), 4),
        (20, WeightFormat(torch.float32), 4),
        (7, WeightFormat(torch.float32), 1),
    ],
)
def test_segments_have_whole_groups(inputs: int, form: WeightFormat, count: int) -> None:
    assert segment_count(inputs, form) == count
