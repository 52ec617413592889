"""The declaration of a feature: data, and the places of its parts.

A feature's folder exports one `FEATURE`. It names its parts as "module:name", and `resolve` imports
a part in the process that runs it. So an API process imports no part that needs torch, and an
engine imports only the parts that it uses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.request import RequestOptions
    from quire.sampling_params import SamplingParams

ANYWHERE = 65
"""The order of a feature that depends on no other. It comes before those that decide on tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """Declares a feature.

    Texts name a part as "module:name". An empty text leaves the part out.

    Attributes:
        name: the feature's unique name.
        order: its place among all features. The scheduler and the loop call lower places first.
        origin: the package and the place of the declaration. The registry fills it in.

        args: its class of settings, a `FeatureArgs`.
        enabled: returns whether settings (`EngineArgs`) ask for the feature.
        needed: returns whether the model of an `EngineConfig` asks for the feature.
        check: refuses settings of an engine that has the feature. Arguments: `EngineArgs`, a
            `ModelSpec`, the device's name.
        whole_steps: ends the error "is not supported with ..." of an engine that computes steps as
            two halves. Empty: the feature works with halves.
        config: returns fields of `EngineConfig`. Arguments: `EngineArgs`, the model's folder, its
            config.json.
        serving: changes the `EngineConfig` of an engine that serves clients.
        serves: whether every engine that serves clients has the feature. The feature must have no
            hook, because other ranks do not know whether their engine serves.

        loop: makes the feature's `LoopFeature` from an `EngineConfig`.
        hook: makes the hook of every rank's worker from an `EngineConfig`.
        earlier_hook: makes the hook of workers in pipeline stages before the last.
        own_logits: whether models of the hook compute logits on all ranks.

        requested: returns whether a request asks for the feature. None: no request can.
        prompts: makes a `PromptReader` from an `EngineConfig`, in processes where prompts arrive.
        keywords: functions by keyword of `LLM.generate`. Arguments: the loop, the keyword's value,
            the number of prompts. They return a `RequestOptions` for each prompt.
        methods: functions by method of `LLM`. Arguments: the loop, then the method's own.
        models: makes `NamedModels` from the engine's client, in each API process.

        calls: its tuple of `CallType`s.
        fields: its tuple of `RequestField`s.
        routes: its tuple of `Route`s.
        stats: the type of its statistics.
        stats_name: the field of `EngineStats` that holds them.
        metrics: makes Prometheus families of the statistics.
        live_rows: names for the live view, by statistic ("sources.draft.rows").
    """

    name: str
    loop: str
    hook: str = ""
    order: int = ANYWHERE
    args: str = ""
    enabled: Callable[[Any], bool] = lambda args: False
    needed: Callable[[Any], bool] = lambda config: False
    check: str = ""
    whole_steps: str = ""
    own_logits: bool = False
    earlier_hook: str = ""
    config: str = ""
    requested: Callable[[SamplingParams, RequestOptions], bool] | None = None
    serving: str = ""
    serves: bool = False
    prompts: str = ""
    calls: str = ""
    fields: str = ""
    stats: str = ""
    stats_name: str = ""
    live_rows: str = ""
    metrics: str = ""
    keywords: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    models: str = ""
    routes: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        if self.serves and self.hook:
            raise ValueError(
                f"feature {self.name!r}: serves is not for one with a hook: use enabled"
            )


def resolve(path: str) -> Any:
    """Imports what "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
