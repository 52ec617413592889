"""KV events as routers read them."""

from __future__ import annotations

import msgspec

EVENT_HASH_BYTES = 8
"""Number of leading bytes of a block's hash that identify the block in events."""


class EngineLoad(msgspec.Struct):
    """An engine's load.

    Attributes:
        running: Running requests.
        waiting: Waiting requests.
        prompt_tokens: Prompt tokens still to be computed.
        prefill_rate: Prompt tokens per second in steps with prompts; 0 before the first such step.
        kv_tokens: Capacity of the KV cache in tokens.
        handover_seconds: Overhead of a prompt from a peer; 0 before the first one.
        handover_token_seconds: Further overhead for each of its tokens.
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

    Attributes:
        epoch: Identifies the engine until it ends.
        last: Number of the newest event.
        reset: Whether `stored` lists the whole cache. Otherwise it lists the additions.
        block_size: Tokens of a block.
        stored: Concatenated block hashes of `EVENT_HASH_BYTES` each.
        removed: Concatenated block hashes; none of them is in `stored`.
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
        """Whether it has any change of blocks."""
        return self.reset or bool(self.stored or self.removed)


class KVEventLine(msgspec.Struct):
    """A line of `GET /kv/events`.

    Attributes:
        grants: Whether this server computes prompts for others.
        asks: Whether this server can ask others for prompts.
        engines: All engines of the server.
    """

    grants: bool
    asks: bool
    engines: list[KVEvents]


def split(hashes: bytes) -> list[bytes]:
    """Splits concatenated hashes."""
    size = EVENT_HASH_BYTES
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
