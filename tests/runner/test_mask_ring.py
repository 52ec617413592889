"""Masks from other threads, in a ring of slots."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from quire.runner.mask_ring import MaskRing

CPU = torch.device("cpu")


def lines(*values: int) -> np.ndarray:
    """Returns masks with one line of two words per value."""
    return np.repeat(np.array(values, dtype=np.int32)[:, None], 2, axis=1)


def test_a_mask_is_available_after_put() -> None:
    ring = MaskRing(CPU, depth=3, rows=2, words=2)
    assert not ring.has(3, wait=False)
    ring.put(3, lines(4, 5))
    assert ring.has(3, wait=False)
    assert not ring.has(4, wait=False)
    assert not ring.has(6, wait=False)  # the same place, for a later step
    first = ring.first_line(3)
    assert ring.masks[first : first + 2].tolist() == [[4, 4], [5, 5]]


def test_steps_in_flight_have_separate_slots() -> None:
    ring = MaskRing(CPU, depth=3, rows=2, words=2)
    for step in (5, 3, 4):
        ring.put(step, lines(10 + step, 20 + step))
    for step in (3, 4, 5):
        first = ring.first_line(step)
        assert ring.masks[first : first + 2, 0].tolist() == [10 + step, 20 + step]
    ring.put(6, lines(1))
    assert ring.masks[ring.first_line(6), 0] == 1
    assert ring.masks[ring.first_line(4), 0] == 14
    assert ring.has(6, wait=False)


def test_a_place_never_goes_back() -> None:
    """A late mask of an ended step must not close a gate that a later step has opened."""
    ring = MaskRing(CPU, depth=2, rows=1, words=2)
    ring.put(4, lines(1))
    ring.put(2, lines(2))
    assert ring.has(4, wait=False)
    ring.close()
    ring.put(6, lines(3))
    assert ring.has(10**9, wait=False)


def test_a_mask_may_be_built_in_place() -> None:
    ring = MaskRing(CPU, depth=2, rows=3, words=2)
    room = ring.buffer(7, 2)
    assert room.shape == (2, 2)
    room[:] = lines(8, 9)
    assert not ring.has(7, wait=False)
    ring.put(7, room)
    first = ring.first_line(7)
    assert ring.has(7, wait=False)
    assert ring.masks[first : first + 3, 1].tolist() == [8, 9, 0]


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 3 * 2**40 + 2**31 + 5])
def test_a_gate_names_place_and_value_in_int32(step: int) -> None:
    """The flag has the value once the mask is available."""
    ring = MaskRing(CPU, depth=3, rows=1, words=2)
    place, low, high = np.array(ring.gate(step), dtype=np.int32).tolist()
    value = (low & 0xFFFFFFFF) + (high << 32)
    assert place == step % 3
    if step >= 3:
        ring.put(step - 3, lines(1))
    assert ring.flags[place] < value
    ring.put(step, lines(1))
    assert ring.flags[place] >= value


def test_rings_over_the_same_memory_share_masks() -> None:
    """Several ranks have rings over the same memory, and each checks it separately."""
    memory = np.zeros(MaskRing.size(3, 2, 2), dtype=np.int8)
    ours, theirs = (MaskRing(CPU, 3, 2, 2, memory) for _ in range(2))
    waiting = threading.Timer(0.05, ours.put, (4, lines(6, 7)))
    assert not theirs.has(4, wait=False)
    waiting.start()
    assert theirs.has(4, wait=True)
    first = theirs.first_line(4)
    assert theirs.masks[first : first + 2, 0].tolist() == [6, 7]
    waiting.join()


def test_waiting_for_another_thread() -> None:
    ring = MaskRing(CPU, depth=3, rows=1, words=2)
    brought = threading.Thread(target=lambda: [ring.put(i, lines(i)) for i in (4, 5)])
    waiting = threading.Timer(0.05, brought.start)
    waiting.start()
    assert ring.has(5, wait=True)
    assert ring.masks[ring.first_line(5)].tolist() == [5, 5]
    waiting.join()
    brought.join()


def test_opening_the_ring_wakes_waiters() -> None:
    ring = MaskRing(CPU, depth=2, rows=1, words=1)
    opened = threading.Timer(0.05, ring.close)
    opened.start()
    assert ring.has(3, wait=True)
    opened.join()
    assert all(ring.has(step, wait=False) for step in range(5))
