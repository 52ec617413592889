"""The tuner: its layers and their references, on a CPU, with times that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.ops.triton.launch import INTERPRETED
from quire.ops.triton.products import tune as tuning
from quire.ops.triton.products.measure import preferred
from quire.ops.triton.products.plan import TORCH, Shape
from quire.ops.triton.products.table import heuristic, key_of
from quire.ops.triton.products.tune import Tuner, tune
from quire.ops.weight import WeightFormat

CPU = torch.device("cpu")
INT4 = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=64, zeros=True)
PLAIN = Shape(1, 32, 64, torch.float16)
GATED = Shape(2, 16, 64, torch.float16, norm=True, gated=True)
FEW_BITS = Shape(1, 32, 128, torch.float16, format=INT4)


class Turns:
    """Counts pieces of work, and checks that none begins within another."""

    def __init__(self) -> None:
        self.pieces = 0
        self._under_way = False

    def __call__(self, work: Callable[[], Any], /) -> Any:
        assert not self._under_way
        self._under_way = True
        self.pieces += 1
        try:
            return work()
        finally:
            self._under_way = False


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    def timed(calls: Any, us_guess: float, stream: Any) -> float:
        calls[-1]()
        return us_guess

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(tuning, "graph_us", timed)
    monkeypatch.setattr(tuning, "COLD_BYTES", 1 << 14)
    return Tuner(CPU, torch.float16, 1 << 16, Turns())


@pytest.mark.parametrize("shape", [PLAIN, GATED, FEW_BITS], ids=key_of)
def test_plans_are_held_against_the_reference(tuner: Tuner, shape: Shape) -> None:
    expected = tuner.reference(shape)
    for plan in (heuristic(shape, INTERPRETED), TORCH):
        found = tuner.measure(shape, plan, expected)
        assert not found.error
        assert found.us == shape.weight_bytes / 3.5e6 + 3.0
        wrong = tuner.measure(shape, plan, expected + 1.0)
        assert wrong.error.startswith("relative error")
        assert wrong.us == float("inf")


def test_a_reference_is_computed_piece_by_piece(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tuner.reference(GATED)
    turns: Any = tuner._turn
    before = turns.pieces
    monkeypatch.setattr(tuning, "_REFERENCE_BYTES", 5 * 8 * GATED.k)
    assert torch.equal(tuner.reference(GATED), whole)
    assert turns.pieces - before == 7


def test_shapes_are_tuned_by_their_rows_and_those_that_fail_left_out(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda shape, sms: [])
    large = Shape(1, 1 << 20, 64, torch.float16)
    found = list(tune(tuner, [GATED, large, PLAIN, PLAIN._replace(m=300)], workers=1))
    assert [shape for shape, _ in found] == [PLAIN, GATED]
    for shape, measured in found:
        assert measured[0].plan == heuristic(shape, INTERPRETED)
        assert TORCH in [each.plan for each in measured]
        assert len({each.plan for each in measured}) == len(measured)
        assert preferred(measured) is measured[0]
