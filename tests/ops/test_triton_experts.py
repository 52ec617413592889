"""Kernels of experts against the twin in float64: routing, order, every tile and format.

On a GPU the kernels are compiled; on a CPU they run under Triton's interpreter.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.errors import ConfigError
from quire.ops.arguments import RmsScale
from quire.ops.choose import Policy, use_policy
from quire.ops.experts import (
    GELU_TANH,
    SILU,
    ExpertCopies,
    ExpertWeights,
    Routing,
    Swiglu,
    expands,
)
from quire.ops.reference import experts as twins
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.experts.experts import experts_mlp, run_experts, shape_of
from quire.ops.triton.experts.kernels import add_gated
from quire.ops.triton.experts.plan import ExpertsPlan, ExpertsShape, Tile, plan_for
from quire.ops.triton.experts.route import RoutePlan, route, sort_by_expert
from quire.ops.triton.launch import INTERPRETED
from quire.ops.weight import Weight, WeightFormat
from tests.ops.test_triton_gemm import DEVICE
from tests.ops.test_triton_quantized import FORMATS, drawn
from tests.slow import slow

E2M1 = WeightFormat(torch.uint8, bits=4, scales=torch.float8_e8m0fnu, group=32, code="e2m1")
GPT_OSS = Swiglu(1.702, 7.0, 1.0)
GEMV = ExpertsPlan("gemv", Tile(1, 4, 64), Tile(1, 4, 32))
GROUPED = ExpertsPlan("grouped", Tile(16, 16, 32), Tile(16, 16, 64))
SWAPPED = ExpertsPlan("grouped", Tile(32, 16, 64, swap=True), Tile(32, 32, 64, swap=True))
EXPANDED = replace(GROUPED, expand=True)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


ROUTINGS = {
    "softmax": Routing(top_k=3, renormalize=False),
    "softmax-normed": Routing(top_k=4),
    "sigmoid": Routing(top_k=2, score="sigmoid", scale=2.5),
    "groups": Routing(top_k=3, score="sigmoid", groups=4, top_groups=2),
}


IN_PARTS = RoutePlan(16, 16, 16, 4, splits=3, squared=2)
"""Parts of the inputs; one part has less than a tile."""


@pytest.mark.parametrize(("tokens", "plan"), [(3, None), (21, IN_PARTS)])
def test_routes_to_copies(tokens: int, plan: RoutePlan | None) -> None:
    """One of an expert's copies computes a token, and each token counts once for its experts."""
    routing, live = ROUTINGS["softmax-normed"], torch.tensor([tokens - 1]).int().to(DEVICE)
    x, weight = noise(tokens, 40), noise(6, 40, seed=1) / 6
    counts = torch.tensor([2, 1, 1, 2, 1, 2], dtype=torch.int32, device=DEVICE)
    # Two ranks: experts 0, 1, 3, 5 and 2, 0, 4, 5, 3.
    tables = ([[0, -1], [1, -1], [-1, -1], [2, -1], [-1, -1], [-1, 3]],
              [[-1, 1], [-1, -1], [0, -1], [-1, 4], [2, -1], [3, -1]])  # fmt: skip
    held = ([0, 1, 3, 5], [2, 0, 4, 5, 3])
    whole = twins.route(x, weight, routing, live=live)
    seen = torch.full_like(whole.ids, -1)
    for table, experts in zip(tables, held, strict=True):
        slots = torch.tensor(table, dtype=torch.int32, device=DEVICE)
        found = []
        for run in (twins.route, functools.partial(route, plan=plan)):
            loads = torch.zeros(6, dtype=torch.int32, device=DEVICE)
            copies = ExpertCopies(counts, slots, loads)
            found.append(run(x, weight, routing, live=live, copies=copies))
            assert torch.equal(loads.long(), whole.ids[whole.ids >= 0].bincount(minlength=6))
        assert torch.equal(found[0].ids, found[1].ids)
        torch.testing.assert_close(found[0].weights, found[1].weights)
        own = found[0].ids >= 0
        assert not (own & (seen >= 0)).any()
        seen[own] = torch.tensor(experts, dtype=torch.int32, device=DEVICE)[
            found[0].ids[own].long()
        ]
    assert torch.equal(seen, whole.ids)


@pytest.mark.parametrize("tokens", [1, 5, 21])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes(name: str, tokens: int) -> None:
    routing = ROUTINGS[name]
    x, weight = noise(tokens, 40), noise(12, 40, seed=1) / 6
    own = {"bias": noise(12, seed=2) / 4} if name == "softmax-normed" else {}
    if routing.score == "sigmoid":
        own["correction"] = noise(12, seed=3) / 2
    live = torch.tensor([max(1, tokens - 2)], dtype=torch.int32, device=DEVICE)
    norm = RmsScale(noise(40, seed=4), 1e-5) if name != "groups" else None
    expected = twins.route(x, weight, routing, live=live, norm=norm, first=2, count=9, **own)
    args = (x, weight, routing)
    for policy, plan in (
        (Policy(), None),
        (Policy(deterministic=True), None),
        (Policy(), IN_PARTS),
    ):
        with use_policy(policy):
            found = route(*args, live=live, norm=norm, first=2, count=9, plan=plan, **own)
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.weights, expected.weights, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.x, expected.x, atol=1e-5, rtol=1e-5)
    assert (expected.ids == -1).any()


@pytest.mark.parametrize(("tokens", "plan"), [(2, None), (20, IN_PARTS)])
def test_equal_scores_go_to_the_lowest_index(tokens: int, plan: RoutePlan | None) -> None:
    x, weight = torch.ones(tokens, 16, device=DEVICE), torch.ones(10, 16, device=DEVICE)
    live = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    routing = Routing(top_k=4, groups=5, top_groups=2)
    for run in (functools.partial(route, plan=plan), twins.route):
        assert run(x, weight, routing, live=live).ids.tolist() == [[0, 1, 2, 3]] * tokens


@pytest.mark.parametrize("plan", [None, IN_PARTS])
def test_rows_of_nan_still_get_experts(plan: RoutePlan | None) -> None:
    x = torch.full((3, 16), float("nan"), device=DEVICE)
    live = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    found = route(x, noise(6, 16), Routing(top_k=3), live=live, plan=plan)
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in found.ids.tolist())
    assert found.weights.isnan().all()


@pytest.mark.parametrize(("tokens", "top_k", "experts", "bm"), [(1, 3, 5, 16), (300, 4, 9, 16)])
def test_assignments_by_expert(tokens: int, top_k: int, experts: int, bm: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts - 1, (tokens, top_k), generator=generator).int()
    found = sort_by_expert(ids.to(DEVICE), experts, bm)
    order, blocks = found.order.tolist(), found.blocks.tolist()
    flat = ids.flatten().tolist()
    count = blocks[-1]
    assert count <= found.most
    seen: list[int] = []
    for block in range(count):
        expert, start, end = (blocks[part * found.most + block] for part in range(3))
        own = order[start : min(start + bm, end)]
        assert own
        assert all(flat[a] == expert for a in own)
        seen += own
    assert seen == sorted((a for a, e in enumerate(flat) if e >= 0), key=lambda a: (flat[a], a))


def layer(
    format: WeightFormat | None, experts: int, hidden: int, width: int, dtype: torch.dtype, *,
    bias: bool,
) -> tuple[ExpertWeights, ExpertWeights]:  # fmt: skip
    made = []
    for seed, (outputs, inputs) in enumerate(((2 * width, hidden), (hidden, width))):
        if format is None:
            values = noise(experts * outputs, inputs, seed=seed) * inputs**-0.5
            weight = Weight.plain(values.to(dtype))
        elif format.code == "e2m1":
            weight = Weight.empty(format, experts * outputs, inputs, torch.device(DEVICE))
            generator = torch.Generator().manual_seed(seed)
            shape = weight.values.shape
            weight.values.copy_(torch.randint(0, 256, shape, generator=generator))
            assert weight.scales is not None
            powers = torch.randint(122, 127, weight.scales.shape, generator=generator)
            weight.scales.view(torch.uint8).copy_(powers)
        else:
            weight = drawn(format, experts * outputs, inputs)
        own = noise(experts, outputs, seed=9 + seed).to(dtype) if bias else None
        made.append(ExpertWeights(weight, experts, own))
    return made[0], made[1]


def exact(linear: ExpertWeights) -> ExpertWeights:
    bias = None if linear.bias is None else linear.bias.double()
    return ExpertWeights(
        Weight.plain(dequantize(linear.weight, torch.float64)), linear.experts, bias
    )


def check(
    plan: ExpertsPlan | None, format: WeightFormat | None, dtype: torch.dtype, tokens: int, *,
    act: Swiglu = SILU, bias: bool = False, residual: bool = True, hidden: int = 72,
    width: int = 48,
) -> None:  # fmt: skip
    experts, top_k = 6, 3
    up, down = layer(format, experts, hidden, width, dtype, bias=bias)
    x = noise(tokens, hidden).to(dtype)
    scores = noise(tokens, experts, seed=7)
    ids = scores.argsort(1)[:, :top_k].int()
    ids[-1, 1] = -1
    if tokens > 2:
        ids[1] = -1
    weights = scores.sigmoid().gather(1, ids.clamp(min=0).long()) * (ids >= 0)
    stream = noise(tokens, hidden, seed=8).to(dtype) if residual else None
    expected = twins.experts_mlp(
        x.double(), ids, weights, exact(up), exact(down), act,
        None if stream is None else stream.double(),
    )  # fmt: skip
    args = (x, ids, weights, up, down, act, stream)
    found = experts_mlp(*args) if plan is None else run_experts(plan, *args)
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("plan", [GEMV, GROUPED, SWAPPED], ids=["gemv", "grouped", "swapped"])
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16, slow(torch.float16)])
def test_products(plan: ExpertsPlan, dtype: torch.dtype) -> None:
    several = 3 if plan is GEMV else 6
    check(plan, None, dtype, 1)
    check(plan, None, dtype, several, residual=False)
    check(plan, None, dtype, several, act=GPT_OSS, bias=True)
    check(plan, None, dtype, 2, act=GELU_TANH)


def test_the_gated_gelu() -> None:
    x = 3 * noise(20, 16).double()
    gate, up = x.chunk(2, 1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(twins.swiglu(x, GELU_TANH), expected)


def test_weights_prefetched_before_their_units() -> None:
    # All tiles of the inputs, some of them, and no tile.
    for down in (Tile(1, 16, 32, 1), Tile(1, 16, 64, 1), Tile(1, 32, 64, 1)):
        check(replace(GEMV, up=Tile(1, 16, 64), down=down), None, torch.bfloat16, 2, width=96)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 1100)])
def test_the_gate_of_the_shared_expert(tokens: int, hidden: int) -> None:
    x, y, residual = (noise(tokens, hidden, seed=seed).bfloat16() for seed in range(3))
    weight = (noise(1, hidden, seed=3) * hidden**-0.5).bfloat16()
    for more in (None, residual):
        wide = None if more is None else more.double()
        expected = twins.add_gated(y.double(), x.double(), weight.double(), wide)
        torch.testing.assert_close(
            add_gated(y, x, weight, more).double(), expected, rtol=1e-2, atol=1e-2
        )


QUICK = ("uint4-g32-zeros", "float8_e4m3fn", "e2m1")


@pytest.mark.parametrize("plan", [GEMV, GROUPED], ids=["gemv", "grouped"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else slow(name) for name in (*FORMATS, "e2m1")]
)
def test_formats(plan: ExpertsPlan, name: str) -> None:
    format = FORMATS.get(name, E2M1)
    check(plan, format, torch.float32, 2 if plan is GEMV else 5, hidden=96, width=64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_4_bit_floats_in_half_precision(dtype: torch.dtype) -> None:
    for plan in (GEMV, GROUPED, EXPANDED):
        check(plan, E2M1, dtype, 3, hidden=64, width=64)


@pytest.mark.parametrize("name", ["e2m1", slow("uint4-g32-zeros"), slow("int8-g32")])
def test_expanded_weights(name: str) -> None:
    check(EXPANDED, FORMATS.get(name, E2M1), torch.float32, 5, act=GPT_OSS, bias=True, hidden=96,
          width=64)  # fmt: skip


def test_8_bits_as_left_operand() -> None:
    check(SWAPPED, FORMATS["int8-g32"], torch.bfloat16, 5, hidden=64, width=64)


@pytest.mark.parametrize("tokens", [1, 17, slow(90)])
def test_any_number_of_tokens(tokens: int) -> None:
    check(None, None, torch.float32, tokens)


def test_inputs_are_rounded_as_the_format_says() -> None:
    format = WeightFormat(torch.int8, scales=torch.float32, inputs="token")
    up, down = layer(replace(format, inputs="none"), 4, 64, 48, torch.float32, bias=False)
    up, down = (part._replace(weight=replace(part.weight, format=format)) for part in (up, down))
    x, ids = noise(3, 64), torch.tensor([[0, 3], [1, 2], [3, 0]], dtype=torch.int32, device=DEVICE)
    weights = torch.full((3, 2), 0.5, device=DEVICE)
    expected = twins.experts_mlp(x, ids, weights, up, down, SILU)
    found = experts_mlp(x, ids, weights, up, down, SILU)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_experts_in_a_format_no_kernel_loads_are_refused() -> None:
    weight = drawn(FORMATS["uint4-g32-zeros"], 64, 40, before=24)
    up = ExpertWeights(Weight.plain(noise(32, 64)), 1)
    with pytest.raises(ConfigError, match="no kernel loads experts' weights"):
        run_experts(
            GEMV, noise(1, 64), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), up,
            ExpertWeights(weight, 1), SILU,
        )  # fmt: skip


def test_8_bit_floats_are_refused_on_cards_that_do_not_know_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = replace(INTERPRETED, capability=(8, 0))
    monkeypatch.setattr("quire.ops.triton.experts.experts.traits", lambda device: old)
    weight = Weight.empty(FORMATS["float8_e4m3fn"], 64, 32, DEVICE)
    experts = ExpertWeights(weight, 4)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ConfigError, match="sm_89 or newer, and this one is sm_80"):
        run_experts(GEMV, noise(1, 32), ids, noise(1, 1), experts, experts, SILU)


def test_default_plans_fit_the_batch_and_the_card() -> None:
    def plan(tokens: int, **rest: Any) -> ExpertsPlan:
        return plan_for(ExpertsShape(tokens, 128, 8, 2048, 768, torch.bfloat16, 16, **rest))

    assert plan(1).kernel == "gemv"
    assert plan(2048).up.bm > plan(2048, shared=99 << 10).up.bm
    rows = [plan(tokens).up.bm for tokens in (64, 512, 2048, 8192)]
    assert rows == sorted(rows)
    assert all(plan(tokens).up.bm == plan(tokens).down.bm for tokens in (64, 512, 2048, 8192))


def test_plans_of_a_ranks_experts_are_those_of_all() -> None:
    x, ids = noise(64, 64), torch.zeros(64, 2, dtype=torch.int32, device=DEVICE)
    whole = layer(E2M1, 8, 64, 64, torch.float32, bias=False)
    part = [own._replace(all_ranks=8) for own in layer(E2M1, 4, 64, 64, torch.float32, bias=False)]
    assert shape_of(x, ids, *part) == shape_of(x, ids, *whole)
    assert shape_of(x, ids, *part).mean == pytest.approx(64 * 2 / 8, rel=1e-3)


def test_only_many_tokens_of_4_bit_floats_are_worth_expanding() -> None:
    int4 = replace(E2M1, code="integer", scales=torch.float16)
    assert expands(E2M1, 97 * 32, 32)
    assert not expands(E2M1, 96 * 32, 32)
    assert not expands(int4, 1000 * 32, 32)
    shape = ExpertsShape(2048, 32, 4, 2880, 2880, torch.bfloat16, 4, mma=True, expand=True)
    assert plan_for(shape).expand
    assert not plan_for(shape._replace(expand=False)).expand
