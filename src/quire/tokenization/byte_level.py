"""The characters that stand for bytes in byte-level BPE."""

from __future__ import annotations


def _byte_of() -> dict[str, int]:
    """Maps characters to the bytes that they stand for in byte-level BPE (Radford et al., 2019).

    Printable bytes stand for themselves, the others for U+0100 on, in order.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF = _byte_of()
