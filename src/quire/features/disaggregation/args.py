"""The engine's setting of disaggregation. The server makes it from flags of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import FeatureArgs, setting


@dataclass(frozen=True, kw_only=True)
class DisaggArgs(FeatureArgs):
    """The peers of an engine. They hold the peers' key, so they are a secret."""

    kv_peers: Mapping[str, Any] | None = setting(
        None, "See `DisaggSettings`.", internal=True, secret=True
    )
