"""The bodies of requests to a router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from quire.server import request_body
from quire.server.errors import ApiError


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limit: int
) -> bytes | None:
    """Returns a body, which has as long to come as on a server; None if the client leaves before it
    is whole.

    Raises:
        ApiError: 408; 413, it has more than `limit` bytes.
    """
    began, size = asyncio.get_running_loop().time(), 0
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(request_body.BODY_SECONDS) as timeout:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise ApiError(413, f"The body has more than {limit} bytes.")
                if not message.get("more_body", False):
                    return b"".join(parts)
                more = request_body.BODY_SECONDS + size / request_body.BODY_BYTES_PER_SECOND
                timeout.reschedule(began + more)
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time.", code="timeout") from None
