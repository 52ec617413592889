"""The engine's own calls, which every engine takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.loop.core import EngineCore
from quire.engine.loop.snapshot import Snapshot, take_snapshot
from quire.engine.loop.stats import EngineStats
from quire.features.call import CallType

STATS: CallType[None, EngineStats] = CallType("engine.stats", type(None), EngineStats)
SNAPSHOT: CallType[bool, Snapshot] = CallType("engine.snapshot", bool, Snapshot)
"""Asks for the engine's state; True includes the tokens of the prefix tree."""
RESET_PREFIX_CACHE: CallType[None, bool] = CallType("engine.reset_prefix_cache", type(None), bool)
"""Forgets every prefix that no request uses. The answer is whether the cache is empty now."""

OWN_CALLS: Mapping[str, tuple[CallType[Any, Any], Callable[[EngineCore, Any], Any]]] = {
    call.name: (call, answer)
    for call, answer in (
        (STATS, lambda core, _: core.stats()),
        (SNAPSHOT, take_snapshot),
        (RESET_PREFIX_CACHE, lambda core, _: core.scheduler.reset_prefix_cache()),
    )
}
