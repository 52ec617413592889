"""Transfers under way, and what is to be done when they end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from quire.cache import Incoming


class Kind(Enum):
    OUT = "device to host"
    IN = "host to device"
    SPILL = "host to disk"
    LOAD = "disk to host"


@dataclass(slots=True)
class Job:
    """keys: of the blocks that move. incoming: where IN puts them. waiters: ids of requests to wake
    at the end. loaded: how many of IN's blocks were read from files for it. stale: all prefixes
    were forgotten meanwhile. began: time.monotonic()."""

    kind: Kind
    keys: list[bytes]
    incoming: Incoming | None = None
    waiters: list[str] = field(default_factory=list)
    loaded: int = 0
    stale: bool = False
    began: float = field(default_factory=time.monotonic)
