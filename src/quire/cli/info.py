"""The part of `quire info` about several GPUs: what each of a model's ranks would hold."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from json import dumps
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.cli.choices import choices_section
from quire.cli.help import AsJson
from quire.cli.progress import counted
from quire.cli.settings import with_settings
from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import resolve
from quire.engine.ranks.ranks import has_experts, model_of_rank, obstacle
from quire.layers.expert_weights import ExpertLinear
from quire.layers.linear import Linear
from quire.layers.segment_attention import SegmentAttentionSpec
from quire.models import (
    Decoder,
    Encoder,
    build_model,
    load_config,
    model_quantization,
    spec_from_config,
)
from quire.models.config import ARCHITECTURES, is_hub_id
from quire.models.files import download
from quire.models.spec import LayerSpec
from quire.models.stages import layer_bytes, stage_layers
from quire.ops import KVFormat, kv_format
from quire.plan import KVGroup
from quire.tools.bench.record import card_name, versions

_SIZES = (1, 2, 4, 8)
_STAGES = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2))
"""Numbers of stages, and of ranks of each."""


def ranks_section(config: EngineConfig) -> dict[str, str]:
    """Describes the largest rank of each way to spread the model over GPUs.

    The ways are the sizes of tensor_parallel_size, the same with enable_expert_parallel for a model
    with experts, and then those of pipeline_parallel_size. A line has the bytes of weights and of
    a token's KV, or the reason why that way is impossible. On a GPU it also has the number of
    tokens that fit. Activations are not counted.
    """
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
    if not config.encoder:  # An encoder's layers are on one stage.
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
    model: Decoder | Encoder,
    stages: list[range],
    block_size: int,
    stored: KVFormat,
    memory: float | None,
) -> str:
    """Describes the stage with the most weights, and the room of the one that has the least."""
    tokens = dict.fromkeys(range(len(model.layers)), 0)
    for group in model.kv_groups(block_size, stored):
        if group.kind != "state":
            each = group.block_bytes // group.tokens_per_block // len(group.layers)
            tokens |= dict.fromkeys(group.layers, each)
    layers = layer_bytes(model)
    sizes = [sum(layers[index] for index in own) for own in stages]
    if len(stages) == 1:
        # A tied head shares the embeddings, which count once.
        sizes = [sum(parameter.nbytes for parameter in model.parameters())]
    kv = [sum(tokens[index] for index in own) for own in stages]
    weights, token = max(zip(sizes, kv, strict=True))
    told = f"{weights / 1e9:,.2f} GB of weights"
    if isinstance(model, Encoder):  # It keeps no KV.
        return told
    told += f", {token / 1e3:,.1f} KB of KV a token"
    if memory is None:
        return told
    rooms = [max(0.0, memory - size) // max(1, own) for size, own in zip(sizes, kv, strict=True)]
    room = int(min(rooms))
    return told + (f", room for {room:,} tokens" if room else "; they do not fit")


# `quire info`: versions, devices, and what a model would run with.

Section = dict[str, Any]


@with_settings(EngineArgs)
def info(*, engine: EngineArgs, json: AsJson = False) -> None:
    """Prints versions, devices and the model's sizes.

    It reads only configuration: it loads no weights and takes no memory of a device.
    """
    config = config_alone(engine)
    sections = {
        "versions": versions(),
        "devices": devices(),
        "model": model_section(config),
        "ranks": ranks_section(config),
        "settings": settings_section(config),
        "chosen": choices_section(config),
        "architectures": architectures(),
    }
    if json:
        typer.echo(dumps(sections, indent=2))
    else:
        _print(sections)


def config_alone(engine: EngineArgs) -> EngineConfig:
    """Settles every setting. Only the configuration of a hub's model is fetched, no weights."""
    name = engine.model
    if name is not None and is_hub_id(name):
        engine = replace(engine, model=str(download(name, engine.revision, weights=False)))
    config = resolve(engine)
    return config if name is None else replace(config, model_name=name)


def devices() -> Section:
    found: Section = {"cpu": f"{card_name('cpu')}, {os.cpu_count()} cores"}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found


def architectures() -> list[str]:
    return sorted(ARCHITECTURES)


def model_section(config: EngineConfig) -> Section:
    """Sizes come from the shapes of a model without weights.

    KV bytes are told apart: those of every token of a request, those that windows keep at most, and
    recurrent states.
    """
    hf_config = load_config(config.model_path)
    spec = spec_from_config(hf_config)
    dtype = getattr(torch, config.dtype)
    quantization = model_quantization(config.model_path, hf_config, spec, config.args.quantization)
    model = build_model(spec, device="meta", dtype=dtype, quantization=quantization)
    linear = [module for module in model.modules() if isinstance(module, Linear)]
    # Packed values and scales are not parameters, so these layers are counted by their shapes.
    experts = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    layers = [*linear, *experts]
    inside = {id(p) for layer in layers for p in layer.parameters() if p is not layer.bias}
    parameters = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    weights = [weight for layer in linear if not layer.tied for weight in layer.weights]
    weights += [layer.weight for layer in experts]
    parameters += sum(weight.outputs * weight.inputs for weight in weights)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    stored = kv_format(config.kv_cache_dtype, dtype, *spec.head_dims)
    groups = model.kv_groups(config.block_size, stored)
    per_token = sum(_token_bytes(group) for group in groups if group.kind != "state")
    kept = sum(_token_bytes(group) for group in groups if group.kind == "full")
    windows = sum(_token_bytes(g) * g.window for g in groups if g.window is not None)
    states = sum(group.block_bytes for group in groups if group.kind == "state")
    capacity = _kv_bytes(config, weight_bytes)
    return {
        "name": config.model_name,
        "architecture": spec.architecture,
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "attention": "; ".join(dict.fromkeys(filter(None, map(_attention, spec.layers)))),
        "vocab_size": spec.vocab_size,
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "kv_groups": [_group(group) for group in groups if group.block_bytes],
        "kv_bytes_per_token": kept,
        "window_bytes_per_request": windows,
        "state_bytes_per_request": states,
        "kv_tokens_estimate": None
        if capacity is None or not per_token
        else int(capacity // per_token),
    }


def _attention(layer: LayerSpec) -> str:
    """Returns what a layer's attention reads, nothing for a layer without."""
    mixer: Any = layer.mixer
    if hasattr(mixer, "kv_heads"):
        return f"{mixer.heads} heads, {mixer.kv_heads} KV heads of {mixer.head_dim}"
    if isinstance(mixer, SegmentAttentionSpec):
        return f"{mixer.heads} heads of {mixer.head_dim}, in both directions"
    if hasattr(mixer, "rank"):
        return f"{mixer.heads} heads on latents of {mixer.rank} + {mixer.width - mixer.rank}"
    return ""


def _token_bytes(group: KVGroup) -> int:
    return group.block_bytes // group.tokens_per_block


def _group(group: KVGroup) -> str:
    window = "" if group.window is None else f" of {group.window} tokens"
    return f"{group.kind}{window}, {counted(len(group.layers), 'layer')}"


def _kv_bytes(config: EngineConfig, weight_bytes: int) -> float | None:
    """Estimates the bytes for KV without loading the model.

    Activations are not counted. Returns None on a CPU, unless kv_cache_gb is set.
    """
    args = config.args
    if args.kv_cache_gb is not None:
        return args.kv_cache_gb * 1e9
    if config.device.startswith("cuda"):
        total = torch.cuda.get_device_properties(torch.device(config.device)).total_memory
        return max(0.0, total * args.gpu_memory_utilization - weight_bytes)
    return None


def settings_section(config: EngineConfig) -> Section:
    scheduler = asdict(config.scheduler)
    scheduler.pop("pipeline_depth")
    return {
        "device": config.device,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "block_size": config.block_size,
        **scheduler,
    }


def _print(sections: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for title, section in sections.items():
        console.print(f"[bold]{title}[/bold]")
        if isinstance(section, list):
            console.print("  " + ", ".join(section), markup=False)
            continue
        table = Table.grid(padding=(0, 2))
        for name, value in section.items():
            table.add_row(f"  {name}", Text(_shown(name, value)))
        console.print(table, markup=False)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not known before loading"
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if name.endswith("bytes") and value >= 1e6:
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
