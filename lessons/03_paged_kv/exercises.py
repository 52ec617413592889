"""Three exercises on block tables.

python -m lessons check 3
"""

from __future__ import annotations


def slots(table: list[int], size: int, start: int, count: int) -> list[int]:
    """Returns the slots of `count` positions from `start` on.

    A slot is a token's place in the pool: block * size + place in the block.
    """
    raise NotImplementedError


def append(
    table: list[int], holders: dict[int, int], free: list[int], length: int, size: int
) -> tuple[int, int] | None:
    """Makes room for one more token of a sequence whose blocks others may hold too.

    table: its blocks, for `length` tokens. holders: of each block in use. A new block is taken from
    the end of `free`. If the token goes to a block that others hold, the sequence must have a copy
    of its own. Changes table, holders and free. Returns (source, target) of the copy, or None.
    """
    raise NotImplementedError


def best_block_size(
    lengths: list[int], sizes: list[int], token_bytes: int, entry_bytes: int
) -> int:
    """Returns the block size that takes least memory for sequences of these lengths.

    A block takes `token_bytes` for each of its tokens, used or not, and `entry_bytes` in a table.
    """
    raise NotImplementedError
