"""The setting for measuring plans of linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config import FeatureArgs, setting


@dataclass(frozen=True, kw_only=True)
class TuningArgs(FeatureArgs):
    """The setting for measuring plans of linear layers."""

    tune_tables: Literal["auto", "on", "off"] = setting(
        "auto", "Measure plans of linear layers that tables lack, while idle. auto: in servers."
    )
