"""The runner's part of adapters: each lane's slot, and the contents of the slots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor import WorkerCall
from quire.features.lora.adapter_pool import AdapterPool, Flags
from quire.features.lora.peft import MOST_RANK
from quire.models import Decoder
from quire.ops.rows import StepRows
from quire.plan import StepPlan
from quire.runner.hooks.hook import HostHook, ProgramHook, SharedMemory
from quire.runner.readback import Upload
from quire.runner.state import BatchState, ColumnSpec, Limits

COLUMN, LOADS = "adapter", "adapter_loads"
"""The column of each lane's slot (-1: no slot), and the plan entry that fills a slot."""
ADAPTER_POOL: WorkerCall[None, AdapterPool] = WorkerCall("lora.pool")
"""Returns the pool of the first rank."""
_MOST_RANKS = 64


def load_entry(number: int, path: str, digest: str) -> Int32:
    """Returns a load as a row of a plan's entry, int32 [1, n]: its number, and then a text with one
    character per word."""
    text = json.dumps([path, digest])
    return np.array([[number, *map(ord, text)]], dtype=np.int32)


class AdapterHook(ProgramHook, HostHook):
    """Runs separate bodies for steps with adapters, so that other steps do not become slower."""

    alters = True
    entries = frozenset({LOADS})

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError if a setting is wrong."""
        if config.args.max_lora_rank > MOST_RANK:
            raise ConfigError(f"max_lora_rank is at most {MOST_RANK}", "max_lora_rank")
        if config.args.lora_cache_gb < 0.0:
            raise ConfigError("lora_cache_gb must be >= 0", "lora_cache_gb")
        self._config = config
        self._flags: Flags = np.zeros(_MOST_RANKS, dtype=np.int64)
        self._lanes = np.full(config.scheduler.max_num_seqs, -1, dtype=np.int32)
        self.pool: AdapterPool

    def shared_bytes(self, limits: Limits) -> int:
        return 8 * _MOST_RANKS

    def share(self, memory: SharedMemory) -> None:
        self._flags = memory.view(np.int64)

    def attach(self, model: Decoder) -> None:
        args, world = self._config.args, model.group.world
        self.pool = AdapterPool(
            model,
            slots=args.max_loras,
            rank=args.max_lora_rank,
            cache_bytes=int(args.lora_cache_gb * 1e9 / world),
            flags=self._flags[:world],
        )

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return (ColumnSpec(COLUMN, fill=-1),)

    def bind(self, state: BatchState) -> None:
        self._column = state.columns[COLUMN]

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        if COLUMN in plan.writes:
            lanes, slots = plan.writes[COLUMN]
            self._lanes[lanes] = slots
        if LOADS in plan.writes:
            for slot, line in zip(*plan.writes[LOADS], strict=True):
                path, digest = json.loads("".join(map(chr, line[1:])))
                self.pool.load(int(line[0]), int(slot), path, digest)

    def altered(self, plan: StepPlan) -> bool:
        return bool((self._lanes[plan.lanes] >= 0).any())

    def body(self, rows: StepRows, tokens: int, altered: bool) -> None:
        if altered:
            self.pool.begin(rows, self._column, tokens)
        else:
            self.pool.end()

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {ADAPTER_POOL: lambda _: self.pool}

    def close(self) -> None:
        self.pool.close()
