"""The devices of a model's ranks, and checks whether a model can be divided among ranks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.features import earlier_hooks, enabled_features
from quire.engine.ranks.async_tp import check_async_tp, halves_group
from quire.errors import ConfigError, installing
from quire.executor import OnProgress
from quire.models import Decoder, ModelSpec, build_model
from quire.models.stages import stage_layers
from quire.parallel import SingleGroup
from quire.parallel.pipeline import Pipeline, stage_of
from quire.parallel.torch_group import TorchGroup, join_group
from quire.quantization import Quantization
from quire.runner import Hook, ModelRunner
from quire.runner.stages import EarlierStage, LastStage

_SIZES = (2, 3, 4, 5, 6, 8, 16)
_PARAM, _STAGES = "tensor_parallel_size", "pipeline_parallel_size"


class _ShapeGroup(SingleGroup):
    """A group without communication, to compute the shapes of one rank's layers."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world


def config_of_rank(config: EngineConfig, rank: int, devices: Sequence[str] = ()) -> EngineConfig:
    """Returns the settings with the rank's device.

    A machine's ranks have consecutive GPUs, unless `devices` names the device of each rank.
    """
    if config.device == "cpu":
        return config
    if rank < len(devices):
        return replace(config, device=devices[rank])
    first, nodes = torch.device(config.device).index or 0, config.args.nnodes
    index = rank if nodes == 1 else rank % ranks_of_node(config, config.args.ranks)
    return replace(config, device=f"cuda:{first + index}")


def ranks_of_node(config: EngineConfig, world: int) -> int:
    """Returns the number of ranks on each machine."""
    return world // config.args.nnodes


def open_worker(
    config: EngineConfig,
    rendezvous: str,
    rank: int,
    world: int,
    timeout: float,
    progress: OnProgress | None = None,
    hooks: Sequence[Hook] = (),
) -> tuple[TorchGroup, ModelRunner]:
    """Joins the group of all ranks (see `join_group`), and makes this rank's worker.

    Args:
        config: settings with the rank's own device.
        hooks: hooks of a worker that draws tokens (`draws_tokens`).

    Returns:
        The group of the ranks that share the worker's layers, and the worker.
    """
    device, stages = torch.device(config.device), config.args.pipeline_parallel_size
    group = join_group(device, rendezvous, rank, world, timeout)
    pipeline = None
    if stages > 1:
        pipeline = Pipeline(stages, timeout)
        group = pipeline.group
    if device.type == "cuda" and group.world > 1 and "symmetric" not in config.args.disable:
        # A CPU has no kernels for it.
        from quire.parallel.symmetric_memory import symmetric_group

        dtype: torch.dtype = getattr(torch, config.dtype)
        own_logits = any(spec.own_logits for spec in enabled_features(config.args))
        vocab = 0 if own_logits else config.vocab_size
        group = symmetric_group(device, dtype, group.handle, config.hidden_size, vocab)
    if config.args.async_tp != "off" and group.world > 1:
        group = halves_group(config, group)
    if pipeline is None:
        return group, ModelRunner(config, progress, hooks, group)
    if pipeline.stage < stages - 1:
        return group, EarlierStage(config, pipeline, group, earlier_hooks(config))
    return group, LastStage(config, pipeline, group, progress, hooks)


def draws_tokens(config: EngineConfig, rank: int, world: int) -> bool:
    """Whether a rank is in the last stage. Only its workers draw tokens and run hooks."""
    stages = config.args.pipeline_parallel_size
    return stage_of(rank, world, stages) == stages - 1


def check_ranks(args: EngineArgs, device: str, spec: ModelSpec, quantization: Quantization) -> None:
    """Checks that the model, the machine and other settings allow the number of ranks.

    Raises:
        ConfigError: they do not. The message names the reason, and the sizes that the model allows.
    """
    world = args.tensor_parallel_size
    _check_settings(args)
    if args.enable_expert_parallel and (world == 1 or not has_experts(spec)):
        need = f"{_PARAM} of at least 2" if world == 1 else "a model with experts"
        raise ConfigError(f"enable_expert_parallel needs {need}", "enable_expert_parallel")
    if args.async_tp == "on":
        check_async_tp(args, spec)
    if device != "cpu":
        _check_devices(device, args)
    whole = args.enable_expert_parallel
    reason = obstacle(spec, quantization, world, whole)
    if reason is not None:
        sizes = [str(size) for size in _SIZES if obstacle(spec, quantization, size, whole) is None]
        allowed = f"the model allows {', '.join(sizes) or 'only 1'}"
        raise ConfigError(f"{_PARAM}={world}: {reason}; {allowed}", _PARAM)
    if args.pipeline_parallel_size > 1:
        stage_layers(spec, args.pipeline_parallel_size, quantization)


def defaults_of_stages(stages: int, defaults: Mapping[str, int]) -> dict[str, int]:
    """Returns the scheduler's defaults that a pipeline changes. defaults: those for one stage."""
    if stages == 1:
        return {}
    return {
        # While a step is in a stage, the steps after it wait. So steps are shorter.
        "max_num_batched_tokens": max(1024, 4096 // stages),
        "steps_in_flight": defaults["steps_in_flight"] + stages - 1,
    }


def _check_settings(args: EngineArgs) -> None:
    _check_nodes(args)
    if args.distributed_executor == "ray":
        _check_ray(args)
    stages, depth = args.pipeline_parallel_size, args.steps_in_flight
    if 1 < stages < (depth or 0) - 1:
        raise ConfigError(
            f"steps_in_flight={depth} is more than {_STAGES}={stages} can use, which is "
            f"{stages + 1}",
            "steps_in_flight",
        )


def _check_nodes(args: EngineArgs) -> None:
    nodes, stages = args.nnodes, args.pipeline_parallel_size
    if stages % nodes:
        raise ConfigError(
            f"nnodes={nodes}: machines hold equal numbers of whole stages, but {_STAGES}={stages} "
            f"is not a multiple of {nodes}",
            "nnodes",
        )
    if not 0 <= args.node_rank < nodes:
        raise ConfigError(
            f"node_rank={args.node_rank} must be in [0, {nodes}) with nnodes={nodes}", "node_rank"
        )
    if args.node_rank:
        raise ConfigError(
            f"node_rank={args.node_rank}: machine 0 runs the engine; the others run quire serve",
            "node_rank",
        )
    if not 1 <= args.master_port < 65535:
        raise ConfigError(f"master_port={args.master_port} must be in [1, 65535)", "master_port")


def _check_ray(args: EngineArgs) -> None:
    reason = ""
    if importlib.util.find_spec("ray") is None:
        reason = f"Ray is not installed; {installing('ray')}"
    elif args.ranks == 1:
        reason = f"there is one rank, which runs in this process; set {_PARAM} or {_STAGES}"
    elif args.device.startswith("cuda:"):
        reason = f"Ray chooses the GPUs, so device={args.device} must be left out"
    elif args.master_addr != EngineArgs.master_addr:
        reason = (
            f"Ray knows this machine's address, so master_addr={args.master_addr} must be left out"
        )
    if reason:
        raise ConfigError(f"distributed_executor=ray: {reason}", "distributed_executor")


def has_experts(spec: ModelSpec) -> bool:
    return any(getattr(layer.ffn, "experts", 0) for layer in spec.layers)


def obstacle(
    spec: ModelSpec, quantization: Quantization, world: int, expert_parallel: bool
) -> str | None:
    """Returns the reason why a model's layers cannot be divided among `world` ranks; None if they
    can."""
    try:
        model_of_rank(spec, quantization, world, expert_parallel=expert_parallel)
    except ConfigError as error:
        return str(error)
    return None


def model_of_rank(
    spec: ModelSpec, quantization: Quantization, world: int, dtype: torch.dtype | None = None,
    *, rank: int = 0, expert_parallel: bool = False,
) -> Decoder:  # fmt: skip
    """Returns a rank's share of a model on the meta device. If a size does not divide evenly, the
    first rank has the smallest part and the last one the largest.

    Raises:
        ConfigError: the model cannot be divided among `world` ranks.
    """
    group = _ShapeGroup(rank, world)
    return build_model(
        spec, device="meta", dtype=dtype, group=group, quantization=quantization,
        expert_parallel=expert_parallel,
    )  # fmt: skip


def _check_devices(device: str, args: EngineArgs) -> None:
    first, count = torch.device(device).index or 0, torch.cuda.device_count()
    needed = args.ranks // args.nnodes
    if first + needed <= count:
        return
    sizes = ((name, getattr(args, name)) for name in (_PARAM, _STAGES))
    given = " and ".join(f"{name}={size}" for name, size in sizes if size > 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    raise ConfigError(
        f"{given}: {needed} GPUs are needed from cuda:{first} on, but this process sees {count}"
        + limited,
        _PARAM if args.tensor_parallel_size > 1 else _STAGES,
    )
