"""Facts that two engines must agree on before one can read blocks of the other."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.plan import KVGroup
from quire.system import open_regular, stored_weights
from quire.version import __version__

PROTOCOL = 7
"""The version of the messages between engines."""
_SAMPLE_BYTES = 1 << 16


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
    return _digest(Path(config.model_path), *_source(config), config.args.quantization)


def checkpoint_digest(config: EngineConfig) -> str:
    """Returns 32 hex digits for a model's files, whatever its format on the device. The result of
    the first call is kept because the files of a running model do not change."""
    return _kept_digest(Path(config.model_path), *_source(config))


def _source(config: EngineConfig) -> tuple[str, int | None]:
    args = config.args
    return args.load_format, args.seed if args.load_format == "dummy" else None


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

    return f"{method} {_digest(resolve_model_path(name, None), args.load_format, format)}"


@functools.cache
def _kept_digest(folder: Path, *facts: object) -> str:
    return _digest(folder, *facts)


def _digest(folder: Path, *facts: object) -> str:
    """Returns 32 hex digits for a model's files and `facts`. Weight files count by name, size and
    first bytes, which name all tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for fact in facts:
        digest.update(repr(fact).encode() + b"\0")
    for file in (folder / "config.json", *stored_weights(folder)):
        if file.is_file():
            with open_regular(file) as opened:
                digest.update(repr((file.name, file.stat().st_size)).encode())
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
