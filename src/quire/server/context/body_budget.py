"""The memory that the bodies of all requests share while they come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from quire.server.errors import ApiError

FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count: as many lie in any connection's buffer."""
STALLED_SECONDS = 1.0
"""Seconds without a byte after which a body gives way to one that comes."""

_RETRY_SECONDS = 1.0


class BodyBudget:
    """Bounds what all bodies hold together.

    A full budget does not let clients that send nothing more keep others out: the body that has
    waited longest for its next byte is refused instead, if that is `STALLED_SECONDS` ago.

    Args:
        limit: bytes of all bodies, without the first `FREE_BYTES` of each.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._incoming: dict[HeldBody, float] = {}
        """The moment of each body's last byte, oldest first."""

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Yields an empty body, and takes its bytes back in the end."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.release()

    def _grow(self, body: HeldBody, size: int) -> None:
        """Raises ApiError, 503, where there is no room for more bytes of a body."""
        now = asyncio.get_running_loop().time()
        self._incoming.pop(body, None)
        while self.used + size > self.limit:
            oldest = next(iter(self._incoming), None)
            if oldest is None or now - self._incoming[oldest] < STALLED_SECONDS:
                raise self.full_error()
            oldest.give_way()
        self.used += size
        self._incoming[body] = now

    def _shrink(self, body: HeldBody, size: int) -> None:
        self._incoming.pop(body, None)
        self.used -= size

    def _mark_complete(self, body: HeldBody) -> None:
        self._incoming.pop(body, None)

    def full_error(self) -> ApiError:
        return ApiError(
            503,
            f"The bodies of requests hold all of the {self.limit / 1e6:g} MB that they may take "
            "together (--max-body-memory-mb); try again later.",
            code="body_memory_full",
            retry_after=_RETRY_SECONDS,
        )


def late_body_error() -> ApiError:
    return ApiError(408, "The body did not arrive in time.", code="timeout")


class HeldBody:
    """The part of a body that has come.

    Attributes:
        timeout: ends the reading of the body; moved to the present when the body has to give way.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self.timeout: asyncio.Timeout | None = None
        self._budget = budget
        # One buffer: parts that came one by one would take many times their bytes.
        self._data = bytearray()
        self._counted = 0
        self._gave_way = False

    def take(self, chunk: bytes) -> None:
        """Appends a chunk. Raises ApiError, 503."""
        if self._gave_way:
            raise self._budget.full_error()
        more = max(0, len(self._data) + len(chunk) - FREE_BYTES) - self._counted
        if more:
            self._budget._grow(self, more)
            self._counted += more
        self._data += chunk

    def finish(self) -> bytearray:
        """Returns the body, which has come to its end and gives way to no other. Raises ApiError,
        503, if it has given way already."""
        if self._gave_way:
            raise self._budget.full_error()
        self._budget._mark_complete(self)
        return self._data

    def late_error(self) -> ApiError:
        """Returns the error to answer when `timeout` is over."""
        if self._gave_way:
            return self._budget.full_error()
        return late_body_error()

    def give_way(self) -> None:
        """Ends the reading, and frees the bytes at once."""
        self._gave_way = True
        self.release()
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Frees the bytes. Whoever still has the result of `finish` keeps them alive."""
        self._budget._shrink(self, self._counted)
        self._counted, self._data = 0, bytearray()
