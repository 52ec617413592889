"""The bodies of requests to a router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from quire.server.context.body_budget import HeldBody
from quire.server.errors import ApiError
from quire.server.http import bodies


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limit: int, held: HeldBody
) -> bytearray | None:
    """Returns a body, which has as long to come as on a server; None if the client leaves before it
    is whole.

    Args:
        held: keeps what has come.

    Raises:
        ApiError: 408; 413, it has more than `limit` bytes; 503, see `BodyBudget`.
    """
    began, size = asyncio.get_running_loop().time(), 0
    try:
        async with asyncio.timeout(bodies.BODY_SECONDS) as timeout:
            held.timeout = timeout
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise ApiError(
                        413, f"The body has more than {limit} bytes.", code="body_too_large"
                    )
                held.take(chunk)
                if not message.get("more_body", False):
                    return held.whole()
                more = bodies.BODY_SECONDS + size / bodies.BODY_BYTES_PER_SECOND
                timeout.reschedule(began + more)
    except TimeoutError:
        raise held.late() from None
