"""Sizes of the KV cache: how many blocks and states fit into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models import Decoder
from quire.plan import KVGroup


def cache_budget(
    config: EngineConfig, model: Decoder, groups: Sequence[KVGroup], device: torch.device
) -> int:
    """Returns the bytes for the KV cache on a GPU."""
    budget = cuda_budget(config, device, activation_bytes(config, model))
    return budget - sum(staging_bytes(config, groups, budget))


def activation_bytes(config: EngineConfig, model: Decoder) -> int:
    """Returns an upper bound of what a step needs beside weights and cache: the model's
    intermediates for the token budget, and logits with their copies while sampling."""
    limits = config.scheduler
    body = model.workspace_bytes(limits.max_num_batched_tokens)
    # Logits with their copies, and the sampler's token counts.
    head = 8 * max(limits.max_num_seqs, 256) * model.spec.vocab_size * 4
    return body + head + (1 << 30)


def staging_bytes(config: EngineConfig, groups: Sequence[KVGroup], budget: int) -> tuple[int, ...]:
    """Returns the device memory in which each group's blocks wait for their copy to the host: as
    much as a step of prompts can push out, and at most a fiftieth of the cache, or a quarter of a
    GB. Of recurrent states a step pushes out few."""
    if not config.args.host_cache_gb:
        return tuple(0 for _ in groups)
    blocks = -(-config.scheduler.max_num_batched_tokens // config.block_size)
    most = max(budget // 50, GB // 4)
    wanted = [(2 if group.kind == "state" else blocks) * group.block_bytes for group in groups]
    return tuple(
        max(group.block_bytes, min(size, most)) for group, size in zip(groups, wanted, strict=True)
    )


def cuda_budget(config: EngineConfig, device: torch.device, reserve: int) -> int:
    """Bytes for the KV cache on a GPU: the allowed share of its memory, less what is in use (by
    anyone) and `reserve` for activations."""
    if config.args.kv_cache_gb is not None:
        return int(config.args.kv_cache_gb * GB)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return int(total * config.args.gpu_memory_utilization) - used - reserve


# The split of memory between KV and recurrent states.

_MEAN_TOKENS = 4096
"""Tokens that a request is assumed to have, prompt and answer: a split that suits most work."""
_MEAN_STATES = 3
"""States per request: its own, and checkpoints near the end of its prompt and of its turn."""


def split_with_states(
    config: EngineConfig, groups: Sequence[KVGroup], budget: int | None, drafts: int
) -> tuple[int, ...]:
    """Returns the blocks of each group, of which some are states: as many of each as a number of
    mean requests hold. How many requests run at once follows from the states there are.

    Raises:
        ConfigError: not even one sequence of `max_model_len` fits, with two states; rows may have
            drafts.
    """
    limits, size = config.scheduler, config.block_size
    longest = -(-limits.max_model_len // size)
    mean = -(-min(limits.max_model_len, _MEAN_TOKENS) // size)
    kv = sum(group.block_bytes for group in groups if group.kind != "state")
    state = sum(group.block_bytes for group in groups if group.kind == "state")
    most = _MEAN_STATES * limits.max_num_seqs
    blocks = config.args.num_kv_blocks
    if blocks is not None or budget is None:
        blocks = longest * limits.max_num_seqs if blocks is None else blocks
        states = most
    else:
        requests = max(0, budget) / (mean * kv + _MEAN_STATES * state)
        states = max(2, int(_MEAN_STATES * requests))
        if config.device == "cpu":
            states = min(states, most)
        blocks = max(0, (budget - states * state) // kv)
        if blocks < longest:
            # One long sequence must fit.
            blocks, states = longest, (budget - longest * kv) // state if state else 2
        if config.device == "cpu":
            blocks = min(blocks, longest * limits.max_num_seqs)
    if states < 2:
        raise ConfigError(
            f"the KV cache has no room for one sequence of max_model_len={limits.max_model_len} "
            f"tokens and two states of {state / 1e6:.0f} MB. Give it more memory "
            "(gpu_memory_utilization, kv_cache_gb) or lower max_model_len.",
            "max_model_len",
        )
    return tuple(states if group.kind == "state" else blocks for group in groups)


# Sizes of the KV cache: how many blocks fit into the memory that is left.

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
        pass  # nothing left to import

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
