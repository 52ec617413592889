"""Counts of what a JSON text holds, found without decoding it."""

from __future__ import annotations

from quire.server.errors import ApiError

MAX_MEMBERS = 50_000
MAX_STRINGS = 250_000
MAX_VALUES = 1_000_000

_SLICE = 64 * 1024


def check_json_size(data: bytes | bytearray) -> None:
    """Refuses a JSON text whose decoding would hold the interpreter's lock for long.

    A decoder and a validator run to their end before another thread may go on, for as long as there
    are values. The text is read in slices, between which other threads may. What comes behind
    invalid JSON may be counted wrong: no decoder gets there.

    Raises:
        ApiError: 413; it has more than `MAX_MEMBERS` lists, objects and members of objects,
            `MAX_STRINGS` strings, or `MAX_VALUES` values.
    """
    members = quotes = values = 0
    in_string, escape = False, b""
    for start in range(0, len(data), _SLICE):
        part = escape + data[start : start + _SLICE]
        escape = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        part = part[: len(part) - len(escape)]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        members += sum(map(outside.count, (b"[", b"{", b":")))
        quotes += len(pieces) - 1
        values += outside.count(b",")
        for count, most, what in (
            (members, MAX_MEMBERS, "lists, objects and members"),
            ((quotes + 1) // 2, MAX_STRINGS, "strings"),
            (values, MAX_VALUES, "values"),
        ):
            if count > most:
                raise ApiError(413, f"The body has more than {most} {what}.", code="body_too_large")
