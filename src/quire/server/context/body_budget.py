"""Bounds the memory that all request bodies take together while they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from quire.server.errors import ApiError

FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count, because every connection's buffer has as many."""
STALLED_SECONDS = 1.0
"""Seconds without a byte after which a body may be dropped to make room for another one."""

_RETRY_SECONDS = 1.0


class BodyBudget:
    """Bounds the bytes that all bodies hold together.

    Clients that stop sending must not block a full budget. The body that has waited longest for its
    next byte is therefore dropped, if it has waited at least `STALLED_SECONDS`.

    Args:
        limit: most bytes of all bodies, without the first `FREE_BYTES` of each.

    Attributes:
        used: bytes that all bodies hold.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._incoming: dict[HeldBody, float] = {}
        """Time of each body's last byte on the event loop's clock, oldest first."""

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Yields an empty body, and releases its bytes at the end."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.release()

    def _grow(self, body: HeldBody, size: int) -> None:
        """Counts more bytes of a body.

        Raises:
            ApiError: 503, the budget is full.
        """
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
    """The bytes of a body that have arrived.

    Attributes:
        timeout: ends the reading of the body. `give_way` lets it expire at once.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self.timeout: asyncio.Timeout | None = None
        self._budget = budget
        # One buffer, because a list of many small parts would take several times their bytes.
        self._data = bytearray()
        self._counted = 0
        self._gave_way = False

    def take(self, chunk: bytes) -> None:
        """Appends a chunk.

        Raises:
            ApiError: 503, the budget is full, or the body was dropped for another one.
        """
        if self._gave_way:
            raise self._budget.full_error()
        more = max(0, len(self._data) + len(chunk) - FREE_BYTES) - self._counted
        if more:
            self._budget._grow(self, more)
            self._counted += more
        self._data += chunk

    def finish(self) -> bytearray:
        """Returns the complete body, which can no longer be dropped for another one.

        Raises:
            ApiError: 503, it was dropped already.
        """
        if self._gave_way:
            raise self._budget.full_error()
        self._budget._mark_complete(self)
        return self._data

    def late_error(self) -> ApiError:
        """Returns the error for a body whose `timeout` has expired."""
        if self._gave_way:
            return self._budget.full_error()
        return late_body_error()

    def give_way(self) -> None:
        """Drops the body: ends its reading, and frees its bytes at once."""
        self._gave_way = True
        self.release()
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Frees the bytes. The result of an earlier `finish` stays valid."""
        self._budget._shrink(self, self._counted)
        self._counted, self._data = 0, bytearray()
