"""Solutions of the exercises on block tables."""

from __future__ import annotations


def slots(table: list[int], size: int, start: int, count: int) -> list[int]:
    """Returns the slots of `count` positions from `start` on."""
    positions = range(start, start + count)
    return [table[p // size] * size + p % size for p in positions]


def append(
    table: list[int], holders: dict[int, int], free: list[int], length: int, size: int
) -> tuple[int, int] | None:
    """Makes room for one more token of a sequence whose blocks others may hold too."""
    if length % size == 0:
        table.append(free.pop())
        holders[table[-1]] = 1
        return None
    source = table[-1]
    if holders[source] == 1:
        return None
    target = free.pop()
    holders[source] -= 1
    holders[target] = 1
    table[-1] = target
    return source, target


def best_block_size(
    lengths: list[int], sizes: list[int], token_bytes: int, entry_bytes: int
) -> int:
    """Returns the block size that takes least memory for sequences of these lengths."""

    def total(size: int) -> int:
        return sum(-(-n // size) * (size * token_bytes + entry_bytes) for n in lengths)

    return min(sizes, key=total)
