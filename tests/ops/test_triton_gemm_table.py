"""The planner: tables on disk, rules, and the tuner's candidates. No kernel runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire.ops.triton.launch import DeviceTraits
from quire.ops.triton.products.plan import TORCH, GemmPlan, Shape, multiplies
from quire.ops.triton.products.table import (
    PLANS,
    bucket,
    fixed_plan,
    heuristic,
    key_of,
    plan_for,
    rows_plan,
)
from quire.ops.triton.products.tune import candidates, refinements
from quire.ops.weight import WeightFormat

H200 = DeviceTraits((9, 0), 132, 232448, pdl=True, bf16=True)
T4 = DeviceTraits((7, 5), 40, 65536, pdl=False, bf16=False)
SHAPES = [
    Shape(m, n, k, torch.bfloat16, norm, gated)
    for m in (1, 2, 3, 4, 7, 8, 16, 33, 64)
    for n, k, norm, gated in (
        (4096, 1024, True, False),
        (1024, 3072, False, False),
        (8960, 1536, True, True),
        (151936, 4096, False, False),
        (48, 40, True, True),
    )
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    PLANS.forget()


def test_a_table_survives_the_disk() -> None:
    shape = Shape(3, 64, 32, torch.bfloat16, norm=True)
    plan = GemmPlan("skinny", bm=16, bn=32, bk=64, stages=4, split_k=2, swap=True, norm="exact")
    entries = {key_of(shape): plan, "other": TORCH}
    assert PLANS.loads(PLANS.dumps("Card X", entries))[key_of(shape)] == plan
    path = PLANS.keep("Card X", entries)
    assert path == PLANS.path("Card X")
    assert plan_for(shape, "Card X", H200) == plan
    assert plan_for(shape._replace(m=4), "Card X", H200) == plan
    assert plan_for(shape, "Card Y", H200) == heuristic(shape, H200)


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_deterministic_layers_follow_the_rows_on_hopper_cards(gated: bool) -> None:
    for rows in (1, 16, 17, 64, 100, 300, 9000):
        for outputs in (1024, 24576):
            shape = Shape(rows, outputs, 1024, torch.bfloat16, norm=True, gated=gated)
            plan = rows_plan(shape, H200)
            assert plan.split_k == 1
            assert plan.norm == "separate"
            assert plan.masked == (rows < plan.bm)
            assert plan.bm <= 256
            tile = (plan.bm + plan.bn * (2 if gated else 1)) * plan.bk * 2
            assert plan.stages * tile <= H200.shared_memory
            assert rows_plan(shape, T4) == fixed_plan(shape)
            wide = shape._replace(dtype=torch.float32)
            assert rows_plan(wide, H200) == fixed_plan(wide)
            stored = shape._replace(format=WeightFormat(torch.int8, scales=torch.float32))
            assert rows_plan(stored, H200) == fixed_plan(stored)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"card": 1, "triton": 2, "entries": {"a": 3}}'])
def test_a_broken_table_is_ignored(text: str) -> None:
    path = PLANS.path("Card X")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert PLANS.entries("Card X") == {}


def test_many_rows_go_to_cublas() -> None:
    assert bucket(257) is None
    assert plan_for(Shape(4096, 64, 64, torch.bfloat16), "Card X", H200) == TORCH
    assert heuristic(Shape(128, 64, 64, torch.bfloat16), H200) == TORCH
    assert heuristic(Shape(32, 64, 64, torch.float32), H200) == TORCH
    assert heuristic(Shape(32, 64, 64, torch.bfloat16), T4) == TORCH


@pytest.mark.parametrize("traits", [H200, T4])
@pytest.mark.parametrize("shape", SHAPES)
def test_heuristic_plans_hold_their_rows(shape: Shape, traits: DeviceTraits) -> None:
    plan = heuristic(shape, traits)
    _check(plan, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_are_launchable(shape: Shape) -> None:
    plans = candidates(shape, 132)
    assert plans
    for plan in plans:
        _check(plan, shape)
        for norms in (True, False):
            for variant in refinements(plan, shape, norms=norms):
                _check(variant, shape)
                assert variant != plan


def _check(plan: GemmPlan, shape: Shape) -> None:
    if plan.kernel == "torch":
        return
    for size in (plan.bm, plan.bn, plan.bk, plan.warps):
        assert size >= 1
        assert size & (size - 1) == 0
    assert (plan.norm != "none") == shape.norm
    rows = plan.bn * (2 if shape.gated else 1)
    if plan.kernel == "gemv":
        assert shape.m <= plan.bm <= 4
        assert rows * plan.bk // (32 * plan.warps) <= 256  # fp32 sums a thread keeps
    elif plan.kernel == "mma":
        assert multiplies(shape)
        assert rows == 16
        assert 8 * plan.stages <= 64  # registers of words under way
    else:
        assert rows >= 16
        assert plan.bm >= 16
        assert plan.bk >= 16
        bytes_ = (plan.bm + rows) * plan.bk * shape.dtype.itemsize * plan.stages
        assert bytes_ <= H200.shared_memory
        assert plan.split_k == 1 or plan.norm != "late"


def test_default_plans_for_untuned_models() -> None:
    """Each plan was the best candidate for layers of several models on an H200."""

    def rule(m: int, n: int, k: int, *, gated: bool = False) -> GemmPlan:
        return heuristic(Shape(m, n, k, torch.bfloat16, norm=gated, gated=gated), H200)

    long = rule(1, 5120, 17408)
    assert (long.kernel, long.stages, long.prefetch) == ("gemv", 4, 0)
    assert rule(1, 4096, 14336).stages == 1
    assert rule(1, 8192, 2048, gated=True).norm == "late"
    assert rule(64, 5120, 5120) == rule(40, 2560, 9728) == TORCH
    assert rule(64, 1024, 2048).kernel == "skinny"
    few, many = rule(64, 8192, 3072, gated=True), rule(64, 9728, 2560, gated=True)
    assert (few.bn, few.stages) == (32, 5)
    assert (many.bn, many.stages) == (64, 4)
    assert rule(32, 8192, 3072, gated=True).swap
    assert rule(64, 25600, 5120, gated=True) == TORCH
    assert heuristic(Shape(64, 8192, 3072, torch.float16, gated=True), T4).bk == 128
