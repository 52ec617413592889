"""Solutions of the exercises on what a cache costs and saves."""

from __future__ import annotations


def cache_bytes(config: dict[str, int], tokens: int, itemsize: int) -> int:
    """Returns the bytes of the keys and values of so many tokens."""
    values = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * values * tokens * itemsize


def positions_saved(prompt: int, new: int) -> float:
    """Returns how many positions are computed for each that would do with a cache."""
    again = sum(range(prompt, prompt + new))
    return again / (prompt + new - 1)


def window_slots(position: int, window: int) -> list[int]:
    """Returns where the keys lie that a query at `position` sees, the oldest first."""
    return [p % window for p in range(max(0, position - window + 1), position + 1)]
