"""The part of `quire info` about several GPUs: what each of a model's ranks would hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.cli.progress import counted

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models import Decoder
    from quire.ops import KVFormat

_SIZES = (1, 2, 4, 8)
_STAGES = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2))
"""Numbers of stages, and of ranks of each."""


def ranks_section(config: EngineConfig) -> dict[str, str]:
    """Returns, for each tensor_parallel_size, the bytes of weights and of a token's KV on the rank
    that holds the most, or why there can be none such; on a GPU also for how many tokens a GPU like
    this one has room. Activations are not counted. Of a model with experts each size has a second
    line, that of enable_expert_parallel; then come those of pipeline_parallel_size."""
    import torch

    from quire.engine.ranks.ranks import has_experts, model_of_rank, obstacle
    from quire.models import load_config, model_quantization, spec_from_config
    from quire.models.stages import stage_layers
    from quire.ops import kv_format

    hf_config = load_config(config.model_path)
    spec = spec_from_config(hf_config)
    quantization = model_quantization(config.model_path, hf_config, spec, config.args.quantization)
    dtype = getattr(torch, config.dtype)
    stored = kv_format(config.kv_cache_dtype, dtype, *spec.head_dims)
    memory = None
    if config.device != "cpu":
        total = torch.cuda.get_device_properties(torch.device(config.device)).total_memory
        memory = total * config.args.gpu_memory_utilization
    ways = [(1, world, whole) for world in _SIZES for whole in (False, True)]
    ways += [(*way, False) for way in _STAGES]
    found = {}
    for stages, world, whole in ways:
        if whole and (world == 1 or not has_experts(spec)):
            continue
        name = _name(stages, world, whole)
        reason = obstacle(spec, quantization, world, whole)
        if stages > len(spec.layers):
            reason = f"the model has {counted(len(spec.layers), 'layer')}"
        if reason is not None:
            found[name] = f"no: {reason}"
            continue
        model = model_of_rank(
            spec, quantization, world, dtype, rank=world - 1, expert_parallel=whole
        )
        layers = [range(len(spec.layers))]
        if stages > 1:
            layers = stage_layers(spec, stages, quantization, dtype)
        found[name] = _held(model, layers, config.block_size, stored, memory)
    return found


def _name(stages: int, world: int, whole: bool) -> str:
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    if stages > 1:
        return f"{stages} stages of {ranks}"
    return f"{ranks} with whole experts" if whole else ranks


def _held(
    model: Decoder, stages: list[range], block_size: int, stored: KVFormat, memory: float | None
) -> str:
    """Describes the stage with the most weights, and the room of the one that has the least."""
    from quire.models.stages import layer_bytes

    tokens = dict.fromkeys(range(len(model.layers)), 0)
    for group in model.kv_groups(block_size, stored):
        if group.kind != "state":
            each = group.block_bytes // group.tokens_per_block // len(group.layers)
            tokens |= dict.fromkeys(group.layers, each)
    layers = layer_bytes(model)
    sizes = [sum(layers[index] for index in own) for own in stages]
    if len(stages) == 1:
        # Embeddings that the head is tied to are there once.
        sizes = [sum(parameter.nbytes for parameter in model.parameters())]
    kv = [sum(tokens[index] for index in own) for own in stages]
    weights, token = max(zip(sizes, kv, strict=True))
    told = f"{weights / 1e9:,.2f} GB of weights, {token / 1e3:,.1f} KB of KV a token"
    if memory is None:
        return told
    rooms = [max(0.0, memory - size) // max(1, own) for size, own in zip(sizes, kv, strict=True)]
    room = int(min(rooms))
    return told + (f", room for {room:,} tokens" if room else "; they do not fit")
