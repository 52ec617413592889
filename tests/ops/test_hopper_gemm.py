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
from quire.ops.triton.order_inputs import order_inputs
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
    """Returns [outputs, inputs] in float64 as the kernel lays a thread's words out: axes of a chunk
    are pair of words, place, thread of four, word of the pair."""
    assert weight.scales is not None
    n, chunks = weight.outputs, weight.inputs // 128
    words = weight.values.view(torch.int32).view(n, chunks, 4, 2, 2).numpy().view("uint32")
    base = 128 if dtype == torch.bfloat16 else 1024
    zeros = torch.full((n, chunks), 8.0) if weight.zeros is None else weight.zeros.float()

    def pairs(values: Tensor) -> object:
        each = values.to(dtype)[:, :, None, None, None].expand(n, chunks, 4, 2, 2).contiguous()
        return each.view(torch.int32).numpy().view("uint32").reshape(-1)

    found = ptx.run(
        INSTRUCTIONS[dtype], 8,
        [words[..., 0].reshape(-1), words[..., 1].reshape(-1), pairs(weight.scales.float()),
         pairs(-base - zeros)],
    )  # fmt: skip
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    places = [torch.from_numpy(ptx.floats(own, kind)).view(n, chunks, 4, 2, 2) for own in found]
    return torch.stack(places, 2).permute(0, 1, 4, 2, 3, 5).reshape(n, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [INT4, ZEROS], ids=["int4", "zeros"])
def test_unpacked_weights_meet_ordered_inputs(form: WeightFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = draw(form, 5, 256)
    x = torch.randn(3, 256, dtype=dtype)
    rounded = dequantize(weight, torch.float64) if form is INT4 else None
    got = order_inputs(x).double() @ left_operand(weight, dtype).T
    want = x.double() @ dequantize(weight, torch.float64).T
    assert float((got - want).norm() / want.norm()) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
    if rounded is not None:
        # A factor of x's type rounds its product with a whole number once.
        exact = x.double() @ rounded.to(dtype).double().T
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_are_normed_as_by_the_norm_itself(rows: int) -> None:
    x = torch.randn(rows, 640, device=DEVICE, dtype=torch.bfloat16)
    norm = RmsScale(torch.rand(640, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    assert torch.equal(order_inputs(x, norm), order_inputs(rms_norm(x, *norm)))
    assert torch.equal(order_inputs(x).sort(1)[0], x.sort(1)[0])


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
    x = torch.empty(40, 256, device=DEVICE, dtype=torch.bfloat16)
    few = [programs_for(HopperTile(2, 64), LinearArgs(x, draw(INT4, n, 256))) for n in (128, 200)]
    many = programs_for(HopperTile(2, 64), LinearArgs(x, draw(INT4, 384, 256)))
    assert few == [4, 4]
    assert many == 4
    wide = LinearArgs(x, Weight.empty(INT4, 20000, 256, torch.device("meta")))
    assert tile_for(32, wide) == HopperTile(4, 32)
    assert tile_for(33, wide) == HopperTile(2, 64)


def test_programs_are_as_many_as_there_is_work_for() -> None:
    weight = draw(INT4, 300, 256)
    for rows in (9, 64, 300):
        args = LinearArgs(torch.empty(rows, 256, device=DEVICE, dtype=torch.bfloat16), weight)
        out = torch.empty(rows, 300, device=DEVICE, dtype=torch.bfloat16)
        counters = torch.zeros(264, dtype=torch.int32, device=DEVICE)
        tile = tile_for(rows, args)
        launch = hopper_gemm(args, out, tile, counters, 132, pdl=False)
        tiles = -(-300 // tile.rows) * -(-rows // tile.bn)
        assert launch.grid == (min(132, 2 * tiles),)
        assert 4 <= HopperTile(2, 128).stages <= tile.stages <= 8


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
