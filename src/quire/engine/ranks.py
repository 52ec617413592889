"""The devices of a model's ranks, and what keeps a model from being shared out."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError
from quire.layers.experts import ExpertsSpec
from quire.models import Decoder, ModelSpec, build_model
from quire.parallel import SingleGroup
from quire.parallel.torch_group import TorchGroup, join_group
from quire.quantization import Quantization

_SIZES = (2, 3, 4, 5, 6, 8, 16)
_PARAM = "tensor_parallel_size"


class _Ranked(SingleGroup):
    """Stands for one of several ranks where only shapes are asked for."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Returns the settings with the rank's device: ranks have neighbouring GPUs, in order."""
    if config.device == "cpu":
        return config
    first = torch.device(config.device).index or 0
    return replace(config, device=f"cuda:{first + rank}")


def group_of_ranks(
    config: EngineConfig, folder: str, rank: int, world: int, timeout: float
) -> TorchGroup:
    """Meets the other ranks, see `join_group`. config: with the rank's own device."""
    device = torch.device(config.device)
    group = join_group(device, folder, rank, world, timeout)
    if device.type == "cpu" or "symmetric" in config.args.disable:
        return group
    # A CPU has no kernels for it.
    from quire.parallel.symmetric_memory import symmetric_group

    return symmetric_group(device, getattr(torch, config.dtype))


def check_ranks(args: EngineArgs, device: str, spec: ModelSpec, quantization: Quantization) -> None:
    """Refuses ranks that the model, the machine or other settings do not allow.

    Raises:
        ConfigError: names what is in the way, and for a model the sizes that it allows.
    """
    world = args.tensor_parallel_size
    for name in ("deterministic", "host_cache_gb"):
        if getattr(args, name):
            raise ConfigError(
                f"{name} is not supported with {_PARAM}={world}: " + _REASONS[name], name
            )
    if args.enable_expert_parallel and (world == 1 or not has_experts(spec)):
        lack = f"{_PARAM} of at least 2" if world == 1 else "a model with experts"
        raise ConfigError(f"enable_expert_parallel needs {lack}", "enable_expert_parallel")
    if device != "cpu":
        _check_devices(device, world)
    whole = args.enable_expert_parallel
    reason = obstacle(spec, quantization, world, whole)
    if reason is not None:
        sizes = [str(size) for size in _SIZES if obstacle(spec, quantization, size, whole) is None]
        allowed = f"it can be shared out over {', '.join(sizes)}" if sizes else "it takes one"
        raise ConfigError(f"{_PARAM}={world}: {reason}; {allowed}", _PARAM)


_REASONS = {
    "deterministic": "sums over ranks round otherwise than those of one rank",
    "host_cache_gb": "KV blocks are moved to the host by one rank only",
}


def has_experts(spec: ModelSpec) -> bool:
    return any(isinstance(layer.ffn, ExpertsSpec) for layer in spec.layers)


def obstacle(
    spec: ModelSpec, quantization: Quantization, world: int, expert_parallel: bool
) -> str | None:
    """Returns what keeps a model's layers from being shared out over so many ranks, or None."""
    try:
        model_of_rank(spec, quantization, world, expert_parallel=expert_parallel)
    except ConfigError as error:
        return str(error)
    return None


def model_of_rank(
    spec: ModelSpec, quantization: Quantization, world: int, dtype: torch.dtype | None = None,
    *, rank: int = 0, expert_parallel: bool = False,
) -> Decoder:  # fmt: skip
    """Returns a rank's share of a model, without content. The first rank has the least of what does
    not divide evenly, and the last one the most.

    Raises:
        ConfigError: the model cannot be shared out over so many ranks.
    """
    group = _Ranked(rank, world)
    return build_model(
        spec, device="meta", dtype=dtype, group=group, quantization=quantization,
        expert_parallel=expert_parallel,
    )  # fmt: skip


def _check_devices(device: str, world: int) -> None:
    first, count = torch.device(device).index or 0, torch.cuda.device_count()
    if first + world <= count:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    raise ConfigError(
        f"{_PARAM}={world} needs {world} GPUs from cuda:{first} on, but this process sees {count}"
        + limited,
        _PARAM,
    )
