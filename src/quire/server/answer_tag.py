"""The tag of a router's request, which the answer repeats: by it the router knows whose it is."""

from __future__ import annotations

import re

TAG_HEADER = b"x-quire-tag"

_TAG = re.compile(rb"[0-9a-f]{1,32}")


def tag_in(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the tag among headers; None if there is none, or what no router sends."""
    for name, value in headers:
        if name == TAG_HEADER:
            return value if _TAG.fullmatch(value) else None
    return None
