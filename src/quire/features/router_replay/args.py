"""The setting for requests that return their experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import FeatureArgs, setting
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineArgs
    from quire.layers.experts import ExpertsSpec
    from quire.models import ModelSpec
    from quire.models.spec import LayerSpec

_SETTING = "enable_return_routed_experts"


@dataclass(frozen=True, kw_only=True)
class RouterReplayArgs(FeatureArgs):
    """Whether requests may ask for their experts."""

    enable_return_routed_experts: bool = setting(
        False,
        "Keep the experts of a step's tokens, for requests with return_routed_experts.",
        subject="Model",
    )


def _experts_of(layer: LayerSpec) -> ExpertsSpec | None:
    """Returns a layer's experts, which a dense part may accompany; None for a layer without."""
    ffn: Any = layer.ffn
    return ffn if hasattr(ffn, "routing") else getattr(ffn, "experts", None)


def count_experts(args: EngineArgs, folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns `EngineConfig.experts_per_token`; 0 without the setting.

    Args:
        args: the engine's settings.
        folder: the model's folder.
        hf_config: the model's config.json.
    """
    if not RouterReplayArgs.of(args).enable_return_routed_experts:
        return {}
    # Imported here because it imports torch, and API processes read this module.
    from quire.models import spec_from_config

    layers = map(_experts_of, spec_from_config(hf_config).layers)
    return {"experts_per_token": sum(each.routing.top_k for each in layers if each is not None)}


def check_settings(args: EngineArgs, spec: ModelSpec, device: str) -> None:
    """Raises ConfigError if the model has no experts, or if ranks know only some of a token's."""
    if not RouterReplayArgs.of(args).enable_return_routed_experts:
        return
    choices = {experts.routing.top_k for layer in spec.layers if (experts := _experts_of(layer))}
    if not choices:
        raise ConfigError(f"{_SETTING} needs a model with experts", _SETTING)
    if len(choices) > 1:
        raise ConfigError(
            f"{_SETTING} needs layers with one number of experts per token, but this model's have "
            f"{sorted(choices)}",
            _SETTING,
        )
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{_SETTING} is not supported with pipeline_parallel_size="
            f"{args.pipeline_parallel_size}: a stage knows the experts of its own layers only",
            _SETTING,
        )
    if args.redundant_experts:
        raise ConfigError(
            f"{_SETTING} is not supported with redundant_experts, whose copies have ids of their "
            "own",
            _SETTING,
        )
