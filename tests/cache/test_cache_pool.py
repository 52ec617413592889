"""The block pool: ids, holders, and costs independent of its size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.arrays import int32
from quire.cache import BlockPool
from tests.slow import examples


def test_fresh_blocks_come_in_order_and_returned_ones_first() -> None:
    pool = BlockPool(8)
    assert pool.take(3).tolist() == [0, 1, 2]
    pool.drop(int32([1]))
    assert pool.take(2).tolist() == [1, 3]
    assert pool.num_free == 4


def test_a_block_is_free_when_its_last_holder_drops_it() -> None:
    pool = BlockPool(2)
    ids = pool.take(2)
    pool.hold(ids[:1])
    pool.drop(ids)
    assert pool.num_free == 1
    pool.drop(ids[:1])
    assert pool.num_free == 2


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2)
    ids = pool.take(1)
    pool.drop(ids)
    with pytest.raises(RuntimeError, match="dropped a free block"):
        pool.drop(ids)
    with pytest.raises(RuntimeError, match="held a free block"):
        pool.hold(ids)
    with pytest.raises(RuntimeError, match="took 3 of 2"):
        pool.take(3)
    assert pool.take(0).tolist() == []


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a dictionary of holder counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.model: dict[int, int] = {}

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        if n > self.pool.num_free:
            with pytest.raises(RuntimeError):
                self.pool.take(n)
            return
        ids = self.pool.take(n).tolist()
        assert len(set(ids)) == n
        assert not self.model.keys() & set(ids)
        self.model.update(dict.fromkeys(ids, 1))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        self.pool.hold(int32(ids))
        for i in ids:
            self.model[i] += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        self.pool.drop(int32(ids))
        for i in ids:
            self.model[i] -= 1
            if not self.model[i]:
                del self.model[i]

    @invariant()
    def agrees(self) -> None:
        held = {int(i): int(self.pool.holders[i]) for i in np.nonzero(self.pool.holders)[0]}
        assert held == self.model
        assert self.pool.num_free == 12 - len(self.model)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(40), stateful_step_count=30)
