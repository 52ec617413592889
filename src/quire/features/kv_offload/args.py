"""The settings of the KV cache's host and disk tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config import SIZE, CoreArgs, FeatureArgs, setting
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineArgs
    from quire.models import ModelSpec

_SUBJECT = "Device and memory"


@dataclass(frozen=True, kw_only=True)
class OffloadArgs(FeatureArgs):
    """The sizes of the host and disk tiers."""

    host_cache_gb: float = setting(
        0.0,
        "Host memory, in GB, for KV blocks that the device has no room to keep.",
        limit=SIZE,
        subject=_SUBJECT,
    )
    disk_cache: str | None = setting(
        None,
        "Folder for KV blocks that the host has no room to keep; survives restarts.",
        one_engine=True,
        subject=_SUBJECT,
    )
    disk_cache_gb: float = setting(
        32.0, "Most that the disk cache's folder may hold, in GB.", limit=SIZE, subject=_SUBJECT
    )

    def check(self, args: CoreArgs) -> None:
        if self.host_cache_gb and not args.enable_prefix_caching:
            raise ConfigError(
                f"host_cache_gb={self.host_cache_gb:g} needs enable_prefix_caching", "host_cache_gb"
            )
        if self.disk_cache is not None and not self.host_cache_gb:
            raise ConfigError(
                "disk_cache needs host_cache_gb > 0: blocks travel through the host's memory",
                "disk_cache",
            )
        if self.disk_cache is not None and not self.disk_cache_gb:
            raise ConfigError(
                f"disk_cache needs disk_cache_gb > 0, got {self.disk_cache_gb:g}", "disk_cache_gb"
            )


def check_settings(args: EngineArgs, spec: ModelSpec, device: str) -> None:
    """Raises ConfigError if several ranks or stages rule out a tier."""
    stages, ranks = args.pipeline_parallel_size, args.tensor_parallel_size
    if args.disk_cache is not None and ranks > 1:
        raise ConfigError(
            f"disk_cache is not supported with tensor_parallel_size={ranks}: files hold blocks of "
            "all heads, and each rank has some",
            "disk_cache",
        )
    if stages > 1:
        raise ConfigError(
            f"host_cache_gb is not supported with pipeline_parallel_size={stages}: KV blocks would "
            "have to be moved by stages at different times",
            "host_cache_gb",
        )
