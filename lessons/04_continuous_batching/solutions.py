"""Solutions of the exercises on scheduling."""

from __future__ import annotations


def padding(lengths: list[int], rows: int) -> float:
    """Returns the share of padding in batches that are padded to their longest prompts."""
    batches = [lengths[i : i + rows] for i in range(0, len(lengths), rows)]
    positions = sum(len(batch) * max(batch) for batch in batches)
    return 1 - sum(lengths) / positions


def steps_to_first_token(prompt: int, budget: int, decoding: int) -> int:
    """Returns the steps that a prompt takes beside `decoding` requests, which come first."""
    return -(-prompt // (budget - decoding))


def victims(running: list[tuple[str, int]], needed: int) -> list[str]:
    """Returns whom to preempt, in order, so that at least `needed` blocks become free."""
    chosen: list[str] = []
    for name, blocks in reversed(running[1:]):
        if needed <= 0:
            break
        chosen.append(name)
        needed -= blocks
    return chosen
