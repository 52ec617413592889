"""The features of an engine. A feature's parts are imported when settings or a request need it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from quire.config import EngineArgs, EngineConfig
from quire.features.call import CallType, PromptReader
from quire.features.registry import installed_features
from quire.features.spec import FeatureSpec, resolve

if TYPE_CHECKING:
    from quire.features.loop_feature import LoopFeature
    from quire.request import RequestOptions
    from quire.runner import Hook

_RANKS = FeatureSpec(
    name="ranks",
    order=60,
    loop="quire.engine.ranks.workers:Ranks",
    enabled=lambda args: args.ranks > 1,
)
"""The engine's own feature: it reports the ranks' statistics and notices when a rank ends."""


@functools.cache
def all_features() -> tuple[FeatureSpec, ...]:
    """Returns every feature, in the order in which the scheduler and the loop call them."""
    return tuple(sorted([*installed_features(), _RANKS], key=lambda spec: (spec.order, spec.name)))


def enabled_features(args: EngineArgs) -> list[FeatureSpec]:
    """Returns the features that settings ask for."""
    return [spec for spec in all_features() if spec.enabled(args)]


def features_at_start(
    config: EngineConfig, *, complete: bool, server: bool = False
) -> list[FeatureSpec]:
    """Returns the features that an engine starts with.

    Args:
        complete: whether to include the features that requests turn on. A server includes them
            because the first such request should not wait. They are always included if the
            engine captures its programs or has several ranks.
        server: whether to include the features of engines that serve clients.
    """
    captured = config.device != "cpu" and not config.eager
    # No request to an encoder asks for a feature.
    ready = (complete or captured or config.args.ranks > 1) and not config.encoder
    return [
        spec
        for spec in all_features()
        if spec.enabled(config.args)
        or spec.needed(config)
        or (ready and spec.requested is not None)
        or (server and spec.serves)
    ]


def serving_config(config: EngineConfig) -> EngineConfig:
    """Returns the settings of an engine that serves clients."""
    for spec in all_features():
        if spec.serving:
            config = resolve(spec.serving)(config)
    return config


def open_prompt_reader(config: EngineConfig) -> PromptReader | None:
    """Returns the reader of what prompts have besides text; None: no feature has one."""
    reader = next((spec.prompts for spec in all_features() if spec.prompts), "")
    made: PromptReader | None = resolve(reader)(config) if reader else None
    return made


def keyword_options(core: Any, count: int, **given: Any) -> list[RequestOptions]:
    """Returns the request options that the keywords of a call to `LLM` stand for.

    Args:
        core: the engine's loop.
        count: number of the call's prompts.
        given: values of features' keywords; None: the caller left the keyword out.
    """
    options: list[RequestOptions] = [{} for _ in range(count)]
    readers = {name: place for spec in all_features() for name, place in spec.keywords.items()}
    for name, value in given.items():
        if value is not None:
            for each, more in zip(options, resolve(readers[name])(core, value, count), strict=True):
                each.update(more)
    return options


def takes_call(spec: FeatureSpec, call: CallType[Any, Any]) -> bool:
    """Returns whether a feature takes a call."""
    return bool(spec.calls) and call in resolve(spec.calls)


def method_of_feature(name: str) -> Any:
    """Returns the function with which a feature carries out a method of `LLM`."""
    return next(resolve(spec.methods[name]) for spec in all_features() if name in spec.methods)


def open_loop(spec: FeatureSpec, config: EngineConfig) -> LoopFeature:
    """Makes a feature's part of the engine's loop and of the scheduler."""
    made: LoopFeature = resolve(spec.loop)(config)
    return made


def hooks_of(specs: list[FeatureSpec], config: EngineConfig) -> list[Hook]:
    """Returns the features' hooks for a worker that draws tokens: the same hooks on every rank."""
    return [resolve(spec.hook)(config) for spec in specs if spec.hook]


def earlier_hooks(config: EngineConfig) -> list[Hook]:
    """Returns the features' hooks for a worker in a pipeline stage before the last."""
    places = [spec.earlier_hook for spec in features_at_start(config, complete=True)]
    return [resolve(place)(config) for place in places if place]
