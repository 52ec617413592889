"""Checks keys of config.json for which a family supports only some values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError


def check(config: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ModelError if a key in config.json has a value that is not among the `known` ones."""
    for name, values in known.items():
        if config.get(name) is not None and config[name] not in values:
            raise ModelError(f"config.json: {name}={config[name]!r} is not supported")
