"""Tiles of experts that are measured at the start, with times that are made up. No kernel runs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from quire.layers.build import Build
from quire.layers.experts import ExpertsSpec
from quire.ops.choose import Policy, use_policy
from quire.ops.experts import SILU, ExpertWeights, Routing
from quire.ops.triton.experts import plan as planner
from quire.ops.triton.experts import tune
from quire.ops.triton.experts.plan import (
    PLANS,
    RANGES,
    ExpertsPlan,
    ExpertsShape,
    IntegerTile,
    MmaTile,
    RingTile,
    Tile,
    chosen_plan,
    key_of,
    plan_for,
)
from quire.ops.triton.experts.tune import TunedLayer, all_plans, best_plan, known_or_measured
from quire.ops.triton.products import plans
from quire.ops.weight import Weight, WeightFormat
from quire.parallel import SingleGroup
from quire.quantization.quantization import Unquantized
from quire.runner import expert_tiles

INT4 = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=32)
SHAPES = [
    ExpertsShape(
        tokens, 128, 8, 2048, 768, torch.bfloat16, bits, mma, expand and tokens > 1536, False, ring,
        format=name, counts=counts,
    )
    for tokens in RANGES
    for bits, mma, expand, ring, name, counts in (
        (16, False, False, True, "bfloat16", False), (16, False, False, False, "bfloat16", False),
        (4, True, True, True, "e2m1-g32", True), (4, True, False, False, "uint4-g128", False),
        (4, True, False, False, "uint4-g64", True), (8, True, False, False, "int8", True),
        (8, False, False, False, "float8_e4m3fn-g128", True),
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(planner, "_used", {})
    chosen_plan.cache_clear()
    PLANS.forget()


@pytest.mark.parametrize("shape", SHAPES, ids=key_of)
def test_candidates_are_few_and_serve_the_shape(shape: ExpertsShape) -> None:
    plans = list(dict.fromkeys(all_plans(shape)))
    assert plans[0] == plan_for(shape)
    assert len(plans) <= 24
    for plan in plans:
        assert plan.expand == shape.expand
        tiles = plan.up, plan.down
        assert shape.mma or not any(isinstance(tile, MmaTile) for tile in tiles)
        assert shape.counts or not any(isinstance(tile, IntegerTile) for tile in tiles)
        assert isinstance(plan.up, RingTile) == isinstance(plan.down, RingTile)
        assert shape.ring or not isinstance(plan.up, RingTile)
        if plan.kernel == "grouped":
            assert plan.up.bm == plan.down.bm
        assert PLANS.loads(PLANS.dumps("Card X", {"key": plan})) == {"key": plan}


def test_each_product_gets_its_fastest_tile() -> None:
    shape = next(shape for shape in SHAPES if shape.tokens == 1 and shape.format == "uint4-g128")
    up, down = tune.other_tiles(plan_for(shape), "up")[-1].up, MmaTile(1, 0, 8, 2)
    asked = []

    def us(plan: ExpertsPlan) -> float:
        asked.append(plan)
        if plan.up == MmaTile(1, 0, 4, 1):
            return math.inf  # it does not fit
        return 20.0 - 3 * (plan.up == up) - 2 * (plan.down == down)

    best = best_plan(shape, us)
    assert (best.up, best.down) == (up, down)
    assert len(asked) == len(set(asked))


def test_differences_within_noise_and_failures_keep_the_default_plans() -> None:
    for shape in SHAPES:
        rule = plan_for(shape)
        assert best_plan(shape, lambda plan: 10.0 if plan == rule else 9.9) == rule  # noqa: B023
        assert best_plan(shape, lambda plan: math.inf) == rule


def test_a_plan_serves_its_range() -> None:
    shape = SHAPES[0]._replace(tokens=64)
    plan = ExpertsPlan("grouped", Tile(16, 16, 32), Tile(16, 32, 64))
    planner.use({key_of(shape): plan})
    assert chosen_plan(shape._replace(tokens=49)) == plan
    for other in (shape._replace(tokens=48), shape._replace(tokens=65), shape._replace(width=512),
                  shape._replace(format="float16"), shape._replace(tokens=4096)):  # fmt: skip
        assert chosen_plan(other) == plan_for(other)
    planner.use({})
    assert chosen_plan(shape) == plan


@pytest.mark.parametrize("text", [
    "", "[]", '{"entries": [1]}', '{"entries": {"a": {"kernel": "gemv"}}}',
    '{"entries": {"a": {"kernel": "gemv", "up": {"kind": "ring", "stages": "4"}, "down": {}}}}',
])  # fmt: skip
def test_a_broken_file_is_ignored(text: str) -> None:
    path = PLANS.path("Card X")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert PLANS.entries("Card X") == {}


# -- a start ---------------------------------------------------------------------------------------


def layer(width: int = 32, experts: int = 4) -> TunedLayer:
    def linear(outputs: int, inputs: int) -> ExpertWeights:
        weight = Weight.empty(INT4, experts * outputs, inputs, torch.device("cpu"))
        return ExpertWeights(weight, experts)

    return TunedLayer(linear(2 * width, 64), linear(64, width), SILU, 2, 0, torch.bfloat16)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ExpertsPlan, int]]:
    """Replaces measured times so that every default plan is slow; returns the measured shapes."""
    asked: list[tuple[ExpertsPlan, int]] = []

    def us(timer: Any, plan: ExpertsPlan, tokens: int) -> float:
        asked.append((plan, tokens))
        return 10.0 if plan == plan_for(timer.shape(tokens)) else 5.0 + len(asked) / 1000

    monkeypatch.setattr(tune.ExpertsTimer, "us", us)
    monkeypatch.setattr(tune, "_compile", lambda wanted: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card X")
    return asked


def test_a_second_start_measures_nothing(timed: list[Any]) -> None:
    layers = [layer(), layer()]
    found = known_or_measured(layers, 100)
    assert len(found) == len([tokens for tokens in RANGES if tokens <= 100])
    assert {tokens for _, tokens in timed} == {tokens for tokens in RANGES if tokens <= 100}
    timed.clear()
    assert known_or_measured(layers, 100) == found
    assert not timed
    # Shapes of another model, and of larger steps, are measured too, and all are stored.
    assert known_or_measured([layer(64)], 1).keys().isdisjoint(found)
    assert {tokens for _, tokens in timed} == {1}
    assert known_or_measured(layers, 130).items() > found.items()
    assert len(PLANS.entries("Card X")) == len(found) + 2
    assert PLANS.entries("Card Y") == {}


def test_measurements_past_the_time_limit_leave_the_default_plans(
    timed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "SECONDS", -1.0)
    assert known_or_measured([layer()], 100) == {}
    assert not timed
    assert not PLANS.path("Card X").exists()


def test_a_cache_that_cannot_be_written_costs_the_next_start(
    timed: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file"))
    assert known_or_measured([layer()], 1)


def test_changed_sources_get_a_new_table(monkeypatch: pytest.MonkeyPatch) -> None:
    path = PLANS.path("Card X")
    monkeypatch.setattr(plans, "sources_hash", lambda: "other")
    assert PLANS.path("Card X") != path


class Ranks:
    """Two ranks; the test queries the first one first."""

    def __init__(self, rank: int) -> None:
        self.rank, self.handle = rank, None


def model_of(group: Ranks) -> Any:
    build = Build(SingleGroup(), Unquantized(), torch.device("cpu"), torch.bfloat16)
    experts = ExpertsSpec(experts=4, width=32, routing=Routing(top_k=2)).layer(64, build)
    return SimpleNamespace(group=group, device=torch.device("cpu"), modules=lambda: [experts])


def test_the_first_rank_decides_for_all(timed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def broadcast(holder: list[Any], **how: Any) -> None:
        assert how["group_src"] == 0
        if holder[0] is not None:
            told.append(holder[0])
        holder[0] = told[0]

    monkeypatch.setattr(expert_tiles, "TorchGroup", Ranks)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    first, second = (model_of(Ranks(rank)) for rank in (0, 1))
    expert_tiles.choose_tiles(first, 1)
    assert len(timed) > 0
    chosen = dict(planner._used)
    timed.clear()
    planner._used.clear()
    expert_tiles.choose_tiles(second, 1)
    assert not timed
    assert planner._used == chosen
    assert chosen


def test_deterministic_engines_and_dense_models_measure_nothing(timed: list[Any]) -> None:
    model = model_of(Ranks(0))
    with use_policy(Policy(deterministic=True)):
        expert_tiles.choose_tiles(model, 64)
    model.modules = lambda: []
    expert_tiles.choose_tiles(model, 64)
    assert not timed
