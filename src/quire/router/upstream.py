"""Connections to a replica: HTTP/1.1, kept open, one request at a time on each."""

from __future__ import annotations

import asyncio
import errno
import itertools
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import httptools
import websockets
from starlette.responses import Response
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus

from quire.errors import ConfigError
from quire.http_client import split_url
from quire.server.http.replica_proofs import TAG_HEADER, tag_in
from quire.server.http.websocket import MAX_MESSAGE, PING_SECONDS
from quire.server.process.uvicorn_server import FRAMING_PER_BYTE, HEAD_BYTES

Headers = list[tuple[bytes, bytes]]

_MOST_IDLE = 256
_MAX_BUFFERED_BYTES = 1 << 18
"""The router stops reading from the replica while more bytes than this wait for a slow client."""
_HANDSHAKE_SECONDS = 10.0
"""Seconds that the handshake of a WebSocket may take."""
_CLOSE_SECONDS = 0.5
"""Seconds that a replica has for its part of the closing handshake."""
_MAX_EVENT = 4 * MAX_MESSAGE
"""Most bytes of a replica's event, which may repeat the turn's message and add an answer."""
_NO_HOST = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH}
_PORTS = {"http": 80, "https": 443}


class ReplicaLostError(Exception):
    """A replica could not be reached, or its connection ended before the answer was complete."""


class UnreachableError(ReplicaLostError):
    """A replica's address does not respond."""


class BadAnswerError(ReplicaLostError):
    """A replica's answer is invalid and cannot be forwarded."""


class SilentError(ReplicaLostError):
    """No byte of an answer has arrived for too long."""


class SocketRefusedError(Exception):
    """A replica answered the handshake of a WebSocket with an HTTP error."""

    def __init__(self, response: websockets.Response) -> None:
        super().__init__(f"status {response.status_code}")
        self.status = response.status_code
        self._response = response

    def answer(self) -> Response:
        """Returns the answer for the client."""
        kept = ("content-type", "retry-after", "www-authenticate", "x-should-retry")
        headers = {
            name.lower(): value
            for name, value in self._response.headers.raw_items()
            if name.lower() in kept
        }
        return Response(bytes(self._response.body), self.status, headers)


class _StrayAnswerError(Exception):
    """An answer on a reused connection has no tag, or the wrong one."""


class _Connection(asyncio.Protocol):
    """One connection to a replica, with the answer that it is reading.

    An answer's head, including interim answers, may have `HEAD_BYTES` bytes. The same limit holds
    for its trailers and chunk framing. Trailers are dropped. Bytes after the end of an answer end
    the connection, because they would be read as the answer to the next request.

    Args:
        on_data: called whenever bytes arrive.

    Attributes:
        headers: the answer's headers, with lower-case names.
        complete: whether the whole answer has arrived.
        silent: whether no byte has arrived since the request was sent.
    """

    def __init__(self, on_data: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[None] = self._loop.create_future()
        self._more = asyncio.Event()
        self._parts: deque[bytes] = deque()
        self._buffered_bytes = self._framing_bytes = 0
        self._lost = self._no_body = self._keep_alive = self._has_answered = False
        self._error: ReplicaLostError | None = None
        self._tag = b""
        self._last_data_at = 0.0
        self.headers: Headers = []
        self.complete = True
        self.silent = True

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def peer(self) -> tuple[str, int] | None:
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return None if name is None else (name[0], name[1])

    @property
    def reusable(self) -> bool:
        """Tells whether the connection can take another request.

        It cannot while reading is paused, because the client of a large answer has disconnected,
        and nothing would resume the reading.
        """
        paused = self._buffered_bytes > _MAX_BUFFERED_BYTES
        return self.complete and not self._lost and self._keep_alive and not paused

    @property
    def lost(self) -> bool:
        return self._lost or self._error is not None

    def begin(self, data: Sequence[bytes | bytearray], tag: bytes, *, no_body: bool) -> None:
        """Sends a request.

        Args:
            data: the request's bytes.
            tag: the request's tag, which the answer must repeat.
            no_body: the answer has no body, even if its headers give a length (HEAD).
        """
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._head = self._loop.create_future()
        self._more.clear()
        self._parts.clear()
        self.headers, self._buffered_bytes, self._framing_bytes, self._no_body = [], 0, 0, no_body
        self.complete, self.silent = False, True
        self._tag, self._last_data_at = tag, self._loop.time()
        self._transport.writelines(data)

    async def head(self) -> None:
        """Waits for the answer's head.

        Raises:
            ReplicaLostError: no answer arrived, or it cannot be forwarded.
            _StrayAnswerError: it may be the answer to an earlier request.
        """
        await self._head
        # Only connections whose answers carried the right tag are reused. An answer without it on a
        # reused connection may therefore belong to an earlier request.
        reused, self._has_answered = self._has_answered, True
        tag = tag_in(self.headers)
        if tag == self._tag:
            return
        self._keep_alive = False
        if reused:
            raise _StrayAnswerError
        if tag is not None:
            raise BadAnswerError("its answer belongs to another request")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the answer's body as it arrives.

        Raises:
            ReplicaLostError: the connection ended before the answer was complete.
        """
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._count_buffered(-len(part))
                yield part
            if self.complete:
                return
            if self._lost or self._error is not None:
                raise self._error or ReplicaLostError(
                    "the connection ended before the answer was complete"
                )
            self._more.clear()
            await self._more.wait()

    def silence(self, now: float) -> float:
        """Returns the seconds since the last byte of the answer; 0 while reading is paused."""
        if self.complete or self._buffered_bytes > _MAX_BUFFERED_BYTES:
            return 0.0
        return now - self._last_data_at

    def fail(self, error: ReplicaLostError) -> None:
        """Ends the connection.

        Args:
            error: raised in the task that waits for the rest of the answer.
        """
        self._error, self._keep_alive = self._error or error, False
        if not self._head.done():
            self._head.set_exception(self._error)
            # On an idle connection nobody waits. Reading the exception keeps asyncio from warning.
            self._head.exception()
        self._more.set()
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport, but have its methods.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self.silent, self._last_data_at = False, self._loop.time()
        self._on_data()
        if self.complete:
            self.fail(BadAnswerError("it sent bytes without a request"))
            return
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(BadAnswerError("it changes to another protocol"))
        except httptools.HttpParserError as error:
            reason = error.__context__ or error
            self.fail(BadAnswerError(f"its answer is not valid HTTP: {reason}"))
        if self._framing_bytes > HEAD_BYTES:
            what = "trailer or framing" if self._head.done() else "head"
            self.fail(BadAnswerError(f"the {what} of its answer has more than {HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if not self._head.done():
            self._head.set_exception(ReplicaLostError("the connection ended before an answer"))
            # On an idle connection nobody waits. Reading the exception keeps asyncio from warning.
            self._head.exception()
        self._more.set()

    # -- httptools -----------------------------------------------------------------------------

    # Callbacks of the parser. An exception in one of them ends the parsing of the answer.

    def on_message_begin(self) -> None:
        self._check_incomplete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head.done():
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self.status
        if 100 <= status < 200 and status != 101:  # an interim answer
            self.headers = []
            return
        if not 200 <= status < 600:
            raise ValueError(f"its status is {status:03d}")
        self._framing_bytes = 0
        self._head.set_result(None)
        if self._no_body:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._check_incomplete()
        self._framing_bytes = max(0, self._framing_bytes - (1 + FRAMING_PER_BYTE) * len(body))
        self._parts.append(body)
        self._count_buffered(len(body))
        self._more.set()

    def on_message_complete(self) -> None:
        if self._head.done():
            # The parser forgets this value when it leaves the message.
            self._keep_alive = self._parser.should_keep_alive()
            self.complete = True
            self._framing_bytes = 0
            self._more.set()

    def _check_incomplete(self) -> None:
        if self.complete:
            raise ValueError("it has bytes after its end")

    def _count_buffered(self, more: int) -> None:
        before, self._buffered_bytes = self._buffered_bytes, self._buffered_bytes + more
        assert self._transport is not None
        if before <= _MAX_BUFFERED_BYTES < self._buffered_bytes:
            self._transport.pause_reading()
        elif self._buffered_bytes <= _MAX_BUFFERED_BYTES < before and not self._lost:
            self._transport.resume_reading()


class _SocketConnect(connect):
    """Opens a WebSocket, and follows no redirects: they could lead a client's key elsewhere."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class ReplicaAnswer:
    """A replica's answer. The caller must call `close` once, even without reading the body."""

    def __init__(self, upstream: Upstream, connection: _Connection) -> None:
        self._upstream = upstream
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the replica's end; None once the connection is gone."""
        return self._connection.peer

    def parts(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives.

        Raises:
            ReplicaLostError: the connection ended before the answer was complete.
        """
        return self._connection.parts()

    def close(self) -> None:
        """Returns the connection to the pool if the answer is complete.

        Otherwise the connection is closed, which makes the replica abort the request.
        """
        self._upstream.release(self._connection)


class Upstream:
    """A pool of connections to one replica.

    Args:
        url: the replica's address.
        connect_timeout: seconds that opening a connection may take.

    Attributes:
        url: the address without a user and without /v1 at its end.
        host: host of the address.
        port: port of the address.
        has_received: whether bytes have arrived on any connection. Its reader resets it.

    Raises:
        ConfigError: `url` is not an http address.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        parts = split_url(url, "replicas")
        if parts.query or parts.hostname is None:
            raise ConfigError(f"{url!r} is not an http address", "replicas")
        base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{base}"
        self.host, self.port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._base = base.encode()
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._tags = itertools.count(1)
        self._idle: deque[_Connection] = deque()
        self._in_use: set[_Connection] = set()
        self.has_received = False

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes | bytearray
    ) -> ReplicaAnswer:
        """Sends a request and waits for the head of its answer.

        Args:
            headers: end-to-end headers only.

        Raises:
            ReplicaLostError: the replica cannot be reached, or its answer cannot be forwarded.
        """
        lines = [method.encode(), b" ", self._base + target, b" HTTP/1.1\r\nhost: "]
        lines += [self._authority, b"\r\ncontent-length: %d\r\n" % len(body)]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        tag = b"%x" % next(self._tags)
        lines += [TAG_HEADER, b": ", tag, b"\r\n"]
        data = [b"".join((*lines, b"\r\n")), body]
        stray = False
        while True:
            connection, fresh = await self._connection(reuse=not stray)
            self._in_use.add(connection)
            connection.begin(data, tag, no_body=method == "HEAD")
            try:
                await connection.head()
                return ReplicaAnswer(self, connection)
            except _StrayAnswerError:
                self._in_use.discard(connection)
                connection.abort()
                stray = True
            except ReplicaLostError:
                given_up = connection not in self._in_use
                self._in_use.discard(connection)
                connection.abort()
                # The replica may have closed an idle connection before this request arrived. Then
                # nothing was computed, and the request can be sent again.
                if fresh or given_up or not connection.silent:
                    raise
            except asyncio.CancelledError:
                self._in_use.discard(connection)
                connection.abort()
                raise

    async def open_socket(self, target: bytes, headers: Headers) -> ClientConnection:
        """Opens a WebSocket.

        Raises:
            ReplicaLostError: the replica cannot be reached, or its answer is no handshake.
            SocketRefusedError: it answers with an HTTP error.
        """
        scheme = "ws" if self._tls is None else "wss"
        try:
            return await _SocketConnect(
                f"{scheme}://{(self._authority + self._base + target).decode('latin-1')}",
                additional_headers=[
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in headers
                    if not name.startswith(b"sec-websocket-")
                ],
                user_agent_header=None,
                ssl=self._tls,
                proxy=None,
                compression=None,
                open_timeout=_HANDSHAKE_SECONDS,
                close_timeout=_CLOSE_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                max_size=_MAX_EVENT,
            )
        except InvalidStatus as error:
            raise SocketRefusedError(error.response) from None
        except (OSError, ValueError, InvalidHandshake) as error:
            reason = str(error) or "it does not accept connections"
            raise ReplicaLostError(reason) from None

    async def _connection(self, *, reuse: bool) -> tuple[_Connection, bool]:
        """Returns a connection, and whether it is a new one.

        Args:
            reuse: allows an idle connection.
        """
        while reuse and self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._note_data), self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            raise UnreachableError("it does not accept connections") from None
        except (OSError, ValueError) as error:
            kind = (
                UnreachableError if getattr(error, "errno", None) in _NO_HOST else ReplicaLostError
            )
            raise kind(str(error) or "it does not accept connections") from None
        return connection, True

    def _note_data(self) -> None:
        self.has_received = True

    def release(self, connection: _Connection) -> None:
        """Takes back the connection of an answer that is complete or abandoned."""
        self._in_use.discard(connection)
        if connection.reusable and len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def abort_all(self) -> None:
        """Ends all connections in use. Tasks that wait for an answer get ReplicaLostError."""
        while self._in_use:
            self._in_use.pop().abort()

    def abort_silent(self, seconds: float) -> None:
        """Ends the connections in use that have been silent for longer than `seconds`.

        Tasks that wait for their answers get SilentError.
        """
        now = asyncio.get_running_loop().time()
        for connection in [each for each in self._in_use if each.silence(now) > seconds]:
            self._in_use.discard(connection)
            connection.fail(SilentError(f"it sent nothing for {seconds:g} s (--answer-timeout)"))

    def close(self) -> None:
        """Ends the idle connections."""
        while self._idle:
            self._idle.pop().abort()
