"""The part of `quire info` about several GPUs: what each of a model's ranks would hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.config import EngineConfig

_SIZES = (1, 2, 4, 8)


def ranks_section(config: EngineConfig) -> dict[str, str]:
    """Returns, for each tensor_parallel_size, the bytes of weights and of a token's KV on the rank
    that holds the most, or why there can be none such; on a GPU also for how many tokens a GPU like
    this one has room. Activations are not counted. Of a model with experts each size has a second
    line, that of enable_expert_parallel."""
    import torch

    from quire.engine.ranks import has_experts, model_of_rank, obstacle
    from quire.models import load_config, model_quantization, spec_from_config
    from quire.ops import kv_format

    hf_config = load_config(config.model_path)
    spec = spec_from_config(hf_config)
    quantization = model_quantization(config.model_path, hf_config, spec, config.args.quantization)
    dtype = getattr(torch, config.dtype)
    memory = None
    if config.device != "cpu":
        total = torch.cuda.get_device_properties(torch.device(config.device)).total_memory
        memory = total * config.args.gpu_memory_utilization
    found = {}
    ways = [(world, whole) for world in _SIZES for whole in (False, True)]
    for world, whole in ways:
        if whole and (world == 1 or not has_experts(spec)):
            continue
        name = "1 rank" if world == 1 else f"{world} ranks"
        name += " with whole experts" if whole else ""
        reason = obstacle(spec, quantization, world, whole)
        if reason is not None:
            found[name] = f"no: {reason}"
            continue
        model = model_of_rank(
            spec, quantization, world, dtype, rank=world - 1, expert_parallel=whole
        )
        weights = sum(parameter.nbytes for parameter in model.parameters())
        stored = kv_format(config.kv_cache_dtype, dtype, *spec.head_dims)
        groups = model.kv_groups(config.block_size, stored)
        token = sum(g.block_bytes // g.tokens_per_block for g in groups if g.kind != "state")
        found[name] = f"{weights / 1e9:,.2f} GB of weights, {token / 1e3:,.1f} KB of KV a token"
        if memory is not None:
            room = int(max(0.0, memory - weights) // max(1, token))
            found[name] += f", room for {room:,} tokens" if room else "; they do not fit"
    return found
