"""The limits of a store, for random additions, growth and pins."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from quire.server.store import BoundedStore

MAX_ITEMS, MAX_BYTES, MAX_AGE = 4, 100, 10.0

ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 9), st.integers(0, 60), st.booleans()),
    st.tuples(st.just("resize"), st.integers(0, 9), st.integers(0, 60), st.booleans()),
    st.tuples(st.just("discard"), st.integers(0, 9), st.just(0), st.booleans()),
    st.tuples(st.just("wait"), st.integers(1, 6), st.just(0), st.booleans()),
)


@dataclass(eq=False)
class Value:
    pinned: bool


class Store(BoundedStore[Value]):
    def __init__(self) -> None:
        self.now = 0.0
        self.removed: list[Value] = []
        super().__init__(MAX_ITEMS, MAX_BYTES, MAX_AGE, clock=lambda: self.now)

    def is_pinned(self, value: Value) -> bool:
        return value.pinned

    def on_remove(self, value: Value) -> None:
        self.removed.append(value)


@given(st.lists(ACTIONS, max_size=40))
def test_limits_hold_except_for_pinned_values(actions: list[tuple[str, int, int, bool]]) -> None:
    store = Store()
    entered: list[Value] = []
    created: dict[str, float] = {}
    for action, number, size, pinned in actions:
        id = str(number)
        if action == "put":
            entered.append(Value(pinned))
            store.put(id, entered[-1], size)
            created[id] = store.now
        elif action == "resize" and store.find(id) is not None:
            store.resize(id, size)
        elif action == "discard":
            store.discard(id)
        elif action == "wait":
            store.now += number
        kept = store.values()
        ids = [id for id in map(str, range(10)) if store.find(id) is not None]
        assert sum(map(store.size_of, ids)) == store.size
        assert len(store) == len(ids) == len(kept)
        assert {*kept, *store.removed} == set(entered)
        assert len(kept) + len(store.removed) == len(entered)
        for id in ids:
            value = store.find(id)
            assert value is not None
            assert value.pinned or store.now - created[id] < MAX_AGE
        if not any(value.pinned for value in kept):
            assert len(store) <= MAX_ITEMS
            assert store.size <= MAX_BYTES


def test_the_oldest_go_first() -> None:
    store = Store()
    for id in "abcde":
        store.put(id, Value(pinned=id == "a"), 10)
    assert [store.find(id) is not None for id in "abcde"] == [True, False, True, True, True]
    store.put("f", Value(pinned=False), 95)
    assert [store.find(id) is not None for id in "acdef"] == [True, False, False, False, False]
