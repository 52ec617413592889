"""The call that reads KV events, and its use by API processes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.features.call import Callers, CallType
from quire.features.kv_events.messages import KVEvents

EVENTS: CallType[tuple[str, int], KVEvents] = CallType("kv_events.read", tuple[str, int], KVEvents)
"""Asks for the events after event `last` of an epoch. The request is (epoch, last)."""
CALLS = (EVENTS,)


async def kv_events(client: Callers, after: Sequence[tuple[str, int]]) -> list[KVEvents]:
    """Returns the changes of the engines' caches since these events. Raises EngineDeadError.

    Args:
        after: (epoch, last) of each engine; empty: the whole contents are returned.
    """
    places = [*after, *[("", 0)] * (len(client.replicas) - len(after))]
    return [
        await engine.call(EVENTS, place)
        for engine, place in zip(client.replicas, places, strict=True)
    ]
