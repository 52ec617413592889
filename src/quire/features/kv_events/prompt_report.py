"""Headers between a router and a server: who computes a prompt, and which blocks it has.

A router sees a prompt's bytes, but an engine sees its tokens. The server's answer has hashes of the
prompt's blocks, by which the router recognizes these blocks in KV events.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from quire.arrays import Int32, int32
from quire.cache.block_hash import next_hash, root_hash
from quire.features.kv_events.messages import EVENT_HASH_BYTES, split

PREFILL_HEADER = b"x-quire-prefill"
"""A request's header: the address of the peer that computes its prompt, or `LOCAL`."""
LOCAL = "local"
REPORT_HEADER = b"x-quire-report-prompt"
"""A request's header: the answer must have `PROMPT_HEADER`."""
PROMPT_HEADER = b"x-quire-prompt"
"""An answer's header: number of tokens, tokens per block, and hashes of some blocks in base64."""

_MOST_HASHES = 64
_MOST_TOKENS = 1 << 40


def encode_report(
    tokens: Sequence[int] | Int32, salt: str, block_size: int, weights: str = ""
) -> bytes:
    """Returns the value of `PROMPT_HEADER` for a prompt without an adapter.

    Args:
        tokens: the ids by which the KV cache knows the prompt.
        weights: id of the last update of the engine's weights.
    """
    packed = int32(tokens)
    blocks = len(packed) // block_size
    wanted = set(spread(blocks, _MOST_HASHES))
    block_hash, found = root_hash((0, salt, weights) if weights else (0, salt)), []
    for index in range(blocks):
        piece = packed[index * block_size : (index + 1) * block_size]
        block_hash = next_hash(block_hash, piece.tobytes())
        if index + 1 in wanted:
            found.append(block_hash[:EVENT_HASH_BYTES])
    return b"%d;%d;%s" % (len(packed), block_size, base64.b64encode(b"".join(found)))


def decode_report(value: bytes) -> tuple[int, list[tuple[int, bytes]]] | None:
    """Returns the number of a prompt's tokens, and some of its blocks in ascending order.

    A block is a pair: number of tokens up to its end, and its hash. Returns None for an invalid
    value.
    """
    try:
        tokens, block_size, hashes = value.split(b";")
        found = split(base64.b64decode(hashes, validate=True))
        count, size = int(tokens), int(block_size)
    except (ValueError, binascii.Error):
        return None
    if size < 1 or not 0 <= count <= _MOST_TOKENS:
        return None
    places = spread(count // size, _MOST_HASHES)
    return count, [(place * size, name) for place, name in zip(places, found, strict=False)]


def spread(blocks: int, most: int) -> list[int]:
    """Returns up to `most` numbers of blocks, evenly spread, ascending; the last is `blocks`."""
    count = min(blocks, most)
    return [-(-blocks * place // count) for place in range(1, count + 1)]
