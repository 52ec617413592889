"""Solutions of the exercises on prefix caches."""

from __future__ import annotations

import hashlib


def shared_and_copied(match: int, size: int) -> tuple[int, int]:
    """Returns the whole blocks that a new request shares, and the tokens to copy from one more."""
    return divmod(match, size)


def next_to_evict(
    parents: dict[str, str | None], users: dict[str, int], last_used: dict[str, float]
) -> str | None:
    """Returns the node of a tree that can go first, or None."""
    hung_on = set(parents.values())
    idle = [node for node in parents if node not in hung_on and not users[node]]
    return min(idle, key=last_used.__getitem__, default=None)


def block_keys(tokens: list[int], size: int, salt: str) -> list[bytes]:
    """Returns a key of 16 bytes for each whole block, for a cache that users share."""
    keys = []
    last = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for end in range(size, len(tokens) + 1, size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[end - size : end])
        last = hashlib.blake2b(last + block, digest_size=16).digest()
        keys.append(last)
    return keys
