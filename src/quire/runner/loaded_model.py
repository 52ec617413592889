"""The first phase of a worker: models with their weights, without memory for requests."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quire import models, ops
from quire.config import EngineConfig
from quire.executor import Measurement, OnProgress
from quire.models.kv_scales import all_head_scales
from quire.models.memory_errors import must_fit_memory
from quire.models.prepack import prepack_weights
from quire.parallel import ProcessGroup
from quire.plan import KVGroup
from quire.runner.hooks import Hook
from quire.runner.memory import activation_bytes, blocks_per_group, cpu_budget, cuda_budget
from quire.runner.releasable import releasable_memory
from quire.runner.state import Limits

logger = logging.getLogger("quire.engine")

_CACHED_WEIGHTS = 1 << 24
"""Number of weights that a CPU's caches may hold."""

Build = Callable[..., models.Decoder]
"""Makes a decoder from a spec, like `build_model`."""


class LoadedModel:
    """The target model, which gives the tokens, and further models of hooks.

    Attributes:
        model: the target model.
        models: all models, in the order of their KV groups.
        groups: the KV groups of all models.
        kv_format: how keys and values are stored.
        weight_memory: memory of the target model's weights.
        kv_memory: memory of the KV cache.
        seconds: how long loading took.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        hooks: Sequence[Hook],
        group: ProcessGroup,
        progress: OnProgress | None = None,
        build: Build = models.build_model,
    ) -> None:
        began = time.perf_counter()
        self.config = config
        self.limits = limits
        self._hooks = hooks
        self.group = group
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.policy = ops.Policy(
            deterministic=config.args.deterministic, disabled=frozenset(config.args.disable)
        )
        self._log_missing_kernels()
        sleeps = config.args.enable_sleep_mode
        self.weight_memory = releasable_memory(self.device, enabled=sleeps)
        self.kv_memory = releasable_memory(self.device, enabled=sleeps)
        with must_fit_memory():
            self.model = self._load(build, progress)
        for hook in hooks:
            hook.attach(self.model)
        self.models = self.model, *(model for hook in hooks for model in hook.models())
        self._prepack()
        head_dims = [size for model in self.models for size in model.spec.head_dims]
        self.kv_format = ops.kv_format(config.kv_cache_dtype, self.dtype, *head_dims)
        groups, first = list[KVGroup](), 0
        for model in self.models:
            groups += model.kv_groups(config.block_size, self.kv_format, first)
            first += len(model.layers)
        self.groups = tuple(groups)
        self.seconds = time.perf_counter() - began

    def measure(self) -> Measurement:
        """Returns the KV groups, and how many blocks of each fit."""
        budget = self._cache_budget()
        blocks = blocks_per_group(self.config, self.groups, budget, self.limits.drafts)
        return Measurement(self.groups, blocks)

    def head_scales(self) -> Sequence[torch.Tensor] | None:
        """Returns the checkpoint's scales of 8-bit keys and values, or None for other formats."""
        if self.kv_format.scales != "head":
            return None
        path, load_format = Path(self.config.model_path), self.config.args.load_format
        return all_head_scales(self.models, path, load_format)

    def _log_missing_kernels(self) -> None:
        """Logs a message if the installed Triton does not run the kernels for this card."""
        if self.device.type != "cuda" or self.group.rank != 0:
            return
        # Imported here because a CPU has no Triton.
        from quire.ops.triton.launch import gluon_missing, traits

        missing = gluon_missing()
        if traits(self.device).capability == (9, 0) and missing is not None:
            logger.warning("%s", missing)

    def _load(self, build: Build, progress: OnProgress | None) -> models.Decoder:
        args, path = self.config.args, Path(self.config.model_path)
        config = models.load_config(path)
        spec = models.spec_from_config(config)
        options: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "group": self.group,
            "quantization": models.model_quantization(path, config, spec, args.quantization),
            "expert_parallel": args.enable_expert_parallel,
            "drafts": self.limits.drafts,
        }
        with self.weight_memory.allocate():
            model = build(spec, **options)
        on_bytes = None if progress is None else functools.partial(progress, "weights")
        models.load_weights(model, path, args.load_format, args.seed, on_bytes)
        return model

    def _prepack(self) -> None:
        if self.device.type != "cpu" or self.policy.deterministic:
            return
        for model in self.models:
            # Smaller models stay in a CPU's caches, where prepacking gains nothing.
            if sum(parameter.numel() for parameter in model.parameters()) >= _CACHED_WEIGHTS:
                prepack_weights(model)

    def _cache_budget(self) -> int | None:
        if self.device.type != "cuda":
            return cpu_budget(self.config)
        reserve = activation_bytes(self.config, self.model)
        budget = cuda_budget(self.config, self.device, reserve)
        if self.config.args.kv_cache_gb is not None:
            return budget  # The setting is for the cache alone; hooks take their memory besides.
        return budget - sum(hook.reserved_bytes(self.groups, budget) for hook in self._hooks)
