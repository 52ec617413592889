"""Keys of config.json that a family computes for some values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError


def check(config: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ModelError where a key that is there has a value that is not `known`."""
    for name, values in known.items():
        if config.get(name) is not None and config[name] not in values:
            raise ModelError(f"config.json: {name}={config[name]!r} is not supported")
