"""The settings of speculation in the users' form. `settings.py` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import FeatureArgs, setting

_SUBJECT = "Speculative decoding"


@dataclass(frozen=True, kw_only=True)
class SpeculationArgs(FeatureArgs):
    """The settings of speculation."""

    speculative: Mapping[str, Any] | None = setting(
        None,
        "Speculative decoding, as JSON: see docs/speculation.md for its keys.",
        subject=_SUBJECT,
    )
    speculative_model: str | None = setting(
        None,
        "Draft model or EAGLE-3 head, folder or hub id: short for speculative's key model.",
        subject=_SUBJECT,
    )

    @property
    def enabled(self) -> bool:
        """Whether the settings ask for speculative decoding."""
        return self.speculative is not None or self.speculative_model is not None
