"""The settings of sleep."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import FeatureArgs, setting


@dataclass(frozen=True, kw_only=True)
class WeightUpdateArgs(FeatureArgs):
    """The setting for engines that sleep."""

    enable_sleep_mode: bool = setting(
        False,
        "Hold weights and KV at addresses whose memory /sleep can give up, so that the engine's "
        "process and its graphs stay.",
    )
