"""The devices of a model's ranks, and what keeps a model from being shared out."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError
from quire.models import Decoder, ModelSpec, build_model
from quire.parallel import SingleGroup
from quire.parallel.torch_group import TorchGroup, join_group
from quire.quantization import Quantization

_SIZES = (2, 3, 4, 5, 6, 8, 16)
_PARAM = "tensor_parallel_size"


class _Ranked(SingleGroup):
    """Stands for one of several ranks where only shapes are asked for."""

    def __init__(self, world: int) -> None:
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
    if device != "cpu":
        _check_devices(device, world)
    reason = obstacle(spec, quantization, world)
    if reason is not None:
        sizes = [str(size) for size in _SIZES if obstacle(spec, quantization, size) is None]
        allowed = f"it can be shared out over {', '.join(sizes)}" if sizes else "it takes one"
        raise ConfigError(f"{_PARAM}={world}: {reason}; {allowed}", _PARAM)


_REASONS = {
    "deterministic": "sums over ranks round otherwise than those of one rank",
    "host_cache_gb": "KV blocks are moved to the host by one rank only",
}


def obstacle(spec: ModelSpec, quantization: Quantization, world: int) -> str | None:
    """Returns what keeps a model's layers from being shared out over so many ranks, or None."""
    try:
        model_of_rank(spec, quantization, world)
    except ConfigError as error:
        return str(error)
    return None


def model_of_rank(
    spec: ModelSpec, quantization: Quantization, world: int, dtype: torch.dtype | None = None
) -> Decoder:
    """Returns one rank's share of a model, without content.

    Raises:
        ConfigError: the model cannot be shared out over so many ranks.
    """
    group = _Ranked(world)
    return build_model(spec, device="meta", dtype=dtype, group=group, quantization=quantization)


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
