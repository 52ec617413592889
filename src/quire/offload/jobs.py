"""Transfers under way, and what is to be done when they end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from quire.cache.loading import LoadingPrefix


class Kind(Enum):
    OUT = "device to host"
    IN = "host to device"
    SPILL = "host to disk"
    LOAD = "disk to host"


@dataclass(slots=True)
class Job:
    """Blocks in transfer.

    hashes: the blocks that move. loading: the device blocks of an IN job.
    waiters: ids of requests to wake at the end.
    loaded: how many blocks of an IN job were read from files for it.
    stale: whether all prefixes were forgotten meanwhile. began: time.monotonic().
    """

    kind: Kind
    hashes: list[bytes]
    loading: LoadingPrefix | None = None
    waiters: list[str] = field(default_factory=list)
    loaded: int = 0
    stale: bool = False
    began: float = field(default_factory=time.monotonic)
