"""WebSocket connections by the `websockets` library, as uvicorn runs it."""

from __future__ import annotations

from typing import Any

import msgspec
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from quire.server.errors import ErrorInfo

MAX_MESSAGE = 16 * 1024 * 1024
"""Most bytes of a WebSocket's message. The route's own limit is lower by default."""
PING_SECONDS = 30.0
"""Seconds between pings, and seconds that the peer has to answer one."""
RESTART = 1012
"""Code with which a connection closes because the server stops."""
_CLOSE_SECONDS = 5.0
"""Seconds that the peer has for its part of the closing handshake."""
_STOP_SECONDS = 0.5
"""The same where the server stops: an idle client may never answer."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A connection after its upgrade, which ends when the application says so.

    uvicorn's own class cuts a connection as soon as the server stops. This one lets the application
    finish its running turns.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = _CLOSE_SECONDS

    def shutdown(self) -> None:
        """Sends the application a disconnect as its next message, with the code `RESTART`."""
        self.close_timeout = _STOP_SECONDS
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": RESTART})
        else:
            super().shutdown()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            # Over TLS `close` waits for the client's notification, which may never come.
            self.loop.call_later(self.close_timeout, self.transport.abort)
        elif message["type"] == "websocket.http.response.body":
            # Otherwise uvicorn logs each refused handshake as an error of the application.
            self.handshake_complete = True


def error_event(status: int, error: ErrorInfo) -> bytes:
    """Returns the JSON of an `error` event."""
    return msgspec.json.encode({"type": "error", "status": status, "error": error})


WEBSOCKETS: dict[str, Any] = {
    "ws": WebSocketProtocol,
    "ws_max_size": MAX_MESSAGE,
    "ws_ping_interval": PING_SECONDS,
    "ws_ping_timeout": PING_SECONDS,
    "ws_per_message_deflate": False,
}
"""uvicorn's settings of WebSockets. Messages are not compressed, because events are short."""
