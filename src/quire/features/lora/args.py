"""The settings for adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config import COUNT, FeatureArgs, setting
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineArgs
    from quire.models import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LoRAArgs(FeatureArgs):
    """The settings for adapters: their paths, and the memory for them."""

    enable_lora: bool = setting(False, "Take LoRA adapters; so do lora and lora_dir.")
    lora: tuple[str, ...] = setting((), "LoRA adapter to serve, NAME=PATH (may be repeated).")
    lora_dir: str | None = setting(None, "Folder of LoRA adapters, named by their own folders.")
    max_loras: int = setting(8, "Most LoRA adapters that the device holds.", limit=COUNT)
    max_lora_rank: int = setting(16, "Largest rank of LoRA adapters, up to 256.", limit=COUNT)
    lora_cache_gb: float = setting(4.0, "Host memory, in GB, for LoRA adapters that were read.")


def check_settings(args: EngineArgs, spec: ModelSpec, device: str) -> None:
    """Raises ConfigError if pipeline stages or `deterministic` rule out adapters."""
    stages, ranks = args.pipeline_parallel_size, args.tensor_parallel_size
    for name in ("enable_lora", "lora", "lora_dir"):
        if stages > 1 and getattr(args, name):
            raise ConfigError(
                f"{name} is not supported with pipeline_parallel_size={stages}: adapters are "
                "loaded into all layers at once",
                name,
            )
    if args.deterministic and (device == "cpu" or ranks > 1):
        where = "on a CPU" if device == "cpu" else f"with tensor_parallel_size={ranks}"
        raise ConfigError(
            f"deterministic is not supported for LoRA adapters {where}: what they add is summed in "
            "another order there",
            "deterministic",
        )
