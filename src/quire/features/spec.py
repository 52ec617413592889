"""The declaration of a feature: data, and the places of its parts.

A feature's folder exports one `FEATURE`. Its parts are named by "module:name" strings, which
`resolve` imports where they run. So an API process imports no part that needs torch, and an engine
imports no part that it does not use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config import EngineArgs
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
        enabled: whether settings ask for the feature.
        check: refuses settings that the model cannot have, from `EngineArgs` and a `ModelSpec`;
            called where settings ask for the feature.
        requested: whether a request asks for it; None: no request can.
        serving: returns the `EngineConfig` of an engine that serves clients, from that of any.
        serves: whether every engine that serves clients has it. One with a hook says `enabled`
            instead: other ranks do not know whether their engine serves.
        request_check: makes a `RequestCheck` from an `EngineConfig`, in each API process.
        calls: a tuple of the `CallType`s that it takes.
        fields: a tuple of the `RequestField`s that it takes.
        stats: the type of its statistics.
        stats_name: their name among `EngineStats`.
        metrics: makes families of Prometheus from its statistics.
    """

    name: str
    loop: str
    hook: str = ""
    order: int = ANYWHERE
    enabled: Callable[[EngineArgs], bool] = lambda args: False
    check: str = ""
    requested: Callable[[SamplingParams, RequestOptions], bool] | None = None
    serving: str = ""
    serves: bool = False
    request_check: str = ""
    calls: str = ""
    fields: str = ""
    stats: str = ""
    stats_name: str = ""
    metrics: str = ""

    def __post_init__(self) -> None:
        if self.serves and self.hook:
            raise ValueError(
                f"feature {self.name!r}: serves is not for one with a hook: use enabled"
            )


def resolve(path: str) -> Any:
    """Imports what "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
