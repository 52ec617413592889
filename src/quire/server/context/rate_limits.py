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
"""A key's slot: the digest of its name, then two values each for requests and for tokens.

The two values are the level and the time at which it was set; 0 is never.
"""

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The remaining amount of a limit per minute."""

    limit: int
    remaining: float

    @property
    def refill(self) -> float:
        """Seconds until the whole limit is available again."""
        return max(0.0, (self.limit - self.remaining) * _MINUTE / self.limit)

    def until(self, amount: float) -> float:
        """Returns the seconds until `amount` is available."""
        return max(0.0, (amount - self.remaining) * _MINUTE / self.limit)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Both limits of a key; None is unlimited."""

    requests: LimitStatus | None
    tokens: LimitStatus | None


class RateLimiter:
    """Limits requests and tokens by token buckets.

    The buckets are in a file that all of the server's processes map into memory, under a file lock.
    A bucket holds one minute's amount and fills at a constant rate. Tokens that were taken but not
    used are given back. If a request used more than it took, the bucket's level becomes negative.

    Args:
        file: the file, which is created if it does not exist. None uses a private temporary file.
        clock: returns the time in seconds.
    """

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        size = _SLOTS * _SLOT.size
        if file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        else:
            self._file = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b", 0)
        self._file.truncate(size)  # All processes use the same size, so this keeps the content.
        self._table = mmap.mmap(self._file.fileno(), size)
        self._clock = clock
        self._mutex = threading.Lock()
        self._offsets: dict[str, int] = {}

    def close(self) -> None:
        self._table.close()
        self._file.close()

    def take_request(self, key: ApiKey) -> tuple[bool, RateLimits]:
        """Takes one request if one request and one token are left.

        Returns:
            Whether it took the request, and the limits.
        """
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
        """Takes `tokens`, or nothing if fewer are left.

        Returns:
            Whether it took them, and the limits.
        """
        with self._bucket(key) as bucket:
            levels = bucket.levels()
            if levels.tokens is not None and levels.tokens.remaining < tokens:
                return False, levels
            bucket.tokens -= tokens
            return True, bucket.levels()

    def give_back(self, key: ApiKey, tokens: int) -> None:
        """Gives back unused tokens. A negative number takes more tokens."""
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
        """Returns the offset of the key's slot.

        The search begins at a slot given by the name's digest. It ends at the first slot that is
        the key's own or free. In a full table the key replaces the one in the first slot.
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
    """A key's two buckets, refilled for the time since they were stored."""

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
        """Returns the levels and times to store.

        An unlimited bucket is stored with the time 0. It is full if the key gets a limit later.
        """
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
