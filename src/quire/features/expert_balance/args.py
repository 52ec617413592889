"""The setting for redundant experts, which are further copies of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config import FeatureArgs, setting
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineArgs
    from quire.models import ModelSpec


@dataclass(frozen=True, kw_only=True)
class BalanceArgs(FeatureArgs):
    """The number of redundant experts."""

    redundant_experts: int = setting(
        0, "Further copies of experts that many tokens choose.", subject="Device and memory"
    )


def check_settings(args: EngineArgs, spec: ModelSpec, device: str) -> None:
    """Raises ConfigError if the ranks cannot hold the redundant experts."""
    copies, stages = BalanceArgs.of(args).redundant_experts, args.pipeline_parallel_size
    counts = [getattr(layer.ffn, "experts", 0) for layer in spec.layers]
    fewest = min(filter(None, counts), default=0)
    reason, most = None, fewest * (args.tensor_parallel_size - 1)
    if copies < 0:
        reason = "must not be negative"
    elif not args.enable_expert_parallel:
        reason = "needs enable_expert_parallel: only whole experts are copied"
    elif stages > 1:
        reason = (
            f"is not supported with pipeline_parallel_size={stages}: stages have layers of their "
            "own"
        )
    elif copies > most:
        reason = f"is more than the {most} that fit if no rank holds an expert twice"
    if reason is not None:
        raise ConfigError(f"redundant_experts={copies} {reason}", "redundant_experts")
