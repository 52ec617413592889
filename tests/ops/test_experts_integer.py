"""One token's experts in integers against float64, assembly emulated on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.errors import ConfigError
from quire.ops.experts import SILU, ExpertWeights, Swiglu
from quire.ops.reference import experts as twins
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.experts.experts import run_experts
from quire.ops.triton.experts.integer import counts, integer_product
from quire.ops.triton.experts.plan import ExpertsPlan, IntegerTile, Tile
from quire.ops.weight import WeightFormat
from tests.ops import ptx
from tests.ops.test_triton_experts import E2M1, GPT_OSS, check, layer, noise
from tests.ops.test_triton_quantized import drawn
from tests.slow import slow

if not torch.cuda.is_available():
    ptx.install()

FORMATS = {
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
    "int4-zeros": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True),
    "int4-g32-zeros": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=32, zeros=True),
    "mxfp4": E2M1,
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "int8-g128": WeightFormat(torch.int8, scales=torch.float32, group=128),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
}
NAMES = [name if name in ("int4-zeros", "mxfp4") else slow(name) for name in FORMATS]
OTHERS = [name if name in ("fp8-g128", "int8") else slow(name) for name in FORMATS]
EXPERTS, TOP_K = 4, 3


def product(
    tile: IntegerTile, format: WeightFormat, tokens: int, outputs: int, inputs: int,
    act: Swiglu | None, *, bias: bool = False,
) -> None:  # fmt: skip
    """Inputs of a group may be far larger than others, tiny, or all 0."""
    rows = outputs * (2 if act else 1)
    weight = drawn(format, EXPERTS * rows, inputs)
    linear = ExpertWeights(weight, EXPERTS, noise(EXPERTS, rows).bfloat16() if bias else None)
    x = noise(tokens * (1 if act else TOP_K), inputs).bfloat16()
    x[:, 7] *= 200
    x[:, 32:64] = 0
    x[:, -16:] *= 1e-3
    scores = noise(tokens, EXPERTS, seed=3)
    ids = scores.argsort(1)[:, :TOP_K].int().contiguous()
    ids[-1, 1] = -1
    weights = scores.sigmoid()[:, :TOP_K].contiguous()
    residual = None if act else noise(tokens, outputs, seed=4).bfloat16()
    # The interpreter truncates numbers that become bf16.
    out = torch.zeros(ids.numel() if act else tokens, outputs, device=x.device)
    assert counts(weight, x, 1 if act else TOP_K)
    integer_product(tile, x, ids, weights, linear, act, residual, out)
    wide = dequantize(weight, torch.float64).view(EXPERTS, rows, inputs)
    want = torch.zeros_like(out, dtype=torch.float64)
    for token in range(tokens):
        for choice in range(TOP_K):
            at, expert = token * TOP_K + choice, int(ids[token, choice])
            if expert < 0:
                continue
            y = wide[expert] @ x[token if act else at].double()
            if linear.bias is not None:
                y = y + linear.bias[expert].double()
            if act:
                want[at] = twins.swiglu(y[None], act)[0]
            else:
                want[token] += weights[token, choice].double() * y
    if residual is not None:
        want += residual.double()
    assert (out.double() - want).norm() / want.norm() < 3e-4


@pytest.mark.parametrize("name", NAMES)
def test_units(name: str) -> None:
    product(IntegerTile(2, 1), FORMATS[name], 1, 12, 512, SILU)


@pytest.mark.parametrize("name", NAMES)
def test_weighted_sums(name: str) -> None:
    product(IntegerTile(2, 3), FORMATS[name], 1, 24, 256, None)


@pytest.mark.parametrize(
    "name", [name if name in ("fp8-g128", "int8") else slow(name) for name in FORMATS]
)
@pytest.mark.parametrize("act", [GPT_OSS, None], ids=["units", "sums"])
def test_cut_rows_in_turns(name: str, act: Swiglu | None) -> None:
    product(IntegerTile(2, 1), FORMATS[name], 2, 8, 640, act, bias=True)


@pytest.mark.parametrize("name", ["mxfp4", slow("int8"), slow("fp8"), slow("int4-g32-zeros")])
def test_a_layer_of_cut_parts(name: str) -> None:
    plan = ExpertsPlan("gemv", IntegerTile(1, 2), IntegerTile(4, 1))
    check(plan, FORMATS[name], torch.bfloat16, 2, hidden=96, width=32)


def test_layers_that_the_kernel_supports() -> None:
    x = noise(1, 256).bfloat16()
    for name, format in FORMATS.items():
        weight = drawn(format, 8, 256)
        assert counts(weight, x, 1), name
        assert not counts(weight, x.half(), 1)
        # More than shared memory has room for.
        assert not counts(weight, x, 200)
    for format in (
        WeightFormat(torch.int8, scales=torch.float32, group=64),
        WeightFormat(torch.int8, scales=torch.float32, zeros=True),
        WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=16),
        WeightFormat(torch.bfloat16),
    ):
        assert format.scales is None or not counts(drawn(format, 8, 256), x, 1)
    up, down = layer(FORMATS["int8"], 4, 128, 32, torch.float16, bias=False)
    plan = ExpertsPlan("gemv", IntegerTile(1, 1), Tile(1, 4, 32))
    ids = torch.zeros(1, 2, dtype=torch.int32, device=x.device)
    with pytest.raises(ConfigError, match="does not support"):
        run_experts(plan, x[:, :128].half(), ids, torch.ones(1, 2, device=x.device), up, down, SILU)
