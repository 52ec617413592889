"""The split of memory between KV and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.plan import KVGroup

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
