"""Continuations in the prefix tree."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.arrays import int32
from quire.cache import BlockManager
from quire.cache.continuation import continuation
from tests.cache.test_cache_manager import begin, make

TEXT = st.lists(st.integers(0, 1), min_size=2, max_size=24)


def ahead(manager: BlockManager, lane: int, tokens: list[int], count: int = 50) -> list[int]:
    last = manager.lanes.last(lane)
    return continuation(last, int32(tokens), manager.block_size, count).tolist()


@settings(max_examples=150)
@given(st.lists(TEXT, min_size=1, max_size=6), TEXT, TEXT)
def test_found_tokens_continue_a_known_text(
    texts: list[list[int]], prompt: list[int], more: list[int]
) -> None:
    manager = make(200)
    for text in texts:
        begin(manager, 0, text)
        manager.release(0, int32(text), len(text))
    begin(manager, 1, prompt)
    texts.append(prompt)
    for length in range(len(more) + 1):
        known = [*prompt, *more[:length]]
        found = ahead(manager, 1, known)
        assert not found or any(text[: len(known) + len(found)] == known + found for text in texts)


def test_texts_are_followed_to_their_ends() -> None:
    manager = make(200)
    text = list(range(23))
    begin(manager, 0, text)
    manager.release(0, int32(text), len(text))
    begin(manager, 1, text[:9])
    for length in range(9, 23):
        assert ahead(manager, 1, text[:length]) == text[length:]
        assert ahead(manager, 1, text[:length], 3) == text[length : length + 3]
    assert ahead(manager, 1, [*text[:10], 99]) == []
    # Whole blocks of a running request are available as soon as they are filled.
    begin(manager, 2, [*text[:9], 50, 51, 52, 53, 54])
    assert ahead(manager, 1, [*text[:9], 50]) == [51, 52]
