"""Opens the tiers below the device's KV cache, and measures the costs of moving and computing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor import Capacity, Executor
from quire.features.kv_offload.costs import CostModel, Rates
from quire.features.kv_offload.feature import OffloadFeature
from quire.features.kv_offload.hook import FILE_KEYS
from quire.features.kv_offload.tiers import GroupTier
from quire.features.loop_feature import LoopFeature
from quire.plan import Admit, BlockAppends, KVGroup, RowFlag, StepPlan, Transfer
from quire.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_PROMPT = {"cpu": 256, "cuda": 4096}
"""Tokens of the prompt that is timed."""
_COPY_BYTES = 256 << 20


class OffloadLoop(LoopFeature):
    """Starts the tiers, and saves the device's cached blocks to files at the end."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._feature: OffloadFeature | None = None

    def start(self, executor: Executor, capacity: Capacity) -> OffloadFeature | None:
        """Opens the tiers that the settings ask for. Returns None if they ask for none.

        Raises:
            ConfigError: the tiers do not support the model's KV.
        """
        if capacity.host_blocks:
            self._feature = open_tiers(self._config, executor, capacity)
        return self._feature

    def stats(self) -> dict[str, Any]:
        return {} if self._feature is None else {"tiers": self._feature.stats()}

    def close(self, drain: Callable[[], None] | None) -> None:
        feature, self._feature = self._feature, None
        if feature is not None and feature.has_files and drain is not None:
            feature.evict_all()
            drain()
            feature.save()
            drain()


def open_tiers(config: EngineConfig, executor: Executor, capacity: Capacity) -> OffloadFeature:
    """Measures the costs, and opens the host tier and, if set, the disk tier.

    Raises:
        ConfigError: the tiers do not support the model's KV.
    """
    if any(group.kind == "window" for group in capacity.groups):
        raise ConfigError(
            "host_cache_gb is not supported for models with sliding-window layers", "host_cache_gb"
        )
    rates = Probe(config, executor, capacity).rates()
    kv = sum(group.block_bytes for group in capacity.groups if group.kind == "full")
    states = sum(group.block_bytes for group in capacity.groups if group.kind == "state")
    costs = CostModel(rates, kv / capacity.groups[0].tokens_per_block, states)
    if not costs.worth_keeping:
        _log.warning(
            "the host cache stays empty: KV is computed faster (%.0f tokens/s) than it is copied "
            "(%.1f GB/s)",
            rates.prefill,
            rates.into / 1e9,
        )
    return OffloadFeature(
        [
            _group_tier(config, executor, index, group, slots)
            for index, (group, slots) in enumerate(
                zip(capacity.groups, capacity.host_blocks, strict=True)
            )
        ],
        costs,
    )


def _group_tier(
    config: EngineConfig, executor: Executor, index: int, group: KVGroup, slots: int
) -> GroupTier:
    state = group.kind == "state"
    if config.args.disk_cache is None:
        # Rates are measured on one rank, but counts are over all ranks.
        block_bytes = group.block_bytes * config.args.tensor_parallel_size
        return GroupTier(index, slots, block_bytes, state=state)
    keys = [key.tobytes() for key in executor.call(FILE_KEYS, index)]
    most = int(config.args.disk_cache_gb * 1e9) // group.block_bytes
    return GroupTier(index, slots, group.block_bytes, keys, most, state=state)


class Probe:
    """Times test plans: a prompt, and copies in each direction. They write the first blocks, whose
    contents no request reads."""

    def __init__(self, config: EngineConfig, executor: Executor, capacity: Capacity) -> None:
        self._config = config
        self._executor = executor
        self._capacity = capacity
        self._step = 0

    def rates(self) -> Rates:
        size = self._capacity.groups[0].block_bytes
        most = min(self._capacity.host_blocks[0], self._capacity.num_blocks[0])
        count = max(1, min(most, _COPY_BYTES // size))
        latency = self._copy("out", 1)
        for direction in ("out", "in"):
            self._copy(direction, count)  # A warm-up, which compiles and touches the memory.
        latency = min(latency, self._copy("out", 1), self._copy("in", 1))
        out, into = self._copy("out", count), self._copy("in", count)
        return Rates(
            prefill=self._prefill(),
            out=count * size / out,
            into=count * size / into,
            latency=latency,
        )

    def _copy(self, direction: str, count: int) -> float:
        """Returns the seconds until `count` blocks are copied."""
        ids = int32(range(count))
        transfer = Transfer(
            id=-1 - self._step,
            direction="in" if direction == "in" else "out",
            place="host",
            group=0,
            blocks=ids,
            slots=ids,
        )
        began = time.perf_counter()
        ended = self._run(StepPlan(**self._head(), transfers=[transfer]))
        while transfer.id not in ended:
            ended = self._run(StepPlan(**self._head()))
        return time.perf_counter() - began

    def _prefill(self) -> float:
        """Returns the tokens per second of a prompt with `_PROMPT` tokens."""
        config, group = self._config.scheduler, self._capacity.groups[0]
        kind = "cpu" if self._config.device == "cpu" else "cuda"
        room = self._capacity.num_blocks[0] * group.tokens_per_block
        limits = (_PROMPT[kind], config.max_num_batched_tokens, config.max_model_len - 1, room)
        length = max(1, min(limits))
        self._run(self._prompt(length))
        began = time.perf_counter()
        self._run(self._prompt(length))
        seconds = time.perf_counter() - began
        self._run(StepPlan(**self._head(), frees=[0]))
        return length / seconds

    def _prompt(self, length: int) -> StepPlan:
        blocks = -(-length // self._capacity.groups[0].tokens_per_block)
        tokens: Int32 = np.zeros(length, dtype=np.int32)
        admit = Admit(
            lane=0,
            lane_epoch=-1,
            request_id="",
            tokens=tokens,
            prompt_len=length,
            computed=0,
            max_total=length + 1,
            params=SamplingParams(max_tokens=1),
            seed=0,
        )
        appends = [
            _one_append([0] * group.table_width(length))
            if group.kind == "state"
            else _one_append(range(blocks))
            for group in self._capacity.groups
        ]
        head = self._head() | {
            "lanes": int32([0]),
            "q_len": int32([length]),
            "n_logits": int32([1]),
            "flags": int32([RowFlag.PROMPT | RowFlag.SAMPLE]),
        }
        return StepPlan(**head, admits=[admit], block_appends=appends)

    def _head(self) -> dict[str, Any]:
        self._step -= 1
        none = int32([])
        return {
            "step_id": self._step,
            "lanes": none,
            "q_len": none,
            "n_logits": none,
            "flags": none,
        }

    def _run(self, plan: StepPlan) -> list[int]:
        self._executor.submit(plan)
        return self._executor.collect().finished_transfers


def _one_append(ids: Sequence[int]) -> BlockAppends:
    """Returns appends of these blocks to the block table of lane 0."""
    return BlockAppends(int32([0]), int32([0]), int32([len(ids)]), int32(ids))
