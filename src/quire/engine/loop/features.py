"""The features of an engine: those of `quire.features`, and those that packages add.

A package adds a feature by an entry point of the group `quire.features`, which names its
`FeatureSpec`. Features' parts are imported when the settings, or a request, ask for them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pkgutil
from typing import TYPE_CHECKING, Any

import quire.features
from quire.config import EngineConfig
from quire.features.call import CallType, RequestCheck, RequestField
from quire.features.spec import FeatureSpec, resolve

if TYPE_CHECKING:
    from quire.features.loop_feature import LoopFeature
    from quire.runner import Hook

GROUP = "quire.features"
"""The group of entry points that name features of other packages."""

_RANKS = FeatureSpec(
    name="ranks",
    order=60,
    loop="quire.engine.ranks.workers:Ranks",
    enabled=lambda args: args.ranks > 1,
)
"""The engine's own: statistics and the end of ranks."""


@functools.cache
def all_features() -> tuple[FeatureSpec, ...]:
    """Returns every feature, in the order in which the scheduler and the loop call them."""
    folders = [each.name for each in pkgutil.iter_modules(quire.features.__path__) if each.ispkg]
    found: list[FeatureSpec] = [resolve(f"quire.features.{name}:FEATURE") for name in folders]
    found += [entry.load() for entry in importlib.metadata.entry_points(group=GROUP)]
    return tuple(sorted([*found, _RANKS], key=lambda spec: (spec.order, spec.name)))


def declared_call(name: str) -> CallType[Any, Any] | None:
    """Returns the call that a feature has declared by this name, whether it runs or not."""
    return _calls().get(name)


def declared_field(name: str) -> RequestField[Any] | None:
    """Returns the request field that a feature has declared by this name."""
    return _fields().get(name)


@functools.cache
def _calls() -> dict[str, CallType[Any, Any]]:
    declared = [resolve(spec.calls) for spec in all_features() if spec.calls]
    return {call.name: call for calls in declared for call in calls}


@functools.cache
def _fields() -> dict[str, RequestField[Any]]:
    declared = [resolve(spec.fields) for spec in all_features() if spec.fields]
    return {field.name: field for fields in declared for field in fields}


def features_at_start(
    config: EngineConfig, *, complete: bool, server: bool = False
) -> list[FeatureSpec]:
    """Returns the features that an engine begins with.

    complete: also those that requests ask for, as in a server, whose first such request should not
        wait for them. An engine whose programs are captured, or that has several ranks, always
        begins with these.
    server: also those of an engine that serves clients.
    """
    captured = config.device != "cpu" and not config.eager
    ready = complete or captured or config.args.ranks > 1
    return [
        spec
        for spec in all_features()
        if spec.enabled(config.args)
        or (ready and spec.requested is not None)
        or (server and spec.serves)
    ]


def serving_config(config: EngineConfig) -> EngineConfig:
    """Returns the settings of an engine that serves clients."""
    for spec in all_features():
        if spec.serving:
            config = resolve(spec.serving)(config)
    return config


def open_checks(config: EngineConfig) -> list[RequestCheck]:
    """Makes the checks of requests that features have where requests arrive."""
    return [resolve(spec.request_check)(config) for spec in all_features() if spec.request_check]


def open_loop(spec: FeatureSpec, config: EngineConfig) -> LoopFeature:
    """Makes a feature's part of the engine's loop and of the scheduler."""
    made: LoopFeature = resolve(spec.loop)(config)
    return made


def hooks_of(specs: list[FeatureSpec], config: EngineConfig) -> list[Hook]:
    """Returns the features' hooks of a worker, the same on every rank."""
    return [resolve(spec.hook)(config) for spec in specs if spec.hook]
