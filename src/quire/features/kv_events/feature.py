"""An engine's prefill rate, measured on its steps, and the events of its prefix cache."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from quire.arrays import Int32
from quire.cache import BlockManager, Evicted, next_hash
from quire.cache.block_hash import root_hash
from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.features.call import CallType
from quire.features.kv_events.calls import EVENTS
from quire.features.kv_events.engine_load import load_of
from quire.features.kv_events.messages import EVENT_HASH_BYTES, EngineLoad, KVEvents
from quire.features.loop_feature import EngineInterface, LoopFeature
from quire.plan import RowFlag
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

_LEAST_TOKENS = 64
"""Steps with fewer prompt tokens are not measured, because decoding dominates their time."""
_KEPT = 0.9
"""Factor by which a new step reduces the weight of all earlier ones."""


def open_events(config: EngineConfig) -> LoopFeature:
    """Returns the feature for an engine that serves clients."""
    return KVEventFeature()


class PrefillRate:
    """Measures prompt tokens per second of the steps that compute prompts.

    If steps overlap, a step's time is from the previous step's end to its own end.
    """

    def __init__(self) -> None:
        self._launched: deque[tuple[int, float]] = deque()
        self._tokens = self._seconds = self._last_end = 0.0

    @property
    def value(self) -> float:
        """Tokens per second; 0 before the first measured step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def launched(self, prompt_tokens: int, now: float) -> None:
        """Records a step that is launched at `now`, in seconds."""
        self._launched.append((prompt_tokens, now))

    def ended(self, now: float) -> None:
        """Records the end of the oldest step."""
        if not self._launched:
            return
        tokens, begun = self._launched.popleft()
        seconds, self._last_end = now - max(begun, self._last_end), now
        if tokens >= _LEAST_TOKENS and seconds > 0.0:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + seconds


# The scheduler's part of KV events: it records which blocks enter and leave the prefix tree.

_MOST_EVENTS = 1 << 16
"""Events that are kept for readers. A reader that missed more gets all blocks anew."""


class KVEventFeature(Feature, LoopFeature):
    """Keeps the newest events. Without a prefix cache there are none."""

    def __init__(self, most_events: int = _MOST_EVENTS) -> None:
        self.epoch = secrets.token_hex(8)
        self._read = False
        self.rate = PrefillRate()
        self._held: dict[bytes, None] = {}
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=most_events)
        self._last = 0
        self._announced: dict[str, list[bytes]] = {}
        """Maps request ids to the full hashes of their announced blocks."""

    def start(self, executor: Executor, capacity: Capacity) -> Feature:
        return self

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        return {EVENTS: self._answer}

    def _answer(self, engine: EngineInterface, place: tuple[str, int]) -> KVEvents:
        return self.events(*place, load_of(engine, self.rate.value))

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        self._blocks = blocks

    def plan(self, builder: PlanBuilder) -> None:
        prompt_rows = (builder.flags & int(RowFlag.PROMPT)) != 0
        self.rate.launched(int(builder.q_len[prompt_rows].sum()), time.monotonic())
        if self._read and builder.admits and self._blocks.caching:
            by_lane = dict(zip(builder.lanes.tolist(), builder.requests, strict=True))
            for admit in builder.admits:
                request = by_lane[admit.lane]
                self._announce(request, request.tokens.view(0, admit.prompt_len))

    def after_update(self, step_id: int) -> None:
        self.rate.ended(time.monotonic())

    def evict(self, blocks: Sequence[Evicted]) -> None:
        for block in blocks:
            # The eviction of a recurrent state is no event, because the KV may stay.
            if self._blocks.groups[block.group].grows:
                self._change(block.block_hash[:EVENT_HASH_BYTES], stored=False)

    def forget(self) -> None:
        """Drops all events. Running requests are announced again when they end."""
        self._held.clear()
        self._events.clear()
        self._last += 1

    def finish(self, request: Request) -> None:
        if request.request_id not in self._announced:
            return
        tokens = request.tokens.view(0, request.computed)
        self._announce(request, tokens)
        size, hashes = self._blocks.block_size, self._announced.pop(request.request_id)
        if len(hashes) * size > len(tokens):
            tokens = request.tokens.view(0, len(hashes) * size)
            match = self._blocks.match(request.namespace, tokens, len(tokens), whole_only=True)
            for block_hash in hashes[match.known :]:
                self._change(block_hash[:EVENT_HASH_BYTES], stored=False)

    def _announce(self, request: Request, tokens: Int32) -> None:
        """Adds events for the whole blocks of a request's tokens."""
        size = self._blocks.block_size
        hashes = self._announced.setdefault(request.request_id, [])
        last = hashes[-1] if hashes else root_hash(request.namespace)
        for at in range(len(hashes) * size, len(tokens) // size * size, size):
            last = next_hash(last, tokens[at : at + size].tobytes())
            hashes.append(last)
        for block_hash in hashes:
            self._change(block_hash[:EVENT_HASH_BYTES], stored=True)

    def _change(self, block_hash: bytes, *, stored: bool) -> None:
        if (block_hash in self._held) is stored:
            return
        if stored:
            self._held[block_hash] = None
        else:
            del self._held[block_hash]
        self._events.append((block_hash, stored))
        self._last += 1

    def events(self, epoch: str, last: int, load: EngineLoad) -> KVEvents:
        """Returns the changes since event `last` of `epoch`."""
        self._read = True
        found = KVEvents(self.epoch, self._last, True, self._blocks.block_size, load)
        first = self._last - len(self._events)
        if epoch != self.epoch or not first <= last <= self._last:
            found.stored = b"".join(self._held)
            return found
        changes = dict(islice(self._events, last - first, None))
        found.reset = False
        found.stored = b"".join(name for name, stored in changes.items() if stored)
        found.removed = b"".join(name for name, stored in changes.items() if not stored)
        return found
