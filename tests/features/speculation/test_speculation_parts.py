"""Lookups against a plain search, and the choice of drafts against all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.arrays import int32
from quire.features.speculation import lookup
from quire.features.speculation.draft_count import AcceptanceRates, StepCosts, choose, may_pay
from quire.features.speculation.lookup import RecentTexts, TextIndex, TextSource
from quire.features.speculation.settings import NONE, SpeculationSettings
from quire.request import Request, TokenBuffer
from quire.sampling_params import SamplingParams

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest(text: list[int], tail: list[int], least: int, most: int) -> int:
    """Returns the longest match: the tokens before any position of a text except its end that also
    end another text."""
    best = 0
    for place in range(least, len(text)):
        length = 0
        while (
            length < min(most, place, len(tail))
            and text[place - 1 - length] == tail[len(tail) - 1 - length]
        ):
            length += 1
        best = max(best, length)
    return best if best >= least else 0


@settings(max_examples=200)
@given(TEXT, st.integers(1, 4), st.integers(4, 8), st.lists(st.integers(1, 15), max_size=8))
def test_a_text_finds_where_it_stood_before(
    text: list[int], least: int, most: int, cuts: list[int]
) -> None:
    """This holds for every way the text grew. The index compares only some positions, so it may
    miss a longer match, but it always finds one."""
    index = TextIndex(least, most, room=1)
    at = 0
    for size in [*cuts, len(text)]:
        index.extend(int32(text[at : at + size]))
        at = min(at + size, len(text))
        known = text[:at]
        found = index.find(int32(known[-most:]))
        best = longest(known, known[-most:], least, most)
        assert (found is not None) == (best > 0)
        if found is not None:
            assert found.length <= best
            assert known[found.place - found.length : found.place] == known[-found.length :]
            assert index.after(found.place, 5).tolist() == known[found.place : found.place + 5]
            few = sum(known[p - least : p] == known[-least:] for p in range(least, at)) <= 7
            assert found.length == best or not few


def test_the_latest_of_equal_matches_counts() -> None:
    index = TextIndex(2, 8)
    index.extend(int32([1, 2, 3, 1, 2, 4, 1, 2]))
    found = index.find(int32([9, 1, 2]))
    assert found is not None
    assert (found.length, index.after(found.place, 1).tolist()) == (2, [4])


def test_old_texts_are_forgotten() -> None:
    recent = RecentTexts(2, 8, most=10)
    recent.add(int32([1, 2, 3, 4, 5, 6]))
    recent.add(int32([7, 8, 9, 10, 11, 12]))
    assert recent.find(int32([2, 3])) is not None
    recent.add(int32([13, 14, 15, 16, 17]))
    assert recent.find(int32([2, 3])) is None
    assert recent.find(int32([8, 9])) is not None


def ended(salt: str, tokens: list[int]) -> Request:
    request = Request(salt, int32(tokens[:2]), SamplingParams(), max_total=64, cache_salt=salt)
    request.tokens = TokenBuffer(int32(tokens), np.zeros(1, dtype=np.int32))
    return request


def test_texts_of_all_namespaces_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespaces of the requests that ended last are kept, at least one."""
    monkeypatch.setattr(lookup, "_RECENT", 8)
    monkeypatch.setattr(lookup, "_NAMESPACES", 3)
    texts = TextSource(SpeculationSettings(None, None, True), lanes=2, width=4)

    def kept() -> dict[str, int]:
        return {salt: len(recent) for (_, salt), recent in texts._recent.items()}

    for salt in ("a", "b", "a"):
        texts.finish(ended(salt, [1, 2, 3, 4, 5]))
    assert kept() == {"b": 5, "a": 10}
    texts.finish(ended("c", [1, 2, 3]))
    assert kept() == {"a": 10, "c": 3}
    texts.finish(ended("d", [1, 2, 3]))
    texts.finish(ended("e", [1, 2, 3]))
    assert kept() == {"c": 3, "d": 3, "e": 3}
    texts.finish(ended("f", list(range(40))))
    assert kept() == {"f": 40}


def test_a_request_that_has_ended_leaves_no_index() -> None:
    texts = TextSource(SpeculationSettings(None, None, True), lanes=2, width=4)
    request, other = ended("a", [1, 2, 1, 2]), ended("b", [1, 2, 1, 2])
    assert (texts.look_up(int32([0, 1]), np.ones(2, dtype=bool), [request, other]) != NONE).all()
    texts.finish(request)
    assert [text is None for text in texts._texts] == [True, False]


def costs(verify: dict[int, float], draft: float = 0.0) -> StepCosts:
    return StepCosts(
        {
            "decode": dict(verify),
            "verify": dict(verify),
            "draft": {1: draft, 64: draft},
            "first": {1: draft, 64: draft},
        }
    )


LINEAR = {n: 1.0 + 0.1 * n for n in range(1, 40)}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.99), st.booleans()), min_size=1, max_size=3),
    st.floats(0.0, 0.3),
    st.floats(0.01, 1.0),
)
def test_no_other_choice_is_better(
    rows: list[tuple[float, bool]], draft: float, slope: float
) -> None:
    """The choice is among all counts of up to three drafts for each row."""
    table = costs({n: 1.0 + slope * n for n in range(1, 20)}, draft)
    chance = np.array([row[0] for row in rows])
    modelled = np.array([row[1] for row in rows])
    room = np.full(len(rows), 3, dtype=np.int32)

    def rate(counts: tuple[int, ...]) -> float:
        given = sum(
            1 + sum(a**k for k in range(1, n + 1)) for a, n in zip(chance, counts, strict=True)
        )
        depth = max((n for n, own in zip(counts, modelled, strict=True) if own), default=0)
        tokens = len(rows) + sum(counts)
        seconds = table.decode(len(rows)) if not sum(counts) else table.verify([tokens])[0]
        return given / (seconds + depth * draft)

    found = choose(table, chance, modelled, room)
    best = max(rate(counts) for counts in itertools.product(range(4), repeat=len(rows)))
    plain = rate((0,) * len(rows))
    ours = rate(tuple(found.counts.tolist()))
    assert ours >= plain * 0.9999
    # The model's passes are counted for all rows that may draft, so a margin is allowed.
    assert ours >= min(best * 0.9999, best / 1.02 * 0.9999)
    assert not found.counts[chance == 0.0].any()


def test_drafts_stop_where_they_do_not_pay() -> None:
    room = int32([7] * 8)
    nothing = np.zeros(8, dtype=bool)
    steep = costs({n: float(n) for n in range(1, 80)})
    assert not choose(steep, np.full(8, 0.95), nothing, room).counts.any()
    assert not may_pay(steep, 8, 0.95, 7)
    flat = costs(dict.fromkeys(range(1, 80), 1.0))
    assert (choose(flat, np.full(8, 0.5), nothing, room).counts == 7).all()
    # A draft model that takes as long as a step is never used.
    dear = costs(dict.fromkeys(range(1, 80), 1.0), draft=1.0)
    assert not choose(dear, np.full(8, 0.9), ~nothing, room).counts.any()
    assert choose(dear, np.full(8, 0.9), nothing, room).counts.all()


def test_a_row_that_fails_drops_out() -> None:
    rates = AcceptanceRates(kinds=2, lanes=4)
    one, two = int32([1]), int32([1, 1])
    for _ in range(40):
        rates.add(two, int32([0, 3]), int32([4, 4]), int32([0, 4]))
    bad, good = rates.of(two, int32([0, 3]))
    assert bad < 0.3
    assert good > 0.85
    table = costs(LINEAR)
    counts = choose(table, np.array([bad, good]), np.zeros(2, dtype=bool), int32([7, 7])).counts
    assert counts[0] == 0
    assert counts[1] > 3
    # Another request on the lane starts with the acceptance of its kind.
    rates.forget(int32([0]))
    assert rates.of(one, int32([0]))[0] == pytest.approx(rates.of_kinds()[1])
    before = rates.of_kinds()[1]
    for _ in range(5000):
        rates.fade()
    assert abs(rates.of_kinds()[1] - 0.6) < abs(before - 0.6) + 1e-9
    assert rates.of_kinds()[1] == pytest.approx(0.6, abs=1e-3)


def test_the_cost_of_unmeasured_steps_is_not_underestimated() -> None:
    table = costs({1: 1.0, 2: 0.9, 4: 2.0})
    assert table.decode(1) == table.decode(2) == 0.9  # fewer are never slower
    assert table.decode(3) == 2.0
    assert table.decode(8) == 4.0
    assert StepCosts({}).decode(5) == 1.0
