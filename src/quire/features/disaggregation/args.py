"""The engine's setting for disaggregation. The server makes it from its own flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import FeatureArgs, setting


@dataclass(frozen=True, kw_only=True)
class DisaggArgs(FeatureArgs):
    """The engine's setting for its peers. It is secret because it holds the peers' key."""

    kv_peers: Mapping[str, Any] | None = setting(
        None, "See `DisaggSettings`.", internal=True, secret=True
    )
