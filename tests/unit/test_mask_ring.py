"""Masks that other threads bring."""

from __future__ import annotations

import threading

import numpy as np

from quire.runner.gate import HostGate


def test_a_mask_is_taken_once() -> None:
    gate = HostGate(3)
    assert gate.take(3, 2, wait=False) is None
    gate.give(3, np.arange(6, dtype=np.int32).reshape(2, 3))
    mask = gate.take(3, 2, wait=False)
    assert mask is not None
    assert mask.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert gate.take(3, 2, wait=False) is None


def test_waiting_for_another_thread() -> None:
    gate = HostGate(3)
    given = threading.Thread(
        target=lambda: [gate.give(i, np.full((1, 1), i, dtype=np.int32)) for i in (4, 5)]
    )
    waiting = threading.Timer(0.05, given.start)
    waiting.start()
    mask = gate.take(5, 1, wait=True)
    assert mask is not None
    assert mask.tolist() == [[5]]
    waiting.join()
    given.join()
