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
    """Blocks of one KV group in transfer.

    hashes: the blocks that move. waiters: ids of requests to wake at the end.
    bringing: of an IN job, what it is a part of.
    stale: whether all prefixes were forgotten meanwhile. began: time.monotonic().
    """

    kind: Kind
    hashes: list[bytes] = field(default_factory=list)
    waiters: list[str] = field(default_factory=list)
    bringing: Bringing | None = None
    stale: bool = False
    began: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Bringing:
    """A prefix on its way to the device, by one IN job for each KV group that lacks some of it.

    left: jobs that have not ended. good: all that ended went well. waiters: of those that ended.
    tokens: that it spares. loaded: how many of them were read from files for it.
    """

    loading: LoadingPrefix
    left: int
    tokens: int
    loaded: int
    good: bool = True
    waiters: list[str] = field(default_factory=list)
