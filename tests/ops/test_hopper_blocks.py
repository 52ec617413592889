"""Products of 8-bit floats with scales for each 128 inputs by wgmma: the parts that a CPU can test.
tests/gpu runs the kernel."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton.experimental.gluon")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.ops import RmsScale
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products.hopper_blocks import (
    BlockTile,
    hopper_blocks,
    programs_for,
    takes,
    tile_for,
)
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.triton.products.round_inputs import quantize_inputs, round_inputs
from quire.ops.weight import Weight, WeightFormat

FORM = WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128, inputs="group")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty(outputs: int, inputs: int, form: WeightFormat = FORM) -> Weight:
    weight = Weight.empty(form, outputs, inputs, DEVICE)
    weight.clear()
    return weight


def args_of(rows: int, outputs: int, inputs: int, act: str | None = None) -> LinearArgs:
    x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
    return LinearArgs(x, empty(outputs, inputs), act=act)


@pytest.mark.parametrize("inputs", [128, 640, 8448])
def test_the_norm_and_the_rounding_are_those_of_two_kernels(inputs: int) -> None:
    """Sums of squares are in another order, so a value may round to the other neighbour."""
    weight = empty(4, inputs)
    x = torch.randn(5, inputs, device=DEVICE, dtype=torch.bfloat16)
    norm = RmsScale(torch.rand(inputs, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    q, scales = quantize_inputs(x, weight, norm)
    apart, scales_apart = quantize_inputs(rms_norm(x, *norm), weight, None)
    differ = (q.view(torch.uint8) != apart.view(torch.uint8)).sum()
    assert int(differ) <= inputs // 1000
    torch.testing.assert_close(scales, scales_apart, rtol=1e-2, atol=0)
    assert scales.stride() == (1, 8)
    normed = round_inputs(x, weight, norm) - round_inputs(rms_norm(x, *norm), weight)
    assert int((normed != 0).sum()) <= inputs // 1000


def test_layers_that_the_kernel_supports() -> None:
    args = args_of(20, 32, 384)
    assert takes(args)
    assert takes(replace(args, act="silu_and_mul"))
    assert takes(replace(args, weight=args.weight.rows(3, 20)))
    refused = [
        replace(args, weight=empty(32, 384, replace(FORM, inputs="none"))),
        replace(args, weight=empty(32, 384, replace(FORM, group=0, inputs="token"))),
        replace(args, weight=empty(32, 384, replace(FORM, values=torch.int8))),
        replace(args, weight=empty(32, 320)),
        replace(args, weight=replace(args.weight, first=64)),
        replace(args, act="silu_and_mul", apart=True),
        replace(args, weight=empty(24, 384), act="silu_and_mul"),
    ]
    assert not any(takes(each) for each in refused)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the interpreter's multiprocessors")
def test_programs_are_as_many_as_there_is_work_for() -> None:
    """There are 4 multiprocessors: one or two tiles are split evenly, and from 3 on each program
    has whole tiles."""
    assert tile_for(9, args_of(9, 128, 256)) == BlockTile(32, True)
    for rows, outputs, grid, tile in (
        (32, 128, 2, BlockTile(32, True)),
        (64, 128, 4, BlockTile(32, True)),
        (64, 256, 4, BlockTile(32, False)),
        (64, 384, 3, BlockTile(64, False)),
        (300, 768, 4, BlockTile(128, False)),
    ):
        args = args_of(rows, outputs, 256)
        assert tile_for(rows, args) == tile
        q, scales = quantize_inputs(args.x, args.weight, None)
        out = torch.empty(rows, outputs, device=DEVICE, dtype=torch.bfloat16)
        counters = torch.zeros(264, dtype=torch.int32, device=DEVICE)
        programs = programs_for(tile, args)
        launch = hopper_blocks(q, scales, args, out, tile, counters, programs, pdl=False)
        assert launch.grid == (grid,)
        assert 5 <= tile.stages <= 8


def test_layers_of_any_rows_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def product(args: LinearArgs) -> Tensor:
        asked.append(len(args.x))
        return args.x

    linear = importlib.import_module("quire.ops.triton.linear")
    module = SimpleNamespace(takes=takes, product=product)
    monkeypatch.setattr(linear, "_hopper_blocks", lambda card: module)
    weight = empty(16, 128)
    for rows in (1, 9, 40):
        linear.linear(torch.ones(rows, 128, device=DEVICE, dtype=torch.bfloat16), weight)
    # One row is another kernel's on cards that have it.
    assert asked == ([9, 40] if torch.cuda.is_available() else [1, 9, 40])
