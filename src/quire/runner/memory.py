"""Sizes of the KV cache: how many blocks and states fit into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models import Decoder
from quire.plan import KVGroup


def activation_bytes(config: EngineConfig, model: Decoder) -> int:
    """Returns an upper bound of a step's memory, without weights and KV cache.

    It covers the model's intermediates for the token budget, and logits with their copies while
    sampling.
    """
    limits = config.scheduler
    body = model.workspace_bytes(limits.max_num_batched_tokens)
    # Logits with their copies, and the sampler's token counts.
    head = 8 * max(limits.max_num_seqs, 256) * model.spec.vocab_size * 4
    return body + head + (1 << 30)


def cuda_budget(config: EngineConfig, device: torch.device, reserve: int) -> int:
    """Returns the bytes for the KV cache on a GPU.

    This is the allowed share of the GPU's memory, less the memory in use by any process, less
    `reserve`, the bytes for activations.
    """
    if config.args.kv_cache_gb is not None:
        return int(config.args.kv_cache_gb * GB)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return int(total * config.args.gpu_memory_utilization) - used - reserve


# The split of memory between KV and recurrent states.

_MEAN_TOKENS = 4096
"""Assumed tokens of a mean request, prompt and answer."""
_MEAN_STATES = 3
"""Assumed states of a mean request: its own state, and checkpoints near the ends of its prompt and
of its turn."""


def split_with_states(
    config: EngineConfig, groups: Sequence[KVGroup], budget: int | None, drafts: int
) -> tuple[int, ...]:
    """Returns the number of blocks of each group, where some groups hold recurrent states.

    All groups hold the same number of mean requests. The number of states limits how many requests
    run at once.

    Raises:
        ConfigError: one sequence of `max_model_len` tokens does not fit with two states.
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
            # The longest sequence must fit, so there are fewer states.
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


# How many blocks fit into the memory that is left.

_CPU_DEFAULT_GB = 4.0
GB = 1_000_000_000


def cpu_budget(config: EngineConfig) -> int:
    """Returns the bytes for the KV cache on a CPU.

    The default is 4 GB, or a quarter of the available memory if that is less.
    """
    if config.args.kv_cache_gb is not None:
        return int(config.args.kv_cache_gb * GB)
    return min(int(_CPU_DEFAULT_GB * GB), available_memory() // 4)


def available_memory() -> int:
    """Returns the bytes of host memory that are available without swapping."""
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
    """Returns the number of blocks of each group.

    Every group gets the same number, because a token takes a place in each. On a CPU the number is
    at most what all lanes can use at full length.

    Args:
        budget: bytes of all blocks, or None for as many blocks as all lanes can use.
        drafts: most draft tokens of a row.

    Raises:
        ConfigError: one sequence of `max_model_len` tokens does not fit.
    """
    if any(group.kind == "state" for group in groups):
        return split_with_states(config, groups, budget, drafts)
    if config.args.num_kv_blocks is not None:
        return (config.args.num_kv_blocks,) * len(groups)
    limits = config.scheduler
    longest = max(-(-limits.max_model_len // group.tokens_per_block) for group in groups)
    useful = longest * limits.max_num_seqs
    if budget is None:
        return (useful,) * len(groups)
    each = sum(group.block_bytes for group in groups)
    if not each:  # An encoder keeps nothing.
        return (useful,) * len(groups)
    count = min(useful, max(0, budget) // each)
    if config.device != "cpu":
        # Blocks beyond the need of running requests keep cached prefixes.
        count = max(0, budget) // each
    if count < longest:
        raise ConfigError(
            f"the KV cache has room for {count} blocks, but one sequence of max_model_len="
            f"{limits.max_model_len} tokens needs {longest}. Give it more memory "
            "(gpu_memory_utilization, kv_cache_gb) or lower max_model_len.",
            "max_model_len",
        )
    return (count,) * len(groups)
