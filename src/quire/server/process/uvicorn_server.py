"""Serves the application with uvicorn, and bounds everything in a request except its body."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.args import ServerArgs
from quire.server.http.websocket import WEBSOCKETS, WebSocketProtocol

if TYPE_CHECKING:
    from fastapi import FastAPI

HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
LINGER_BYTES = 64 * 1024 * 1024
LINGER_SECONDS = 10.0

FRAMING_PER_BYTE = 16
"""Bytes of chunk sizes and chunk extensions that may come with each byte of a body."""
_CLOSE_SECONDS = 0.5
SOCKET_PATHS = ("/v1/responses",)
"""Ends of the paths on which clients may open a WebSocket."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request has a slow head, or a large head, trailer or chunk framing.

    A head must arrive within `HEAD_SECONDS`. Heads, trailers and chunk framing may have
    `HEAD_BYTES` each, checked after each packet. Trailers are dropped, because they arrive after
    the request's headers were authenticated. The code that reads bodies bounds them.

    A request may be answered before its body has arrived. The rest of the body is then read for
    `LINGER_SECONDS`, so that the client gets to read the answer.

    A GET with the handshake of a WebSocket on one of `SOCKET_PATHS` is upgraded. Any other
    `Upgrade` is ignored (RFC 9110, 7.8). CONNECT is refused.
    """

    _upgraded = False
    _in_message = False
    _in_head = True
    _framing_bytes = 0
    _unread_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_after(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self.transport.is_closing() or self._upgraded:
            return
        if self._framing_bytes > HEAD_BYTES:
            what = "head" if self._in_head else "trailer or framing"
            self._refuse(f"The {what} of the request is too large.")
        elif self._answered:
            # uvicorn takes any bytes for the start of a request and cancels its own timer.
            self._end_after(HEAD_SECONDS)

    def _feed(self, data: bytes) -> None:
        """Parses bytes.

        At a head with `Upgrade` the parser stops and leaves out the request's body. The body would
        then be read as the next request. Such a head is parsed again without its `Upgrade`.
        """
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if self.parser.get_method() == b"CONNECT":
                        self._refuse("CONNECT is not available.")
                        return
                    if self._upgrade(data[upgrade.args[0] :]):
                        return
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _upgrade(self, rest: bytes) -> bool:
        """Hands the connection to a WebSocket's protocol, if the head asks for one that exists.

        Args:
            rest: the bytes behind the head.
        """
        path = httptools.parse_url(self.url).path.decode("ascii", "replace")
        known = any(path.endswith(each) for each in SOCKET_PATHS)
        wanted = self.parser.get_method() == b"GET" and self._should_upgrade()
        if not (known and wanted and self._answered):
            return False
        self._upgraded = True
        self._stop_timer()
        self.scope["method"] = "GET"
        self.handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        assert isinstance(protocol, WebSocketProtocol)
        if not protocol.handshake_initiated:
            # The library bounds a head's lines, and does not answer one that has more.
            self.send_400_response("The head of the request is too large for a WebSocket.")
        elif rest and not self.transport.is_closing():
            protocol.data_received(rest)
        return True

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, message: str) -> None:
        """Answers 400, or cuts the connection if another answer has begun."""
        if self._in_head and self._answered:
            self.send_400_response(message)
        elif self.cycle.response_started:
            self.transport.abort()
        else:
            self.send_400_response(message)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._unread_bytes = 0
        self._end_after(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # see _feed
            return
        super().on_headers_complete()
        self._in_head = False
        self._framing_bytes = 0
        self._stop_timer()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = max(0, self._framing_bytes - (1 + FRAMING_PER_BYTE) * len(body))
        if self._answered:
            self._unread_bytes += len(body)
            if self._unread_bytes > LINGER_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_message, self._in_head = False, True
        self._framing_bytes = 0
        self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and not self._in_head and self._answered:
            self._end_after(LINGER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes an idle connection.

        Over TLS the server waits for the client's close notification. An idle client may never send
        it, which would delay the server's stop by half a minute. So it is cut off soon.
        """
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def _end_after(self, seconds: float) -> None:
        """Ends the connection after `seconds`, unless a timer is running already."""
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_SWITCH_SECONDS = 0.0005
"""Seconds for which a thread may keep the interpreter's lock while another one waits for it."""
_LAST_EVENTS_SECONDS = 2.0
"""Seconds that unfinished streams have to send their error after the drain time."""


async def serve(
    app: FastAPI,
    sockets: list[socket.socket],
    tls: ssl.SSLContext | None,
    args: ServerArgs,
    on_started: Callable[[], None],
) -> None:
    """Serves an application on bound sockets until SIGINT or SIGTERM.

    Running requests then have `drain_timeout` seconds to finish. A second signal ends them at once.
    SIGHUP reads the key file again.

    Args:
        on_started: called once the sockets listen.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http=BoundedHttpProtocol,
        **WEBSOCKETS,
        lifespan="off",
        log_config=None,
        access_log=False,  # RequestContextMiddleware has its own
        server_header=False,
        timeout_graceful_shutdown=math.ceil(args.drain_timeout + _LAST_EVENTS_SECONDS),
    )
    config.load()
    config.ssl = tls
    server = _Server(config, app, args.drain_timeout, on_started)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    loop.add_signal_handler(signal.SIGHUP, app.state.server.keys.reload)
    try:
        await server.serve(sockets=sockets)
    finally:
        if app.state.batches is not None:
            await app.state.batches.close()
        if app.state.server.tracing is not None:
            await asyncio.to_thread(app.state.server.tracing.close)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which `serve` does instead.

    uvicorn raises the signals again after it has stopped, so the process would not end with status
    0.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        drain_timeout: float,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._app_state = app.state
        self._drain_timeout = drain_timeout
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # All objects so far live as long as the process. Freezing them spares the garbage collector
        # from walking them again and again while large bodies are decoded.
        gc.collect()
        gc.freeze()
        # The event loop needs the interpreter's lock at every read and write. By default a thread
        # that parses a large body would keep the lock for 5 ms each time.
        sys.setswitchinterval(_SWITCH_SECONDS)
        if self._app_state.batches is not None:
            self._app_state.batches.start()
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self._app_state.server
        if self._app_state.batches is not None:
            self._app_state.batches.stop()
        if not state.draining:
            state.draining = True
            asyncio.get_running_loop().call_later(self._drain_timeout, state.stop_generations)
        snapshots = getattr(self._app_state, "live_snapshots", None)
        if snapshots is not None:
            snapshots.close()
        self.force_exit = self.should_exit
        self.should_exit = True
