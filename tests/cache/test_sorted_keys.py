"""Sorted keys against a sorted list."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest

from quire.cache import sorted_keys
from quire.cache.sorted_keys import SortedKeys


@pytest.mark.parametrize("most", [2, 3, 8, 1024])
def test_neighbours_are_those_of_a_sorted_list(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sorted_keys, "_MOST", most)
    draw, keys = random.Random(most), SortedKeys()
    expected: list[bytes] = []
    for step in range(4000):
        key = draw.randrange(300).to_bytes(2, "big")[draw.randrange(2) :]
        place = bisect_left(expected, key)
        known = place < len(expected) and expected[place] == key
        before = expected[place - 1] if place else None
        after = expected[place] if place < len(expected) else None
        assert keys.around(key) == (before, after)
        if known and (step % 3 or step > 3000):
            keys.remove(key)
            expected.remove(key)
        elif not known and step < 3000:
            keys.add(key)
            expected.insert(place, key)
        assert keys.keys() == expected


def test_an_unknown_key_cannot_be_removed() -> None:
    keys = SortedKeys()
    keys.add(b"b")
    with pytest.raises(KeyError):
        keys.remove(b"a")
