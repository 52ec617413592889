"""Grammars that are checked before their request runs: where, and what the callers learn."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import CompilerBusyError, GrammarError
from quire.features.structured_output.feature import GrammarFeature
from quire.features.structured_output.messages import Close, Compiled, MaskFailure, Open, ToMasks
from quire.sampling_params import StructuredOutputsParams


class StubBuilders:
    """Builders that answer what a test says."""

    count = 3

    def __init__(self) -> None:
        self.sent: list[tuple[int, ToMasks]] = []
        self.found: list[tuple[int, Any]] = []

    def start(self, inputs: Any, ended: Any) -> None:
        pass

    def send(self, builder: int, message: ToMasks) -> None:
        self.sent.append((builder, message))

    def answers(self, seconds: float = 0.0) -> list[tuple[int, Any]]:
        found, self.found = self.found, []
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def builders() -> StubBuilders:
    return StubBuilders()


@pytest.fixture
def grammars(builders: StubBuilders) -> GrammarFeature:
    return GrammarFeature(builders, 4, 64, (0,))


def checked(grammars: GrammarFeature, number: int) -> Any:
    (check,) = grammars.calls().values()
    return check(None, StructuredOutputsParams(regex=f"a{number}"))  # type: ignore[arg-type]


def opened(builders: StubBuilders) -> list[tuple[int, int]]:
    """Returns the builders that were given grammars, each with the grammar's key."""
    return [(builder, each.key) for builder, each in builders.sent if isinstance(each, Open)]


def test_all_builders_compile_grammars_that_are_checked(
    builders: StubBuilders, grammars: GrammarFeature
) -> None:
    for number in range(6):
        checked(grammars, number)
    assert sorted(builder for builder, _ in opened(builders)) == [0, 0, 1, 1, 2, 2]
    # The builder that has ended its checks gets the next one.
    builders.found = [(1, Compiled(key)) for builder, key in opened(builders) if builder == 1]
    grammars.poll(0.0)
    checked(grammars, 6)
    assert opened(builders)[-1][0] == 1


def test_verdicts(builders: StubBuilders, grammars: GrammarFeature) -> None:
    good, bad, lost = (checked(grammars, number) for number in range(3))
    assert grammars.waits
    places = opened(builders)
    failure = MaskFailure.of(places[1][1], GrammarError("no text matches", pointer="#/pattern"))
    lost_builder = places[2][0]
    builders.found = [(0, Compiled(places[0][1])), (1, failure), (lost_builder, None)]
    grammars.poll(0.0)
    assert good.result(0) is None
    with pytest.raises(GrammarError, match="no text matches"):
        bad.result(0)
    with pytest.raises(CompilerBusyError):
        lost.result(0)
    assert not grammars.waits
    closed = {each.key for _, each in builders.sent if isinstance(each, Close)}
    assert closed == {key for _, key in places}
