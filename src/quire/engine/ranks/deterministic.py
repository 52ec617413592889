"""Checks whether settings and a model allow bitwise reproducible results (`--deterministic`)."""

from __future__ import annotations

from torch import nn

from quire.config import EngineArgs
from quire.engine.ranks.ranks import model_of_rank
from quire.errors import ConfigError
from quire.layers.experts import Experts
from quire.layers.fixed_sums import segment_count
from quire.layers.linear import Linear
from quire.models import ModelSpec
from quire.quantization import Quantization

_RANKS = "tensor_parallel_size"


def check_deterministic(args: EngineArgs, spec: ModelSpec, quantization: Quantization) -> None:
    """Checks that results depend only on the request.

    Raises:
        ConfigError: they do not. The message names the setting or the layer.
    """
    world = args.tensor_parallel_size
    if world == 1:
        return
    if args.enable_expert_parallel:
        raise ConfigError(
            "deterministic is not supported with enable_expert_parallel: ranks add up their own "
            "experts first, so that sums depend on how many ranks there are",
            "deterministic",
        )
    for module in model_of_rank(spec, quantization, world, rank=world - 1).modules():
        reason = obstacle(module, world)
        if reason is not None:
            raise ConfigError(
                f"deterministic is not supported with {_RANKS}={world}: {reason}", "deterministic"
            )


def obstacle(module: nn.Module, world: int) -> str | None:
    """Returns the reason why ranks cannot have equal numbers of a layer's segments; None if they
    can. See `layers/fixed_sums.py`."""
    if isinstance(module, Experts):
        form, size, (low, high) = (
            module.down.scheme.format,
            module.spec.width,
            module.down.shard.columns,
        )
        if form.inputs == "token":
            return f"{module.name}: each rank rounds its hidden units with its own scales"
    elif isinstance(module, Linear) and module.split == "inputs":
        form, size = module.weight.format, module.inputs
        low, high = module.columns
    else:
        return None
    count = segment_count(size, form)
    if count % world == 0 and (low, high) == (size - size // world, size):
        return None
    groups = f", in whole groups of {form.group}" if form.group else ""
    return f"{module.name}: ranks cannot have equal parts of its {size} inputs{groups}"
