"""Three exercises on what a cache costs and saves.

python -m lessons check 2
"""

from __future__ import annotations


def cache_bytes(config: dict[str, int], tokens: int, itemsize: int) -> int:
    """Returns the bytes of the keys and values of so many tokens.

    config: num_hidden_layers, num_key_value_heads and head_dim. itemsize: bytes of a value.
    """
    raise NotImplementedError


def positions_saved(prompt: int, new: int) -> float:
    """Returns how many positions are computed for each that would do with a cache.

    The last of the new tokens is computed by nobody: nothing comes after it.
    """
    raise NotImplementedError


def window_slots(position: int, window: int) -> list[int]:
    """Returns where the keys lie that a query at `position` sees, the oldest first.

    A layer with a sliding window sees itself and the window - 1 positions before. So its cache has
    just `window` slots, and position p takes slot p % window, over what was there.
    """
    raise NotImplementedError
