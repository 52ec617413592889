"""The features of an engine. Each is imported when the settings, or a request, ask for it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.features.call import CallType, RequestField
from quire.features.loop_feature import LoopFeature
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
    serves: whether every engine that serves clients has it.
    calls, fields: the `CallType`s and `RequestField`s that it declares, as "module:name".
    """

    open: Callable[[EngineConfig], LoopFeature]
    hook: Callable[[EngineConfig], Hook] | None = None
    wanted: Callable[[EngineConfig], bool] = lambda config: False
    asked: Callable[[SamplingParams, RequestOptions], bool] | None = None
    serves: bool = False
    calls: str = ""
    fields: str = ""


def _imported(path: str) -> Callable[[EngineConfig], Any]:
    """Returns a function that imports `module:function` when it is called, and calls that."""

    def made(config: EngineConfig) -> Any:
        return _loaded(path)(config)

    return made


def _loaded(path: str) -> Any:
    """Returns what `module:name` names; nothing for an empty path."""
    if not path:
        return ()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


FEATURES = (
    FeatureEntry(
        _imported("quire.features.pooling:open_pooling"),
        _imported("quire.features.pooling.hook:open_pooler"),
        asked=lambda params, options: options.get("pooling") is not None,
        fields="quire.features.pooling.fields:FIELDS",
    ),
    FeatureEntry(
        _imported("quire.features.kv_offload.loop:OffloadLoop"),
        wanted=lambda config: config.args.host_cache_gb > 0.0,
    ),
    FeatureEntry(
        _imported("quire.features.disaggregation.loop:DisaggLoop"),
        _imported("quire.features.disaggregation.layer_clock:open_layer_clock"),
        wanted=lambda config: config.args.kv_peers is not None,
        calls="quire.features.disaggregation.calls:CALLS",
        fields="quire.features.disaggregation.calls:FIELDS",
    ),
    FeatureEntry(
        _imported("quire.features.speculation.feature:open_speculation"),
        _imported("quire.features.speculation.hook:open_hook"),
        wanted=lambda config: config.args.speculates,
    ),
    FeatureEntry(
        _imported("quire.features.expert_balance.feature:Balance"),
        _imported("quire.features.expert_balance.hook:BalanceHook"),
        wanted=lambda config: config.args.redundant_experts > 0,
    ),
    FeatureEntry(
        _imported("quire.engine.ranks.workers:Ranks"),
        wanted=lambda config: config.args.ranks > 1,
    ),
    FeatureEntry(
        _imported("quire.features.tuning.settings:open_tuning"),
        wanted=lambda config: config.args.tune_tables == "on",
    ),
    # After drafts: masks of their positions need what others have written.
    FeatureEntry(
        _imported("quire.features.structured_output:open_grammars"),
        _imported("quire.runner.hooks.mask:Mask"),
        asked=lambda params, options: params.masked,
    ),
    # After masks: it draws the tokens of its rows.
    FeatureEntry(
        _imported("quire.features.samplers:open_samplers"),
        _imported("quire.features.samplers.hook:open_hook"),
        asked=lambda params, options: params.reshapes,
    ),
    # Behind those that refuse requests: what others refuse is never bound to an adapter.
    FeatureEntry(
        _imported("quire.features.lora.feature:AdapterFeature"),
        _imported("quire.features.lora.hook:AdapterHook"),
        wanted=lambda config: bool(
            config.args.lora_dir or config.args.lora or config.args.enable_lora
        ),
        calls="quire.features.lora.calls:CALLS",
        fields="quire.features.lora.calls:FIELDS",
    ),
    FeatureEntry(
        _imported("quire.features.kv_events.feature:open_events"),
        serves=True,
        calls="quire.features.kv_events.calls:CALLS",
    ),
)
"""Every feature, in the order in which the scheduler and the loop call them."""


def declared_call(name: str) -> CallType[Any, Any] | None:
    """Returns the call that a feature has declared by this name, whether it runs or not."""
    return _calls().get(name)


def declared_field(name: str) -> RequestField[Any] | None:
    """Returns the request field that a feature has declared by this name."""
    return _fields().get(name)


@functools.cache
def _calls() -> dict[str, CallType[Any, Any]]:
    return {call.name: call for entry in FEATURES for call in _loaded(entry.calls)}


@functools.cache
def _fields() -> dict[str, RequestField[Any]]:
    return {field.name: field for entry in FEATURES for field in _loaded(entry.fields)}


def features_at_start(
    config: EngineConfig, *, complete: bool, server: bool = False
) -> list[FeatureEntry]:
    """Returns the features that an engine begins with.

    complete: also those that requests ask for, as in a server, whose first such request should not
        wait for them. An engine whose programs are captured, or
        that has several ranks, always begins with these.
    server: also those of an engine that serves clients.
    """
    captured = config.device != "cpu" and not config.eager
    ready = complete or captured or config.args.ranks > 1
    return [
        entry
        for entry in FEATURES
        if entry.wanted(config) or (ready and entry.asked is not None) or (server and entry.serves)
    ]


def hooks_of(entries: list[FeatureEntry], config: EngineConfig) -> list[Hook]:
    """Returns the features' hooks of a worker, the same on every rank."""
    return [entry.hook(config) for entry in entries if entry.hook is not None]
