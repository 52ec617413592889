"""Decides whether an engine measures plans while it is idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.features.loop_feature import LoopFeature


def open_tuning(config: EngineConfig) -> LoopFeature:
    """Returns the feature.

    Raises:
        ConfigError: the engine takes no plans from tables.
    """
    reason = obstacle(config)
    if reason is not None:
        raise ConfigError(f"tune_tables=on: {reason}", "tune_tables")
    # Imported here because it imports Triton, which a machine without a GPU may not have.
    from quire.features.tuning.feature import TableTuning

    return TableTuning(config)


def served(config: EngineConfig) -> EngineConfig:
    """Returns the settings of an engine in its own process. It measures plans if it takes plans
    from tables."""
    if config.args.tune_tables != "auto":
        return config
    wanted: Literal["on", "off"] = "on" if obstacle(config) is None else "off"
    return replace(config, args=config.args.replace(tune_tables=wanted))


def obstacle(config: EngineConfig) -> str | None:
    """Returns the reason why an engine takes no plans from tables; None if it does."""
    if config.device == "cpu":
        return "the device is a CPU, whose linear layers have no plans"
    if config.args.deterministic:
        return "deterministic fixes the plans of linear layers"
    if config.eager:
        return "the products are known in advance only with CUDA graphs (enforce_eager)"
    if "skinny" in config.args.disable:
        return "skinny is disabled, and with it the kernels that have plans"
    return None
