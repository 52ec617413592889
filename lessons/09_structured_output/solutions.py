"""Solutions of the exercises on masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Machine = Mapping[tuple[int, str], int]


def read(machine: Machine, state: int, text: str) -> int | None:
    """Returns the state after a text, None if it cannot be read."""
    at: int | None = state
    for char in text:
        at = None if at is None else machine.get((at, char))
    return at


def matches(machine: Machine, ends: set[int], text: str) -> bool:
    return read(machine, 0, text) in ends


def allowed_tokens(machine: Machine, state: int, vocabulary: Sequence[str]) -> np.ndarray:
    return np.array([text != "" and read(machine, state, text) is not None for text in vocabulary])


def pack(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
