"""Facts that two engines must agree on before one can read blocks of the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.checkpoint_digest import digest_of, source_of
from quire.config import EngineConfig
from quire.plan import KVGroup
from quire.version import __version__

PROTOCOL = 8
"""The version of the messages between engines."""


class KVFacts(msgspec.Struct, frozen=True):
    """Facts about an engine's blocks.

    Attributes:
        model: digest of the configuration, and of the headers and beginnings of the weights.
        transport: how blocks travel. It names the host if blocks stay on one host.
        groups: kind, window, layers and bytes of each KV group's block, with all ranks' heads.
        drafts: drafter whose KV groups follow the model's own; "" without a drafter.
    """

    protocol: int
    version: str
    transport: str
    model: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    groups: tuple[str, ...]
    drafts: str = ""


def facts_of(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    sizes: Sequence[int],
    transport: str,
    own: int | None = None,
) -> KVFacts:
    """Returns an engine's facts.

    Args:
        sizes: Bytes of each group's block over all ranks.
        own: Number of the model's own groups; a drafter's groups follow. None: all.
    """
    return KVFacts(
        protocol=PROTOCOL,
        version=__version__,
        transport=transport if transport != "ipc" else f"ipc on host {host_name()}",
        model=model_digest(config),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        groups=tuple(
            f"{group.kind}, window {group.window}, {len(group.layers)} layers, {size} bytes"
            for group, size in zip(groups, sizes, strict=True)
        ),
        drafts="" if own in (None, len(groups)) else draft_digest(config),
    )


def host_name() -> str:
    """Returns 8 hex digits for this host, the same in its containers. They change at each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def differences(own: KVFacts, peer: KVFacts) -> list[str]:
    """Returns a line with both values for each fact that differs."""
    return [
        f"{name}: {getattr(own, name)!r} here, {getattr(peer, name)!r} at the peer"
        for name in KVFacts.__struct_fields__
        if getattr(own, name) != getattr(peer, name)
    ]


def model_digest(config: EngineConfig) -> str:
    """Returns 32 hex digits for a model and its format on the device. Copies of the model's files
    on other hosts give the same digits."""
    return digest_of(Path(config.model_path), *source_of(config), config.args.quantization)


def draft_digest(config: EngineConfig) -> str:
    """Returns a text that names the drafter. An MTP layer is in the model's own files."""
    args = config.args
    given = dict(args.speculative or {})
    name = args.speculative_model or given.get("model")
    method, format = given.get("method", "auto"), given.get("quantization")
    if name is None:
        return f"{method}"
    # Imported here because it imports torch, which must stay out of API processes.
    from quire.models import resolve_model_path

    return f"{method} {digest_of(resolve_model_path(name, None), args.load_format, format)}"
