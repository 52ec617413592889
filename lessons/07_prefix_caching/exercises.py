"""Three exercises on prefix caches.

python -m lessons check 7
"""

from __future__ import annotations


def shared_and_copied(match: int, size: int) -> tuple[int, int]:
    """Returns the whole blocks that a new request shares, and the tokens to copy from one more.

    match: the tokens of its prompt that the cache has, in blocks of `size`. A block that is shared
    only in part is copied, because the new request writes its own tokens behind.
    """
    raise NotImplementedError


def next_to_evict(
    parents: dict[str, str | None], users: dict[str, int], last_used: dict[str, float]
) -> str | None:
    """Returns the node of a tree that can go first, or None.

    No request may use it, and no node may hang on it: a prefix without its beginning is worthless.
    Returns the least recently used of these nodes.
    """
    raise NotImplementedError


def block_keys(tokens: list[int], size: int, salt: str) -> list[bytes]:
    """Returns a key of 16 bytes for each whole block, for a cache that users share.

    Equal keys mean: equal tokens from the first one to the block's end, and equal salts. A user's
    own salt so keeps others from finding out, by the time to a first token, what that user asked.
    """
    raise NotImplementedError
