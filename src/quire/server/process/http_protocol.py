"""HTTP connections: uvicorn's, with bounds on a request's head."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0

_CLOSE_SECONDS = 0.5


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request has a slow or large head.

    A head must come within `HEAD_SECONDS` and have at most `HEAD_BYTES` (in whole packets). Bodies
    are bounded where they are read.
    """

    _in_head = True
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes an idle connection.

        Over TLS an idle client need not answer the close notification, and would hold up a stopping
        server for half a minute, so it gets a moment only.
        """
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
