"""Memory of a GPU: the budget of the KV cache, and what is kept for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.models import Decoder
from quire.plan import KVGroup
from quire.runner.memory import GB


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
