"""Sizes of the KV cache: how many blocks fit into the memory that is left."""

from __future__ import annotations

import os
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.plan import KVGroup

_CPU_DEFAULT_GB = 4.0
GB = 1_000_000_000


def cpu_budget(config: EngineConfig) -> int:
    """Returns bytes for the KV cache on a CPU: what was asked, else 4 GB or a quarter of the memory
    that can be had, whichever is less."""
    if config.args.kv_cache_gb is not None:
        return int(config.args.kv_cache_gb * GB)
    return min(int(_CPU_DEFAULT_GB * GB), available_memory() // 4)


def available_memory() -> int:
    """Returns bytes of host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def blocks_per_group(
    config: EngineConfig, groups: Sequence[KVGroup], budget: int | None, drafts: int = 0
) -> tuple[int, ...]:
    """Blocks of each group within `budget` bytes, no more than all lanes at full length can use.
    drafts: the most draft tokens of a row.

    Every group gets as many blocks, as a token takes a place in each.

    Raises:
        ConfigError: not even one sequence of `max_model_len` fits.
    """
    if any(group.kind == "state" for group in groups):
        # Few models have states.
        from quire.runner.state_memory import split_with_states

        return split_with_states(config, groups, budget, drafts)
    if config.args.num_kv_blocks is not None:
        return (config.args.num_kv_blocks,) * len(groups)
    limits = config.scheduler
    longest = max(-(-limits.max_model_len // group.tokens_per_block) for group in groups)
    useful = longest * limits.max_num_seqs
    if budget is None:
        return (useful,) * len(groups)
    each = sum(group.block_bytes for group in groups)
    count = min(useful, max(0, budget) // each)
    if config.device != "cpu":
        # What is not needed by running requests keeps prefixes.
        count = max(0, budget) // each
    if count < longest:
        raise ConfigError(
            f"the KV cache has room for {count} blocks, but one sequence of max_model_len="
            f"{limits.max_model_len} tokens needs {longest}. Give it more memory "
            "(gpu_memory_utilization, kv_cache_gb) or lower max_model_len.",
            "max_model_len",
        )
    return (count,) * len(groups)
