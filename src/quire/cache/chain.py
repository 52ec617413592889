"""Names for block contents: 16 bytes that stand for all tokens up to a block's end."""

from __future__ import annotations

import hashlib

Namespace = tuple[int, str]
"""What must be equal, besides the tokens, for KV to be shared: (lora id, the user's cache salt)."""

KEY_BYTES = 16


def root_key(namespace: Namespace) -> bytes:
    """The name of no tokens."""
    return _digest(repr(namespace).encode(), b"")


def next_key(before: bytes, tokens: bytes) -> bytes:
    """The name of what `before` names followed by these tokens, packed int32."""
    return _digest(tokens, before)


def _digest(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, key=key).digest()
