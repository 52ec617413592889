"""Block hashes: 16 bytes that stand for all tokens up to a block's end."""

from __future__ import annotations

import hashlib

Namespace = tuple[int, str] | tuple[int, str, str]
"""(LoRA id, the user's cache salt): equal for requests that may share KV. Once the engine's weights
were updated, the id of the update follows."""

HASH_BYTES = 16


def root_hash(namespace: Namespace) -> bytes:
    """Returns the hash of an empty prefix."""
    return _digest(repr(namespace).encode(), b"")


def next_hash(before: bytes, tokens: bytes) -> bytes:
    """Returns the hash of the prefix `before`, continued by these tokens (packed int32)."""
    return _digest(tokens, before)


def _digest(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES, key=key).digest()
