"""An engine's load, for routers."""

from __future__ import annotations

from itertools import islice

from quire.engine.loop.core import EngineCore
from quire.features.kv_events.feature import KVEventFeature
from quire.features.kv_events.messages import EngineLoad

_LOOKED_AT = 4096
"""Most requests whose prompts are counted."""


def load_of(core: EngineCore, events: KVEventFeature) -> EngineLoad:
    """Returns an engine's load. Bounded in time, whatever the engine holds."""
    scheduler = core.scheduler
    blocks = scheduler.blocks
    disagg = core.control({"op": "handover"})
    fixed, per_token = (0.0, 0.0) if disagg is None else disagg
    return EngineLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        prompt_tokens=sum(
            request.known - request.planned
            for request in islice(scheduler.requests(), _LOOKED_AT)
            if not request.generating
        ),
        prefill_rate=events.rate.value,
        kv_tokens=min(usage.total for usage in blocks.usage()) * blocks.block_size,
        handover_seconds=fixed,
        handover_token_seconds=per_token,
    )
