"""Products of experts, and of gated layers, by TMA and wgmma on a Hopper card."""

from __future__ import annotations

import pytest
import torch

from quire.ops import reference
from quire.ops.arguments import Activation
from quire.ops.experts import SILU, ExpertWeights, Swiglu
from quire.ops.reference import experts as twins
from quire.ops.triton.experts.experts import run_experts, takes_ring
from quire.ops.triton.experts.plan import ExpertsPlan, RingTile
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.weight import Weight

hopper_gated = pytest.importorskip(
    "quire.ops.triton.experts.hopper_gated", reason="needs Gluon", exc_type=ImportError
)

DEVICE = torch.device("cuda", 0)
CLOSE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def linear(experts: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    values = torch.randn(experts * outputs, inputs, device=DEVICE, dtype=dtype) * inputs**-0.5
    own = torch.randn(experts, outputs, device=DEVICE, dtype=dtype) if bias else None
    return ExpertWeights(Weight.plain(values), experts, own)


def wide(own: ExpertWeights) -> ExpertWeights:
    bias = None if own.bias is None else own.bias.double()
    return ExpertWeights(Weight.plain(own.weight.values.double()), own.experts, bias)


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width", "act", "bias"),
    [
        (1, 4, 2, 256, 128, SILU, False),
        (300, 8, 4, 2048, 768, SILU, False),
        (517, 4, 2, 200, 328, Swiglu(1.702, 7.0, 1.0), True),
        (900, 3, 3, 512, 2880, SILU, True),
    ],
)
def test_equals_the_twin(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, act: Swiglu, bias: bool,
    dtype: torch.dtype, stages: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    up = linear(experts, 2 * width, hidden, bias, dtype)
    down = linear(experts, hidden, width, bias, dtype)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
    # Some experts get many tokens and some none; some tokens have fewer experts.
    ids = (torch.rand(tokens, experts, device=DEVICE) ** 3).topk(top_k, 1).indices.int()
    ids[ids == 1] = 0
    ids = torch.where(torch.rand_like(ids, dtype=torch.float32) < 0.1, -1, ids)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    tile = RingTile(stages)
    assert takes_ring(x, up, down)
    plan = ExpertsPlan("grouped", tile, tile)
    got = run_experts(plan, x, ids, weights, up, down, act, x)
    want = twins.experts_mlp(
        x.double(), ids, weights.double(), wide(up), wide(down), act, x.double()
    )
    assert (got.double() - want).norm() / want.norm() < CLOSE[dtype]


def test_no_assignments_add_nothing() -> None:
    up, down = (linear(4, *shape, False, torch.bfloat16) for shape in ((256, 64), (64, 128)))
    x = torch.randn(70, 64, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.full((70, 2), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(70, 2, device=DEVICE)
    plan = ExpertsPlan("grouped", RingTile(), RingTile())
    assert torch.equal(run_experts(plan, x, ids, weights, up, down, SILU, x), x)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("act", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(("tokens", "width", "hidden"), [(2048, 384, 1024), (2211, 328, 200)])
def test_a_gated_layer_equals_the_twin(
    tokens: int, width: int, hidden: int, act: Activation, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
    weight = Weight.plain(torch.randn(2 * width, hidden, device=DEVICE, dtype=dtype) * hidden**-0.5)
    args = LinearArgs(x, weight, None, None, None, act)
    assert hopper_gated.takes(args)
    got = hopper_gated.gated_product(args).double()
    want = reference.linear(x.double(), Weight.plain(weight.values.double()), act=act)
    assert (got - want).norm() / want.norm() < CLOSE[dtype]
