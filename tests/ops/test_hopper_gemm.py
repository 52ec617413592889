"""Products of 4-bit weights by wgmma: what a CPU can tell of them. tests/gpu runs the kernel."""

from __future__ import annotations

import importlib
import os
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
from quire.ops.choose import Policy, use_policy
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.gemm_plan import LinearArgs
from quire.ops.triton.hopper_gemm import (
    INSTRUCTIONS,
    HopperTile,
    hopper_gemm,
    programs_for,
    takes,
    tile_for,
)
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.order_inputs import LIFT, order_inputs
from quire.ops.weight import Weight, WeightFormat
from tests.ops import ptx

INT4 = WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128)
ZEROS = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(form: WeightFormat, outputs: int, inputs: int, device: torch.device = DEVICE) -> Weight:
    weight = Weight.empty(form, outputs, inputs, device)
    weight.values.view(torch.uint8).random_(0, 256)
    if weight.scales is not None:
        weight.scales.copy_(torch.rand(weight.scales.shape) + 0.5)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 17, weight.zeros.shape))
    return weight


def left_operand(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns [outputs, inputs] in float64 as the kernel lays a thread's words out: axes of a step
    of 256 inputs are pair of words, word of the pair, place, thread of four, value of two."""
    assert weight.scales is not None
    n, steps = weight.outputs, weight.inputs // 256
    words = weight.values.view(torch.int32).view(n, steps, 4, 4, 2).numpy().view("uint32")
    scales = weight.scales.float()
    zeros = torch.full((n, 2 * steps), 8) if weight.zeros is None else weight.zeros.int()

    def pairs(values: Tensor) -> object:
        """Each thread has a group's, two threads each."""
        each = values.view(n, steps, 2, 1, 1, 1).expand(n, steps, 2, 2, 4, 2).contiguous()
        return each.view(torch.int32).numpy().view("uint32").reshape(-1)

    if dtype == torch.bfloat16:
        factors = [(scales * 2.0**power).to(dtype) for power in (69, 65)]
        offsets = [(zeros * by).to(torch.int16).view(dtype) for by in (1, 16)]
    else:
        factors = [scales.to(dtype)] * 2
        offsets = [(1024.0 + zeros).to(dtype)] * 2
    found = ptx.run(
        INSTRUCTIONS[dtype], 8,
        [words[..., 0].reshape(-1), words[..., 1].reshape(-1), *map(pairs, factors + offsets)],
    )  # fmt: skip
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    outs = [torch.from_numpy(ptx.floats(own, kind)).view(n, steps, 4, 4, 2) for own in found]
    return torch.stack(outs, -2).permute(0, 1, 3, 4, 2, 5).reshape(n, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [INT4, ZEROS], ids=["int4", "zeros"])
def test_unpacked_weights_meet_ordered_inputs(form: WeightFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = draw(form, 5, 512)
    x = torch.randn(3, 512, dtype=dtype)
    got = order_inputs(x).double() @ left_operand(weight, dtype).T
    want = x.double() @ dequantize(weight, torch.float64).T
    assert float((got - want).norm() / want.norm()) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
    if form is INT4:
        # A factor of x's type rounds its product with a whole number once.
        exact = x.double() @ dequantize(weight, torch.float64).to(dtype).double().T
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_are_normed_as_by_the_norm_itself(rows: int) -> None:
    x = torch.randn(rows, 640, device=DEVICE, dtype=torch.bfloat16)
    norm = RmsScale(torch.rand(640, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    assert torch.equal(order_inputs(x, norm), order_inputs(rms_norm(x, *norm)))
    filled = torch.nn.functional.pad(x, (0, 128)).float() * LIFT
    assert torch.equal(order_inputs(x).float().sort(1)[0], filled.sort(1)[0])
    half = x.half()
    assert torch.equal(
        order_inputs(half).sort(1)[0], torch.nn.functional.pad(half, (0, 128)).sort(1)[0]
    )


def test_which_weights_are_taken() -> None:
    def taken(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(20, weight.inputs, device=DEVICE, dtype=dtype)
        return takes(LinearArgs(x, weight))

    plain = WeightFormat(torch.uint8, bits=4, scales=torch.float32)
    assert all(taken(draw(form, 8, 384)) for form in (INT4, ZEROS, plain))
    assert taken(draw(ZEROS, 8, 256), torch.float16)
    assert taken(draw(INT4, 8, 256).rows(2, 5))
    refused = [
        draw(WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=32), 8, 256),
        draw(WeightFormat(torch.int8, scales=torch.bfloat16, group=128), 8, 256),
        draw(WeightFormat(torch.uint8, 4, torch.bfloat16, group=128, code="e2m1"), 8, 256),
        draw(WeightFormat(torch.uint8, bits=4, scales=torch.float32), 8, 320),
        Weight.empty(INT4, 8, 256, DEVICE, before=64),
        Weight.plain(torch.empty(8, 256, dtype=torch.bfloat16, device=DEVICE)),
    ]
    assert not any(taken(weight) for weight in refused)
    assert not taken(draw(INT4, 8, 256), torch.float16)
    assert not taken(draw(INT4, 8, 256), torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the interpreter's multiprocessors")
def test_tiles_that_programs_share_are_cut_alike() -> None:
    def args(outputs: int, rows: int = 40) -> LinearArgs:
        x = torch.empty(rows, 256, device=DEVICE, dtype=torch.bfloat16)
        return LinearArgs(x, Weight.empty(INT4, outputs, 256, torch.device("meta")))

    tile = HopperTile(2, 64)
    # Four multiprocessors.
    programs = [programs_for(tile, args(128 * tiles)) for tiles in (1, 2, 3, 4, 5, 6, 8)]
    assert programs == [4, 4, 3, 4, 4, 3, 4]
    assert tile_for(args(3 * 192)) == HopperTile(3, 64)
    assert tile_for(args(8 * 192, rows=200)) == HopperTile(3, 128)
    assert tile_for(args(2 * 192, rows=9)) == HopperTile(2, 16)


def test_programs_are_as_many_as_there_is_work_for() -> None:
    weight = draw(INT4, 300, 768)
    for rows in (9, 64, 300):
        args = LinearArgs(torch.empty(rows, 768, device=DEVICE, dtype=torch.bfloat16), weight)
        out = torch.empty(rows, 300, device=DEVICE, dtype=torch.bfloat16)
        counters = torch.zeros(396, dtype=torch.int32, device=DEVICE)
        tile = tile_for(args)
        launch = hopper_gemm(args, out, tile, counters, 132, pdl=False)
        tiles = -(-300 // tile.rows) * -(-rows // tile.bn)
        assert launch.grid == (3 * tiles,)
        assert launch.options["TOGETHER"] == 3
        assert 2 <= tile.stages <= 8
    assert HopperTile(3, 64).stages == 4


def test_layers_of_more_than_a_few_rows_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def product(args: LinearArgs) -> Tensor:
        asked.append(len(args.x))
        return args.x

    linear = importlib.import_module("quire.ops.triton.linear")
    module = SimpleNamespace(takes=takes, product=product)
    monkeypatch.setattr(linear, "_hopper_few_bits", lambda card: module)
    weight = draw(INT4, 16, 128)
    for rows in (8, 9, 40):
        linear.linear(torch.ones(rows, 128, device=DEVICE, dtype=torch.bfloat16), weight)
    with use_policy(Policy(disabled=frozenset({"skinny"}))):
        linear.linear(torch.ones(40, 128, device=DEVICE, dtype=torch.bfloat16), weight)
    assert asked == [9, 40]
