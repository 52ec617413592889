"""The call of KV events, and what API processes need of it."""

from __future__ import annotations

from collections.abc import Sequence

from quire.features.call import Callers, CallType
from quire.features.kv_events.messages import KVEvents

EVENTS: CallType[tuple[str, int], KVEvents] = CallType("kv_events.read", tuple[str, int], KVEvents)
"""Asks for the events behind event `last` of an epoch: (epoch, last)."""
CALLS = (EVENTS,)


async def kv_events(client: Callers, after: Sequence[tuple[str, int]]) -> list[KVEvents]:
    """Returns what has changed in the engines' caches since these events, (epoch, last) of each
    engine; without any, all that they hold. Raises EngineDeadError."""
    places = [*after, *[("", 0)] * (len(client.replicas) - len(after))]
    return [
        await engine.call(EVENTS, place)
        for engine, place in zip(client.replicas, places, strict=True)
    ]
