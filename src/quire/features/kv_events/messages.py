"""KV events as routers read them."""

from __future__ import annotations

import msgspec

EVENT_HASH_BYTES = 8
"""First bytes of a block's hash, which stand for the block in events."""


class EngineLoad(msgspec.Struct):
    """An engine's queue.

    running, waiting: requests. prompt_tokens: of prompts, not computed yet. prefill_rate: prompt
    tokens per second of the steps that compute prompts, 0 until there was one. kv_tokens: tokens
    that the cache has room for. handover_seconds, handover_token_seconds: what a prompt that a peer
    computes costs beyond its computing, once and for each token that comes; 0 until there was one.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    prefill_rate: float = 0.0
    kv_tokens: int = 0
    handover_seconds: float = 0.0
    handover_token_seconds: float = 0.0


class KVEvents(msgspec.Struct):
    """Changes of an engine's prefix cache since event `last` of an earlier answer.

    epoch: names the engine for its life. last: the number of the newest event. reset: `stored` is
    all that there is; else what was added. stored, removed: concatenated block hashes of
    `EVENT_HASH_BYTES`; no hash is in both. block_size: tokens of a block.
    """

    epoch: str
    last: int
    reset: bool
    block_size: int
    load: EngineLoad
    stored: bytes = b""
    removed: bytes = b""

    @property
    def changed(self) -> bool:
        """Whether it says anything of blocks."""
        return self.reset or bool(self.stored or self.removed)


class KVEventLine(msgspec.Struct):
    """A line of `GET /kv/events`. grants: prompts are computed for others. asks: others can be
    asked for prompts. engines: all engines of the server."""

    grants: bool
    asks: bool
    engines: list[KVEvents]


def split(hashes: bytes) -> list[bytes]:
    """Returns the single ones of concatenated hashes."""
    size = EVENT_HASH_BYTES
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
