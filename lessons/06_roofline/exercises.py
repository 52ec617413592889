"""Three exercises on the roofline.

python -m lessons check 6
"""

from __future__ import annotations


def ridge_rows(bandwidth: float, rate: float, itemsize: int) -> float:
    """Returns the rows of a step from which on products wait for arithmetic, not for memory.

    Of each weight a step reads `itemsize` bytes, and does one multiplication and one addition for
    each row. bandwidth: bytes/s. rate: FLOP/s.
    """
    raise NotImplementedError


def decode_seconds(
    weight_bytes: float, kv_bytes: float, lengths: list[int], bandwidth: float
) -> float:
    """Returns the least time of a decode step that waits for memory.

    It reads all weights once, and each row's keys and values. kv_bytes: of one token. lengths: of
    the rows' texts.
    """
    raise NotImplementedError


def most_rows(
    memory: float, weight_bytes: float, kv_bytes: float, length: int, bandwidth: float, itl: float
) -> int:
    """Returns the most rows of `length` tokens that fit the memory, and whose decode step takes at
    most `itl` seconds. 0 if not even one can.

    memory: bytes, for weights and KV. The step waits for memory, as in `decode_seconds`.
    """
    raise NotImplementedError
