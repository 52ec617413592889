"""Steps are padded to graphs; a full step is found by measuring."""

import bisect
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.runner.graphs import (
    SHORT_ROW,
    Buckets,
    EncoderBuckets,
    Graphs,
    decode_buckets,
    full_step,
    mixed_buckets,
)
from quire.runner.hooks import Level
from quire.runner.program import BodyShape, HeadShape
from quire.runner.state import Limits


@pytest.mark.parametrize("most", [8, 100, 512, 700, 2048, 8192])
def test_mixed_buckets_hold_every_step_with_little_padding(most: int) -> None:
    sizes = mixed_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for tokens in range(2, most + 1):
        held = sizes[bisect.bisect_left(sizes, tokens)]
        assert held < 1.5 * tokens or tokens <= 128
        assert held < 1.25 * tokens or tokens <= 512
        assert held < 1.125 * tokens or not 1024 < tokens <= 2048


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    lanes = draw(st.integers(1, 512))
    drafts = draw(st.sampled_from([0, 0, 1, 3, 7]))
    tokens = draw(st.integers(2, 600) | st.integers(max(2, lanes), 9000))
    logit_rows = draw(st.integers(lanes, lanes * (1 + drafts)))
    rare = draw(st.booleans())
    return Limits(lanes, tokens, logit_rows, length=9000, drafts=drafts, rare=rare)


@given(st.data())
def test_every_step_within_limits_has_captured_shapes(data: st.DataObject) -> None:
    own = data.draw(limits())
    buckets = Buckets(own)
    bodies, heads = set(buckets.bodies()), set(buckets.heads())
    # A step of more tokens would write beyond the buffers.
    assert all(body.tokens <= own.tokens and body.rows <= own.lanes for body in bodies)
    for _ in range(20):
        rows = data.draw(st.integers(1, min(own.lanes, own.tokens)))
        longest = data.draw(st.integers(1, own.tokens - rows + 1))
        least = rows - 1 + longest
        tokens = data.draw(st.integers(least, min(own.tokens, rows * longest)))
        body = buckets.body(tokens, rows, longest)
        assert body in bodies
        assert body is not None
        assert body.tokens >= tokens
        assert body.rows >= rows
        assert body.longest >= longest
        assert body.tokens <= own.tokens
        assert body.rows <= own.lanes
        # The kernels for short rows serve where all rows are short.
        if longest == 1:
            assert body.longest == 1
        elif own.drafts and longest <= SHORT_ROW and tokens <= own.logit_rows:
            assert body.longest == SHORT_ROW
        count = data.draw(st.integers(1, min(tokens, own.logit_rows)))
        level = data.draw(st.sampled_from([Level.PLAIN, Level.MASKED, Level.FULL]))
        head = buckets.head(count, level)
        assert head in heads
        assert head is not None
        assert own.logit_rows >= head.logit_rows >= count
        assert head.level == level


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_beyond_limits_have_no_captured_shape(drafts: int) -> None:
    own = Limits(lanes=8, tokens=64, logit_rows=8 * (1 + drafts), length=100, drafts=drafts)
    buckets = Buckets(own)
    assert buckets.body(9, 9, 1) is None
    assert buckets.body(65, 2, 64) is None
    assert buckets.body(0, 0, 1) is None
    assert buckets.head(own.logit_rows + 1, Level.PLAIN) is None


def test_shapes_by_the_longest_row() -> None:
    own = Limits(lanes=64, tokens=512, logit_rows=256, length=512, drafts=3)
    buckets = Buckets(own)
    assert buckets.body(5, 5, 1) == BodyShape(8, 8, 1)
    assert buckets.body(6, 5, 2) == BodyShape(8, 7, SHORT_ROW)
    assert buckets.body(128, 64, 4) == BodyShape(128, 64, SHORT_ROW)
    assert Buckets(Limits(64, 512, 64, 512)).body(6, 5, 2) == BodyShape(16, 8, 16)
    assert buckets.body(20, 2, 12) == BodyShape(32, 8, 32)
    assert buckets.body(40, 20, 12) == BodyShape(64, 63, 64)
    assert buckets.head(5, Level.FULL) == HeadShape(8, Level.FULL)
    assert buckets.few(20) == BodyShape(32, 8, 32)


def test_decodes_of_some_numbers_of_rows_have_two_bodies() -> None:
    own = Limits(lanes=32, tokens=512, logit_rows=32, length=512)
    buckets = Buckets(own, {16: 1.5, 32: 2.5})
    even, uneven = (BodyShape(32, 32, 1, even=even) for even in (True, False))
    assert [buckets.body(20, 20, 1, skew) for skew in (1.0, 2.5, 2.6)] == [even, even, uneven]
    assert buckets.body(9, 9, 1, 2.0) == BodyShape(16, 16, 1)
    assert buckets.body(8, 8, 1, 9.0) == BodyShape(8, 8, 1)
    assert buckets.body(20, 19, 2, 9.0) == BodyShape(32, 31, 32)
    decodes = [body for body in buckets.bodies() if body.longest == 1]
    assert len(decodes) == len(set(decodes)) == 4 + 2 * 2
    assert {even, uneven} <= set(decodes)
    assert [step.body for step in buckets.steps()] == decodes


@pytest.mark.parametrize(("drafts", "logit_rows"), [(0, 256), (3, 512)])
def test_few_graphs(drafts: int, logit_rows: int) -> None:
    own = Limits(lanes=256, tokens=8192, logit_rows=logit_rows, length=40960, drafts=drafts)
    buckets = Buckets(own)
    bodies, heads = buckets.bodies(), buckets.heads()
    assert len(set(bodies)) == len(bodies)
    assert len(set(heads)) == len(heads)
    assert len(bodies) + len(heads) <= 220
    # Largest first, so that the others fit into their memory.
    assert bodies[0].tokens == 8192
    assert heads[0].logit_rows == logit_rows


@pytest.mark.parametrize(
    ("fixed", "most", "full"),
    [
        (0.0, 8192, 512),  # a large model: all of the time goes with the tokens
        (1000.0, 8192, 1024),  # as much again per step, however few there are
        (1500.0, 8192, 2048),
        (1e9, 8192, 8192),
        (1e9, 3000, 2048),  # no step of twice as many
        (1e9, 300, 300),
    ],
)
def test_a_full_step_has_the_tokens_from_which_waiting_pays(
    fixed: float, most: int, full: int
) -> None:
    seconds: Callable[[int], float] = lambda tokens: fixed + tokens  # noqa: E731
    assert full_step(seconds, most) == full


def test_whole_texts_are_padded_to_captured_bodies() -> None:
    buckets = EncoderBuckets(Limits(lanes=256, tokens=8192, logit_rows=256, length=512))
    captured = set(buckets.bodies())
    draw = random.Random(0)
    for _ in range(2000):
        tokens = draw.randint(1, 8192)
        longest = draw.randint(1, min(512, tokens))
        shape = buckets.body(tokens, draw.randint(1, 256), longest)
        assert shape in captured
        assert shape.tokens >= tokens
        assert shape.longest >= longest
    assert buckets.body(9000, 1, 1) is None
    assert buckets.body(10, 300, 1) is None
    assert {buckets.few(tokens) for tokens in (512, 1024, 8192)} <= captured


class _RecordedGraphs(Graphs):
    """Records programs instead of capturing them."""

    def __init__(self, limits: Limits, buckets: Buckets) -> None:
        self._device, self._limits, self._buckets = torch.device("cpu"), limits, buckets
        self._graphs = {}

    def _tune(self, program: Any) -> None:
        pass

    def capture(self, works: Mapping[Any, Any], progress: Any = None) -> None:
        self._graphs.update(works)

    def seconds(self, key: Any) -> float:
        return float(key.tokens)


@pytest.mark.parametrize("kind", [Buckets, EncoderBuckets])
def test_captured_bodies_are_those_of_the_given_buckets(
    kind: type[Buckets], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runner.graphs.sum_over_all_ranks", lambda seconds: seconds)
    limits = Limits(lanes=32, tokens=1024, logit_rows=32, length=512)
    skews = {rows: 2.5 if rows == 16 else None for rows in decode_buckets(limits)}
    program = SimpleNamespace(
        hooks=(),
        bound=SimpleNamespace(most_skew=skews.__getitem__),
        model=SimpleNamespace(gives_logits=False),
    )
    graphs = _RecordedGraphs(limits, kind(limits))
    graphs.capture_steps(cast(Any, program))
    expected = kind(limits, {16: 2.5})
    assert list(graphs._graphs) == expected.bodies()
    text = expected.body(300, 2, 200, 9.0)
    assert text is not None
    assert graphs.body(BodyShape(300, 2, 200), 9.0) == text
