"""The claims of steps in flight, which other threads wait for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.runner.host_inputs import ClaimRing
from tests.slow import examples

DEPTH, LANES, WIDTH = 3, 2, 4


class ClaimsInFlight(RuleBasedStateMachine):
    """Claims change, and steps are launched, read and collected in any valid order. Each step keeps
    the claims of its launch until it is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.full((LANES, WIDTH), -1, dtype=torch.int32)
        self.start = torch.zeros(LANES, dtype=torch.int32)
        self.ring = ClaimRing(DEPTH, self.ids, self.start)
        self.sent: dict[int, tuple[list[Any], list[Any]]] = {}
        self.next = 0
        self.waiting: dict[int, tuple[threading.Thread, list[Any]]] = {}

    @rule(lane=st.integers(0, LANES - 1), token=st.integers(0, 99), start=st.integers(0, 9))
    def claim(self, lane: int, token: int, start: int) -> None:
        self.ids[lane] = torch.arange(token, token + WIDTH)
        self.start[lane] = start

    @precondition(lambda self: len(self.sent) < DEPTH - 1)
    @rule(skipped=st.integers(0, 2))
    def launch(self, skipped: int) -> None:
        """Steps without drafts in between send nothing."""
        if not self.waiting:
            self.next += skipped
        self.sent[self.next] = self.ids.tolist(), self.start.tolist()
        self.ring.send(self.next)
        if self.next in self.waiting:
            thread, found = self.waiting.pop(self.next)
            thread.join(20)
            assert self.told(found[0]) == self.sent[self.next]
        self.next += 1

    @precondition(lambda self: self.sent)
    @rule()
    def collect(self) -> None:
        del self.sent[min(self.sent)]

    @precondition(lambda self: not self.waiting and len(self.sent) < DEPTH - 1)
    @rule()
    def wait(self) -> None:
        """Another thread asks before the next step is launched."""
        found: list[Any] = []
        step = self.next
        assert self.ring.get(step, wait=False) is None
        thread = threading.Thread(target=lambda: found.append(self.ring.get(step, wait=True)))
        thread.start()
        self.waiting[step] = thread, found

    @invariant()
    def each_step_has_its_claims(self) -> None:
        oldest = max(self.sent, default=0) - DEPTH + 1
        for step, claims in self.sent.items():
            if step >= oldest:
                assert self.told(self.ring.get(step, wait=False)) == claims

    def told(self, found: Any) -> tuple[list[Any], list[Any]]:
        ids, start = found
        return ids.tolist(), start.tolist()

    def teardown(self) -> None:
        self.ring.close()
        for thread, found in self.waiting.values():
            thread.join(20)
            assert found == [None]


ClaimsInFlight.TestCase.settings = settings(max_examples=examples(90))
TestClaimsInFlight = ClaimsInFlight.TestCase


def test_closing_the_ring_wakes_waiters() -> None:
    ids, start = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ring = ClaimRing(2, ids, start)
    ring.send(4)
    closed = threading.Timer(0.05, ring.close)
    closed.start()
    assert ring.get(5, wait=True) is None
    closed.join()
    ring.close()
    found = ring.get(4, wait=True)
    assert found is not None
    assert np.array_equal(found[0], [[0, 0]])
    # A later step has taken the place of step 2.
    assert ring.get(2, wait=True) is None
