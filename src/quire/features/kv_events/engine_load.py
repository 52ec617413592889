"""An engine's load, for routers."""

from __future__ import annotations

from itertools import islice

from quire.features.kv_events.messages import EngineLoad
from quire.features.loop_feature import EngineInterface

_LOOKED_AT = 4096
"""Most requests whose prompts are counted."""


def load_of(engine: EngineInterface, prefill_rate: float) -> EngineLoad:
    """Returns an engine's load. Its time is bounded, however much the engine holds.

    Args:
        prefill_rate: prompt tokens per second of the steps that compute prompts.
    """
    scheduler = engine.scheduler
    blocks = scheduler.blocks
    return EngineLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        prompt_tokens=sum(
            request.known - request.planned
            for request in islice(scheduler.requests(), _LOOKED_AT)
            if not request.generating
        ),
        prefill_rate=prefill_rate,
        kv_tokens=min(usage.total for usage in blocks.usage()) * blocks.block_size,
        **engine.load(),
    )
