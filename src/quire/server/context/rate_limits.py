"""Rate limits of API keys: token buckets that all processes of a server share."""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.server.context.api_keys import MAX_KEYS, ApiKey

_SLOTS = 2 * MAX_KEYS
_SLOT = struct.Struct("=16s4d")
"""A key's slot: digest of its name; then for requests and for tokens, the level and when it was set
(0: never)."""

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The remaining amount of a limit per minute."""

    limit: int
    remaining: float

    @property
    def refill(self) -> float:
        return max(0.0, (self.limit - self.remaining) * _MINUTE / self.limit)

    def until(self, amount: float) -> float:
        """Returns the seconds until `amount` is available."""
        return max(0.0, (amount - self.remaining) * _MINUTE / self.limit)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Both limits of a key; None where it has none."""

    requests: LimitStatus | None
    tokens: LimitStatus | None


class RateLimiter:
    """Limits requests and tokens by token buckets.

    The buckets lie in a file that the server's processes map into memory; a file lock orders them.
    A bucket holds a minute's worth and fills up evenly. Tokens that were taken and not used are
    given back; use beyond what was taken leaves the bucket in debt.

    Args:
        file: made if it does not exist. None keeps the table to this process.
    """

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        size = _SLOTS * _SLOT.size
        if file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        else:
            self._file = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b", 0)
        self._file.truncate(size)  # the same size for all: what is there stays
        self._table = mmap.mmap(self._file.fileno(), size)
        self._clock = clock
        self._mutex = threading.Lock()
        self._offsets: dict[str, int] = {}

    def close(self) -> None:
        self._table.close()
        self._file.close()

    def take_request(self, key: ApiKey) -> tuple[bool, RateLimits]:
        """Takes one request unless none is left or tokens are owed; returns whether it did, and the
        limits."""
        with self._bucket(key) as bucket:
            levels = bucket.levels()
            short = [
                left
                for left, need in ((levels.requests, 1), (levels.tokens, 1))
                if left and left.remaining < need
            ]
            if short:
                return False, levels
            bucket.requests -= 1
            return True, bucket.levels()

    def take_tokens(self, key: ApiKey, tokens: int) -> tuple[bool, RateLimits]:
        """Takes `tokens` or none; returns whether it did, and the limits."""
        with self._bucket(key) as bucket:
            levels = bucket.levels()
            if levels.tokens is not None and levels.tokens.remaining < tokens:
                return False, levels
            bucket.tokens -= tokens
            return True, bucket.levels()

    def give_back(self, key: ApiKey, tokens: int) -> None:
        """Gives back tokens that were taken and not used. A negative number takes more."""
        with self._bucket(key) as bucket:
            bucket.tokens += tokens

    @contextmanager
    def _bucket(self, key: ApiKey) -> Iterator[_KeyBuckets]:
        with self._mutex:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                offset = self._offset(key.name)
                digest, *state = _SLOT.unpack_from(self._table, offset)
                bucket = _KeyBuckets(key, self._clock(), *state)
                yield bucket
                _SLOT.pack_into(self._table, offset, digest, *bucket.state())
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _offset(self, name: str) -> int:
        """Returns the offset of the key's bucket.

        The bucket is the first slot, from one given by the name's digest on, that is the key's own
        or free. In a full table it replaces the one at that first slot.
        """
        offset = self._offsets.get(name)
        digest = hashlib.sha256(name.encode()).digest()[:16]
        if offset is not None and self._table[offset : offset + 16] == digest:
            return offset
        first = int.from_bytes(digest[:4], "big") % _SLOTS
        for step in range(_SLOTS):
            offset = (first + step) % _SLOTS * _SLOT.size
            owner = self._table[offset : offset + 16]
            if owner in (digest, bytes(16)):
                break
        else:
            offset = first * _SLOT.size
            owner = b""
        if owner != digest:
            _SLOT.pack_into(self._table, offset, digest, 0.0, 0.0, 0.0, 0.0)
        self._offsets[name] = offset
        return offset


class _KeyBuckets:
    """A key's two buckets, filled up to the present."""

    def __init__(
        self,
        key: ApiKey,
        now: float,
        requests: float,
        requests_at: float,
        tokens: float,
        tokens_at: float,
    ) -> None:
        self._key = key
        self._now = now
        self.requests = _refill(key.requests_per_minute, requests, requests_at, now)
        self.tokens = _refill(key.tokens_per_minute, tokens, tokens_at, now)

    def levels(self) -> RateLimits:
        key = self._key
        requests = tokens = None
        if key.requests_per_minute is not None:
            requests = LimitStatus(key.requests_per_minute, self.requests)
        if key.tokens_per_minute is not None:
            tokens = LimitStatus(key.tokens_per_minute, self.tokens)
        return RateLimits(requests, tokens)

    def state(self) -> tuple[float, float, float, float]:
        """Returns the levels to store. An unlimited bucket is kept full, in case it is limited
        later."""
        requests = tokens = 0.0
        requests_at = tokens_at = 0.0
        if self._key.requests_per_minute is not None:
            requests, requests_at = self.requests, self._now
        if self._key.tokens_per_minute is not None:
            tokens, tokens_at = min(self.tokens, float(self._key.tokens_per_minute)), self._now
        return requests, requests_at, tokens, tokens_at


def _refill(limit: int | None, level: float, at: float, now: float) -> float:
    if limit is None:
        return math.inf
    if at == 0.0:
        return float(limit)
    return min(float(limit), level + max(now - at, 0.0) * limit / _MINUTE)
