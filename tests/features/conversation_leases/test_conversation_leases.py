"""Conversations keep their KV while others can be evicted, and never hold up a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.features.conversation_leases import feature as module
from quire.features.conversation_leases.feature import ConversationLeases
from quire.plan import KVGroup
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Scheduler
from tests.brain import nodes_of
from tests.fakes import FakeExecutor

SIZE = 4
BLOCKS = 24


class Engine:
    """A scheduler with leases."""

    def __init__(self, share: float = 0.5, seconds: float = 600.0) -> None:
        group = KVGroup(layers=(0,), tokens_per_block=SIZE)
        self.executor = FakeExecutor([group], [BLOCKS], vocab=50)
        config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=96)
        self.scheduler = Scheduler(config, self.executor.start())
        args = SimpleNamespace(conversation_leases=share, conversation_lease_seconds=seconds)
        self.leases = ConversationLeases(SimpleNamespace(args=args))  # type: ignore[arg-type]
        self.scheduler.add_feature(self.leases)
        self.count = 0
        self.tree = self.scheduler.blocks.tree

    def add(self, tokens: list[int], conversation: str | None = None, more: int = 1) -> Request:
        self.count += 1
        name = f"r{self.count}"
        total = len(tokens) + more
        request = Request(f"{name}/0", int32(tokens), SamplingParams(), max_total=total)
        self.scheduler.add(request)
        if conversation is not None:
            self.leases._join(name, conversation)
        return request

    def step(self) -> None:
        plan = self.scheduler.plan() if not self.scheduler.num_in_flight else None
        if plan is not None:
            self.executor.submit(plan)
        elif self.scheduler.num_in_flight:
            self.scheduler.update(self.executor.collect())
            self.leases.after_update(0)

    def run(self, tokens: list[int], conversation: str | None = None, more: int = 1) -> int:
        """Runs a request to its end; returns how many of its tokens were cached."""
        request = self.add(tokens, conversation, more)
        while self.scheduler.has_work():
            self.step()
        return request.num_cached_tokens

    def stats(self) -> Any:
        return self.leases.stats()["conversation_leases"]


def prompt(kind: int, length: int) -> list[int]:
    return [kind + place % 3 for place in range(length)]


def test_a_conversation_outlives_other_prefixes() -> None:
    for conversation, kept in (("a", True), (None, False)):
        engine = Engine()
        engine.run(prompt(0, 24), conversation)
        for kind in range(1, 5):
            engine.run(prompt(10 * kind, 40))
        cached = engine.run([*prompt(0, 24), 9, 9])
        assert (cached >= 24) is kept


def test_a_request_never_waits_for_a_lease() -> None:
    engine = Engine(share=1.0)
    for kind in range(3):
        engine.run(prompt(10 * kind, 28), f"c{kind}")
    assert engine.stats().leases == 3
    request = engine.add(prompt(40, 90))
    engine.step()
    assert request.lane >= 0  # it runs at once, with the blocks of leases
    while engine.scheduler.has_work():
        engine.step()
    assert engine.stats().blocks < BLOCKS


def test_the_longest_idle_lease_is_given_up_for_others() -> None:
    engine = Engine(share=0.5)
    for kind in range(3):
        engine.run(prompt(10 * kind, 20), f"c{kind}")
    stats = engine.stats()
    assert (stats.leases, stats.given_up) == (2, 1)
    assert stats.blocks <= BLOCKS // 2
    engine.run(prompt(40, 60), "large")  # it alone has more than the share
    stats = engine.stats()
    assert (stats.leases, stats.blocks) == (0, 0)


def test_a_turn_moves_the_lease_and_the_end_ends_it() -> None:
    engine = Engine()
    engine.run(prompt(0, 12), "a")
    first = engine.stats().blocks
    engine.run([*prompt(0, 12), 9, 9, 9, 9, 9, 9, 9, 9], "a")
    stats = engine.stats()
    assert (stats.leases, stats.blocks) == (1, first + 2)
    (end,) = engine.leases.calls().values()
    assert end(engine, "a")  # type: ignore[arg-type]
    assert not end(engine, "a")  # type: ignore[arg-type]
    assert engine.stats().blocks == 0


def test_a_lease_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    engine = Engine(seconds=5.0)
    engine.run(prompt(0, 12), "a")
    now[0] = 4.0
    assert engine.stats().leases == 1
    engine.run(prompt(0, 14), "a")
    now[0] = 8.0
    assert engine.stats().leases == 1
    now[0] = 9.5
    engine.run(prompt(30, 4))
    stats = engine.stats()
    assert (stats.leases, stats.blocks, stats.expired) == (0, 0, 1)


def test_an_aborted_turn_keeps_the_earlier_lease() -> None:
    engine = Engine()
    engine.run(prompt(0, 12), "a")
    before = engine.stats().blocks
    request = engine.add([*prompt(0, 12), *prompt(30, 20)], "a", more=20)
    for _ in range(3):
        engine.step()
    engine.scheduler.abort(request.request_id)
    assert engine.stats().blocks == before
    assert not engine.leases._conversations


def test_leases_end_with_the_cache() -> None:
    engine = Engine()
    engine.run(prompt(0, 12), "a")
    assert engine.scheduler.reset_prefix_cache()
    assert engine.stats().leases == 0
    engine.run(prompt(0, 12), "a")
    assert engine.stats().leases == 1


def test_a_share_of_zero_turns_the_feature_off() -> None:
    args = SimpleNamespace(conversation_leases=0.0, conversation_lease_seconds=1.0)
    leases = ConversationLeases(SimpleNamespace(args=args))  # type: ignore[arg-type]
    assert leases.start(None, None) is None  # type: ignore[arg-type]


TURN = st.tuples(st.integers(0, 4), st.integers(1, 70), st.sampled_from(["a", "b", "c", None]))


@settings(max_examples=30)
@given(st.lists(st.tuples(TURN, st.integers(0, 4)), max_size=25))
def test_marks_and_leases_agree(turns: list[tuple[tuple[int, int, str | None], int]]) -> None:
    engine = Engine(share=0.4)
    for (kind, length, conversation), steps in turns:
        engine.add(prompt(5 * kind, length), conversation)
        for _ in range(steps):
            engine.step()
    while engine.scheduler.has_work():
        engine.step()
    marked = sum(node.count for node in nodes_of(engine.tree) if node.leases)
    assert engine.tree.num_leased == marked <= BLOCKS * 0.4
    engine.leases.forget()
    assert not any(node.leases for node in nodes_of(engine.tree))
    assert engine.scheduler.reset_prefix_cache()
