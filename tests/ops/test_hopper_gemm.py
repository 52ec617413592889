"""Products of weights in few bits by wgmma: the parts that a CPU can test. tests/gpu runs the
kernel."""

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
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products.hopper_gemm import (
    INSTRUCTIONS,
    HopperTile,
    factor_of,
    hopper_gemm,
    programs_for,
    takes,
    tile_for,
)
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.triton.products.round_inputs import LIFT, order_inputs
from quire.ops.weight import Weight, WeightFormat
from tests.ops import ptx

FP8 = torch.float8_e4m3fn
INT4 = WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128)
ZEROS = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True)
FORMS = {
    "int4": INT4,
    "zeros": ZEROS,
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "int8-g128": WeightFormat(torch.int8, scales=torch.bfloat16, group=128),
    "fp8": WeightFormat(FP8, scales=torch.float32),
    "fp8-g128": WeightFormat(FP8, scales=torch.bfloat16, group=128),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(form: WeightFormat, outputs: int, inputs: int, device: torch.device = DEVICE) -> Weight:
    weight = Weight.empty(form, outputs, inputs, device)
    weight.values.view(torch.uint8).random_(0, 256)
    if form.values.is_floating_point:
        weight.values.view(torch.uint8)[weight.values.float().isnan()] = 0
    if weight.scales is not None:
        weight.scales.copy_(torch.rand(weight.scales.shape) + 0.5)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 17, weight.zeros.shape))
    return weight


def left_operand(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weight [outputs, inputs] in float64, in the kernel's order of a thread's words.

    The axes of a step of 32 words a row are pair of words, word of the pair, place, thread of four,
    and value of two."""
    form = weight.format
    bits, values = form.bits or 8, form.values
    n, inputs = weight.outputs, 1024 // bits
    steps = weight.inputs // inputs
    words = weight.values.view(torch.int32).view(n, steps, 4, 4, 2).numpy().view("uint32")
    scales = weight.scales.float() if form.group else torch.ones(n, weight.inputs // 128)
    zeros = torch.full((n, weight.inputs // 128), 1 << bits - 1)
    if weight.zeros is not None:
        zeros = weight.zeros.int()

    def pairs(values: Tensor) -> object:
        """Each thread has a group's; of a step of 256 inputs, two threads each."""
        groups = inputs // 128
        each = values.view(n, steps, groups, 1, 1, 1).expand(n, steps, groups, 4 // groups, 4, 2)
        return each.contiguous().view(torch.int32).numpy().view("uint32").reshape(-1)

    factors = [(scales * factor_of(values, dtype)).to(dtype)]
    if dtype == torch.bfloat16:
        factors.append((factors[0].float() / 16).to(dtype))
        offsets = [(zeros * by).to(torch.int16).view(dtype) for by in (1, 16)]
    else:
        factors *= 2
        offsets = [(1024.0 + zeros).to(dtype)] * 2
    several = 1 if bits == 8 else 2
    numbers = factors[:several] + offsets[:several]
    found = ptx.run(
        INSTRUCTIONS[values, dtype], 32 // bits,
        [words[..., 0].reshape(-1), words[..., 1].reshape(-1), *map(pairs, numbers)],
    )  # fmt: skip
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    outs = [torch.from_numpy(ptx.floats(own, kind)).view(n, steps, 4, 4, 2) for own in found]
    return torch.stack(outs, -2).permute(0, 1, 3, 4, 2, 5).reshape(n, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_unpacked_weights_meet_ordered_inputs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    form = FORMS[name]
    weight = draw(form, 5, 512)
    x = torch.randn(3, 512, dtype=dtype)
    got = order_inputs(x, bits=form.bits or 8).double() @ left_operand(weight, dtype).T
    if not form.group:
        got *= weight.scales.double().squeeze(1)
    want = x.double() @ dequantize(weight, torch.float64).T
    assert float((got - want).norm() / want.norm()) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
    if not form.group:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-9)
    elif form.scales == torch.bfloat16 and not form.zeros:
        # A factor of x's type rounds its product with a stored number once.
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


def test_weights_that_the_kernel_supports() -> None:
    def taken(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(20, weight.inputs, device=DEVICE, dtype=dtype)
        return takes(LinearArgs(x, weight))

    plain = WeightFormat(torch.uint8, bits=4, scales=torch.float32)
    assert all(taken(draw(form, 8, 384)) for form in (*FORMS.values(), plain))
    assert taken(draw(ZEROS, 8, 256), torch.float16)
    assert taken(draw(INT4, 8, 256).rows(2, 5))
    refused = [
        draw(WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=32), 8, 256),
        draw(WeightFormat(torch.int8, scales=torch.bfloat16, group=128, zeros=True), 8, 256),
        Weight.empty(WeightFormat(FP8, scales=torch.float8_e8m0fnu, group=128), 8, 256, DEVICE),
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
        assert 2 <= tile.stages(4) <= tile.stages(8) <= 8
    assert HopperTile(3, 64).stages(4) == 4


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
