"""Text that clients keep for the server, in `encrypted_content` or in a thinking's `signature`.

The text is compressed and has a digest, which detects damage. It is not encrypted: the client was
sent the same text in plain. It is not signed either: a client may send any reasoning as `content`,
so a signature would protect nothing. Without a key it stays valid when the server restarts, and on
every replica.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from typing import Literal

from quire.errors import RequestError

Kind = Literal["reasoning", "compaction"]

_PREFIX = "quire1."
_DIGEST_BYTES = 16
_MOST_BYTES = 4 * 1024 * 1024
"""Most bytes of a text."""


def seal(kind: Kind, text: str) -> str:
    data = text.encode("utf-8", "replace")
    return _PREFIX + base64.b64encode(_digest(kind, data) + zlib.compress(data)).decode()


def is_sealed(content: str) -> bool:
    """Tells whether a server of this kind sealed the content. Others seal in their own ways."""
    return content.startswith(_PREFIX)


def unseal(kind: Kind, content: str, param: str = "encrypted_content") -> str:
    """Returns the text of sealed content.

    Args:
        param: the field with the content, for the error.

    Raises:
        RequestError: the content was changed, or belongs to an item of another kind.
    """
    try:
        raw = base64.b64decode(content.removeprefix(_PREFIX), validate=True)
        data = zlib.decompressobj().decompress(raw[_DIGEST_BYTES:], _MOST_BYTES)
        if raw[:_DIGEST_BYTES] == _digest(kind, data):
            return data.decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        pass
    raise RequestError(
        f"'{param}' was changed, or is not that of a {kind}: send it back as it came.",
        param,
        code="invalid_encrypted_content",
    )


def _digest(kind: Kind, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=kind.encode()).digest()
