"""The known families. Adding one is a module in `families/` and a line in architectures.json."""

from __future__ import annotations

import importlib
import json
from importlib import resources

from quire.models.families.family import Family

_FAMILIES = "quire.models.families"

ARCHITECTURES: dict[str, str] = json.loads(
    resources.files(_FAMILIES).joinpath("architectures.json").read_text(encoding="utf-8")
)
"""The architectures of config.json, and the families whose modules build them."""


def family_named(name: str | None) -> Family | None:
    """Returns a family, whose module is imported when it is used; None: there is none."""
    if name not in ARCHITECTURES.values():
        return None
    family: Family = importlib.import_module(f"{_FAMILIES}.{name}").FAMILY
    return family
