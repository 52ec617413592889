"""Builds an engine from a user's settings."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import models
from quire.config import EngineArgs, EngineConfig, SchedulerConfig
from quire.engine.encoders import check_encoder_dtype, encoder_args, encoder_block_size
from quire.engine.loop.core import EngineCore
from quire.engine.loop.features import (
    all_features,
    enabled_features,
    features_at_start,
    hooks_of,
    open_loop,
    takes_call,
)
from quire.engine.ranks.deterministic import check_deterministic
from quire.engine.ranks.ranks import check_ranks, defaults_of_stages
from quire.engine.ranks.workers import WorkerExecutor
from quire.errors import ConfigError, ModelError
from quire.executor import OnProgress
from quire.features.loop_feature import LoopFeature, RequestedFeature
from quire.features.spec import FeatureSpec
from quire.features.spec import resolve as part
from quire.models.config import load_config
from quire.models.families.settings import several
from quire.ops import kv_format
from quire.runner import ModelRunner
from quire.scheduler import Order, Scheduler, TextScheduler
from quire.scheduler.fair_share import FairShare
from quire.text.tokenizer import eos_token_ids

if TYPE_CHECKING:
    from quire.models import ModelSpec
    from quire.quantization import Quantization

_GPU_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "steps_in_flight": 2}
_CPU_DEFAULTS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "steps_in_flight": 1}
_MOST_TEXTS = 256
"""Default of `max_num_seqs` for encoders, whose requests need no memory."""


def resolve(args: EngineArgs) -> EngineConfig:
    """Resolves every setting. Reads the model's configuration files, but no weights.

    Raises:
        ModelError: there is no such model, or its architecture is unknown.
        ConfigError: a setting contradicts the model or the machine.
    """
    path = models.resolve_model_path(args.model, args.revision)
    hf_config = models.load_config(path)
    spec = models.spec_from_config(hf_config)
    quantization = models.model_quantization(path, hf_config, spec, args.quantization)
    device = _device(args.device)
    block_size = args.block_size
    if isinstance(spec, models.EncoderSpec):
        args = encoder_args(args, spec, path)
        block_size = encoder_block_size(args.max_model_len or spec.max_positions)
    _check_uncommon(args, device, spec, quantization)
    own = args.tokenizer is None
    tokenizer = path if own else models.resolve_model_path(args.tokenizer, None)
    tokenizer_path = None if args.skip_tokenizer_init else str(tokenizer)
    dtype = _dtype(args.dtype, device, str(spec.dtype).removeprefix("torch."))
    if isinstance(spec, models.EncoderSpec):
        check_encoder_dtype(args, device, dtype)
    return EngineConfig(
        args=args,
        model_path=str(path),
        tokenizer_path=tokenizer_path,
        model_name=args.model or path.name,
        device=device,
        dtype=dtype,
        kv_cache_dtype=_kv_cache_dtype(args.kv_cache_dtype, dtype, spec.head_dims),
        block_size=block_size,
        scheduler=_scheduler_config(
            args, device, spec.max_positions, whole_texts=isinstance(spec, models.EncoderSpec)
        ),
        eos_token_ids=_eos_ids(path, hf_config, tokenizer_path, spec.vocab_size),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        **_feature_fields(args, path, hf_config),
    )


def _check_uncommon(
    args: EngineArgs, device: str, spec: ModelSpec, quantization: Quantization
) -> None:
    """Checks settings that few engines use. Raises ConfigError if the model or the machine does
    not support one."""
    for feature in enabled_features(args):
        if feature.check:
            part(feature.check)(args, spec, device)
    if args.parallel:
        check_ranks(args, device, spec, quantization)
    if args.deterministic:
        check_deterministic(args, spec, quantization)


def _scheduler_config(
    args: EngineArgs, device: str, max_positions: int, *, whole_texts: bool
) -> SchedulerConfig:
    defaults = dict(_CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS)
    if args.parallel:
        defaults |= defaults_of_stages(args.pipeline_parallel_size, defaults)
    if whole_texts:
        longest = max(defaults["max_num_batched_tokens"], args.max_model_len or max_positions)
        defaults = {**defaults, "max_num_seqs": _MOST_TEXTS, "max_num_batched_tokens": longest}
    picked = defaults | {n: v for n in defaults if (v := getattr(args, n)) is not None}
    if "overlap" in args.disable:
        picked["steps_in_flight"] = 1
    return SchedulerConfig(
        **picked,
        pipeline_depth=args.pipeline_parallel_size,
        max_model_len=_max_model_len(args.max_model_len, max_positions),
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        priority_weight=args.priority_weight,
        max_queue=args.max_queue,
        max_queue_tokens=args.max_queue_tokens,
    )


def _feature_fields(args: EngineArgs, path: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that features read from the model."""
    found: dict[str, Any] = {}
    for feature in all_features():
        if feature.config:
            found |= part(feature.config)(args, path, hf_config)
    return found


def build_core(
    config: EngineConfig,
    progress: OnProgress | None = None,
    *,
    complete: bool = True,
    server: bool = False,
) -> EngineCore:
    """Builds an engine in this process and loads its weights.

    Args:
        complete: Whether all optional features are ready from the start. Otherwise the first
            request for a feature turns it on, if the device allows that.
        server: Whether the engine serves clients. If so, requests may name tenants, which share
            the engine fairly, and routers may ask for its load.
    """
    features = features_at_start(config, complete=complete, server=server)
    hooks, ranks = hooks_of(features, config), config.args.ranks
    loop_features = [open_loop(feature, config) for feature in features]
    order = _order(config.scheduler, server)
    scheduler = TextScheduler if config.encoder else Scheduler
    if ranks > 1:
        executor = WorkerExecutor(config, progress, hooks, ranks)
        return EngineCore(
            config, executor, loop_features=loop_features, order=order, scheduler=scheduler
        )
    runner = ModelRunner(config, progress, hooks)

    def open_requested(feature: FeatureSpec) -> LoopFeature:
        for hook in hooks_of([feature], config):
            runner.add_hook(hook)
        return open_loop(feature, config)

    return EngineCore(
        config,
        runner,
        loop_features=loop_features,
        order=order,
        scheduler=scheduler,
        requested=[
            RequestedFeature(
                feature.requested,
                functools.partial(open_requested, feature),
                functools.partial(takes_call, feature),
            )
            for feature in all_features()
            if feature.requested is not None and feature not in features and not config.encoder
        ],
    )


def _order(config: SchedulerConfig, tenants: bool) -> Order:
    if not tenants:
        return Order(config)
    return FairShare(config)


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"device {wanted!r} is not known", "device") from error
    if device.type != "cuda" and wanted != "cpu":
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {wanted!r}", "device")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device {wanted!r} is not there: found {count} GPUs", "device")
    return wanted


def _dtype(wanted: str, device: str, checkpoint: str) -> str:
    if wanted == "auto":
        wanted = "float32" if device == "cpu" else checkpoint
        if wanted == "float32" and device != "cpu":
            wanted = "bfloat16"
        if wanted == "bfloat16" and device != "cpu" and not _has_bf16(device):
            wanted = "float16"
    return wanted


def _kv_cache_dtype(wanted: str, dtype: str, head_dims: tuple[int, ...]) -> str:
    import torch

    if wanted == "auto":
        return dtype
    wanted = {"fp8": "fp8_e4m3"}.get(wanted, wanted)
    stored = kv_format(wanted, getattr(torch, dtype), *head_dims)
    if stored.scales == "none" and wanted != dtype:
        raise ConfigError(
            f"kv_cache_dtype={wanted}: the model computes in {dtype}, and its KV is stored like "
            "that (auto) or in 8 bits (fp8, fp8_dynamic, int8). dtype sets both",
            "kv_cache_dtype",
        )
    return wanted


def _has_bf16(device: str) -> bool:
    import torch

    return torch.cuda.get_device_capability(torch.device(device))[0] >= 8


def _max_model_len(wanted: int | None, limit: int) -> int:
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {limit} positions the model was made for",
            "max_model_len",
        )
    return wanted or limit


def _eos_ids(
    path: Path, hf_config: dict[str, Any], tokenizer_path: str | None, vocab_size: int
) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of generation_config.json, or else of config.json. The
    tokenizer's id is added because chat models end their turns with it."""
    file = "generation_config.json"
    generation = load_config(path, file) if (path / file).exists() else {}
    ids = several(generation if "eos_token_id" in generation else hf_config, "eos_token_id")
    if any(type(id) is not int for id in ids):
        raise ModelError(f"{path}: eos_token_id must be token ids, got {ids!r}")
    if tokenizer_path is not None:
        ids = [*ids, *eos_token_ids(Path(tokenizer_path))]
    return tuple(dict.fromkeys(id for id in ids if 0 <= id < vocab_size))
