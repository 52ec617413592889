"""The features of an engine. Each is imported when the settings, or a request, ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.loop_feature import LoopFeature
from quire.request import RequestOptions
from quire.runner import Hook
from quire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FeatureEntry:
    """Says how to make a feature, and when it is needed.

    open: makes the part of the engine's loop and of the scheduler.
    hook: makes the runner's part, on every rank; None: the feature has none.
    wanted: whether settings ask for it.
    asked: whether a request asks for it; None: no request can.
    """

    open: Callable[[EngineConfig], LoopFeature]
    hook: Callable[[EngineConfig], Hook] | None = None
    wanted: Callable[[EngineConfig], bool] = lambda config: False
    asked: Callable[[SamplingParams, RequestOptions], bool] | None = None


def _pooling(config: EngineConfig) -> LoopFeature:
    from quire.pooling import PoolingFeature

    return PoolingFeature()


def _pooling_hook(config: EngineConfig) -> Hook:
    from quire.pooling.hook import Pooler

    return Pooler()


def _offload(config: EngineConfig) -> LoopFeature:
    from quire.offload.loop import OffloadLoop

    return OffloadLoop(config)


def _adapters(config: EngineConfig) -> LoopFeature:
    from quire.adapters.feature import AdapterFeature

    return AdapterFeature(config)


def _adapters_hook(config: EngineConfig) -> Hook:
    from quire.adapters.hook import AdapterHook

    return AdapterHook(config)


def _structured(config: EngineConfig) -> LoopFeature:
    from quire.structured import open_grammars

    return open_grammars(config)


def _structured_hook(config: EngineConfig) -> Hook:
    from quire.runner.hooks.mask import Mask

    return Mask(config)


FEATURES = (
    FeatureEntry(
        _pooling,
        _pooling_hook,
        asked=lambda params, options: options.get("pooling") is not None,
    ),
    FeatureEntry(_offload, wanted=lambda config: config.args.host_cache_gb > 0.0),
    # After drafts: masks of their positions need what others have written.
    FeatureEntry(
        _structured,
        _structured_hook,
        asked=lambda params, options: params.structured_outputs is not None,
    ),
    # The last: what others refuse is never bound to an adapter.
    FeatureEntry(
        _adapters,
        _adapters_hook,
        wanted=lambda config: (
            config.args.enable_lora or bool(config.args.lora) or config.args.lora_dir is not None
        ),
    ),
)
"""Every feature, in the order in which the scheduler and the loop call them."""


def features_at_start(config: EngineConfig, *, complete: bool) -> list[FeatureEntry]:
    """Returns the features that an engine begins with.

    complete: also those that requests ask for, as in a server, whose first such request should not
        wait for them. An engine whose programs are captured, or
        that has several ranks, always begins with these.
    """
    captured = config.device != "cpu" and not config.eager
    ready = complete or captured or config.args.tensor_parallel_size > 1
    return [
        entry for entry in FEATURES if entry.wanted(config) or (ready and entry.asked is not None)
    ]


def hooks_of(entries: list[FeatureEntry], config: EngineConfig) -> list[Hook]:
    """Returns the features' hooks of a worker, the same on every rank."""
    return [entry.hook(config) for entry in entries if entry.hook is not None]
