"""The declaration of a feature: data, and the places of its parts.

A feature's folder exports one `FEATURE`. Its parts are named by "module:name" strings, which
`resolve` imports where they run. So an API process imports no part that needs torch, and an engine
imports no part that it does not use.
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
"""The place of a feature that depends on no other: before those that decide on tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """Declares a feature.

    Attributes:
        name: unique.
        loop: makes the part of the engine's loop and of the scheduler, from an `EngineConfig`.
        hook: makes the runner's part from an `EngineConfig`, on every rank; "": there is none.
        order: the place among all features: the scheduler and the loop call lower ones first.
        args: the class of its settings, a `FeatureArgs`.
        enabled: whether settings (`EngineArgs`) ask for the feature.
        check: refuses settings that the model or others do not allow, from `EngineArgs`, a
            `ModelSpec` and the device's name; called where settings ask for the feature.
        whole_steps: why steps with the feature cannot be computed as two halves, for an error
            ("is not supported with ..."); "": they can.
        own_logits: whether its models compute logits on all ranks besides the engine's.
        earlier_hook: makes the hook of a pipeline's stages before the last, from an
            `EngineConfig`.
        config: returns fields of `EngineConfig`, from `EngineArgs`, the model's folder and its
            config.json.
        requested: whether a request asks for it; None: no request can.
        serving: returns the `EngineConfig` of an engine that serves clients, from that of any.
        serves: whether every engine that serves clients has it. One with a hook says `enabled`
            instead: other ranks do not know whether their engine serves.
        request_check: makes a `RequestCheck` from an `EngineConfig`, in each API process.
        calls: a tuple of the `CallType`s that it takes.
        fields: a tuple of the `RequestField`s that it takes.
        stats: the type of its statistics.
        stats_name: their name among `EngineStats`.
        live_rows: the names of its statistics in the live view, by field ("sources.draft.rows"). A
            statistic that has none is shown under the name of its field.
        metrics: makes families of Prometheus from its statistics.
        keywords: keywords of `LLM.generate`, each with a function. It takes the engine's loop, the
            keyword's value and the number of prompts, and returns the `RequestOptions` of each.
        models: makes `NamedModels` from the engine's client, in each API process.
        routes: a tuple of its HTTP routes (`Route`).
        origin: the package and the place that declare it, which the registry fills in.
    """

    name: str
    loop: str
    hook: str = ""
    order: int = ANYWHERE
    args: str = ""
    enabled: Callable[[Any], bool] = lambda args: False
    check: str = ""
    whole_steps: str = ""
    own_logits: bool = False
    earlier_hook: str = ""
    config: str = ""
    requested: Callable[[SamplingParams, RequestOptions], bool] | None = None
    serving: str = ""
    serves: bool = False
    request_check: str = ""
    calls: str = ""
    fields: str = ""
    stats: str = ""
    stats_name: str = ""
    live_rows: str = ""
    metrics: str = ""
    keywords: Mapping[str, str] = field(default_factory=dict)
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
