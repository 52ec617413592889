"""The setting of copies of experts."""

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
    """The number of copies of experts."""

    redundant_experts: int = setting(
        0, "Further copies of experts that many tokens choose.", subject="Device and memory"
    )


def check_settings(args: EngineArgs, spec: ModelSpec, device: str) -> None:
    """Raises ConfigError where ranks cannot hold so many copies."""
    copies, stages = BalanceArgs.of(args).redundant_experts, args.pipeline_parallel_size
    counts = [getattr(layer.ffn, "experts", 0) for layer in spec.layers]
    fewest = min(filter(None, counts), default=0)
    reason, most = None, fewest * (args.tensor_parallel_size - 1)
    if copies < 0:
        reason = "must not be negative"
    elif not args.enable_expert_parallel:
        reason = "needs enable_expert_parallel: copies are of whole experts"
    elif stages > 1:
        reason = (
            f"is not supported with pipeline_parallel_size={stages}: stages have layers of their "
            "own"
        )
    elif copies > most:
        reason = f"is more than the {most} that ranks can hold, which have one of an expert each"
    if reason is not None:
        raise ConfigError(f"redundant_experts={copies} {reason}", "redundant_experts")
