"""The settings of an engine with peers. The server makes them from its flags of the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models import load_config, spec_from_config
from quire.plan import KVGroup

_MOST_SECONDS = 1_000_000
"""Longest time limit of a socket, in seconds."""


class DisaggSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of disaggregated prefill and decode.

    Attributes:
        role: "prefill" computes prompts for others, "decode" asks others, "both" does both.
        peers: URLs of servers to ask.
        peer_key: API key for the peers.
        kv_transfer: "sync" sends a prompt's blocks after its last step. "async" sends them as
            steps or layers compute them.
        transport: "tcp" uses connections and shared memory. "nixl" and "ipc" read the peer's
            cache; "ipc" needs a GPU of the same host.
        lease_timeout: Seconds of silence after which a peer counts as dead.
        remote_prefill_tokens: Fewest uncached tokens to ask a peer for; None: as many as fill
            a step.
        host: Address to fetch blocks from.
        port: Port to fetch blocks from; 0: any.
    """

    role: Literal["prefill", "decode", "both"]
    peers: tuple[str, ...] = ()
    peer_key: str | None = None
    kv_transfer: Literal["sync", "async"] = "sync"
    transport: Literal["tcp", "nixl", "ipc"] = "tcp"
    lease_timeout: float = 10.0
    remote_prefill_tokens: int | None = None
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def grants(self) -> bool:
        """Whether the engine computes prompts for others."""
        return self.role != "decode"

    @property
    def layers(self) -> bool:
        """Whether readers on this host may read a layer's KV before the step ends."""
        return self.grants and self.kv_transfer == "async" and self.transport != "tcp"

    @property
    def asks(self) -> bool:
        """Whether the engine asks others for prompts."""
        return self.role != "prefill"


def read_settings(given: Mapping[str, Any]) -> DisaggSettings:
    """Returns the settings in a mapping.

    Raises:
        ConfigError: a setting is unknown, has a wrong type, or is too large.
    """
    try:
        settings = msgspec.convert(dict(given), DisaggSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_peers: {error}", "kv_peers") from None
    if settings.lease_timeout > _MOST_SECONDS:
        raise ConfigError(f"lease_timeout must be at most {_MOST_SECONDS} seconds", "lease_timeout")
    return settings


def check_engine(config: EngineConfig) -> None:
    """Checks that the engine can exchange KV with others.

    Raises:
        ConfigError: it cannot. The message names the setting that prevents it.
    """
    args = config.args
    if not args.enable_prefix_caching:
        raise ConfigError(
            "role needs enable_prefix_caching: engines exchange blocks of their prefix caches",
            "enable_prefix_caching",
        )
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            "role is not supported with pipeline_parallel_size > 1; use tensor_parallel_size alone",
            "pipeline_parallel_size",
        )


def model_groups(config: EngineConfig, groups: Sequence[KVGroup]) -> int:
    """Counts the KV groups of the model's own layers. A drafter's groups come after them."""
    layers = len(spec_from_config(load_config(Path(config.model_path))).layers)
    return sum(max(group.layers) < layers for group in groups)
