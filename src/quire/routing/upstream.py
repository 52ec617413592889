"""Connections to a replica: HTTP/1.1, kept open, one request at a time on each."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import httptools

from quire.errors import ConfigError
from quire.http_client import split_url

Headers = list[tuple[bytes, bytes]]

_MOST_IDLE = 256
_HIGH_BYTES = 1 << 18
"""Bytes that wait for a slow client before the replica is no longer read from."""
_NO_HOST = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH}
_PORTS = {"http": 80, "https": 443}


class ReplicaLostError(Exception):
    """A replica could not be reached, or its connection ended within an answer."""


class UnreachableError(ReplicaLostError):
    """Nothing is heard from a replica's address."""


class _Connection(asyncio.Protocol):
    """One connection, and the answer that it is reading. on_data: called when anything comes."""

    def __init__(self, on_data: Callable[[], None]) -> None:
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._more = asyncio.Event()
        self._parts: deque[bytes] = deque()
        self._waiting = 0
        self._lost = self._bare = self._keeps = False
        self.headers: Headers = []
        self.complete = True
        self.silent = True

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent. None can while reading is paused, as behind a large
        answer whose client has left: nobody would read on."""
        paused = self._waiting > _HIGH_BYTES
        return self.complete and not self._lost and self._keeps and not paused

    @property
    def lost(self) -> bool:
        return self._lost

    def begin(self, data: Sequence[bytes | bytearray], *, bare: bool) -> None:
        """Sends a request. bare: its answer has no body, whatever its headers say."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._head = asyncio.get_running_loop().create_future()
        self._more.clear()
        self._parts.clear()
        self.headers, self._waiting, self._bare = [], 0, bare
        self.complete, self.silent = False, True
        self._transport.writelines(data)

    async def head(self) -> None:
        """Waits for the answer's head. Raises ReplicaLostError."""
        await self._head

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the answer's body as it comes. Raises ReplicaLostError."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._take(-len(part))
                yield part
            if self.complete:
                return
            if self._lost:
                raise ReplicaLostError("the connection ended within an answer")
            self._more.clear()
            await self._more.wait()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport, but do the same.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.silent = False
        self._on_data()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if not self._head.done():
            self._head.set_exception(ReplicaLostError("the connection ended before an answer"))
            # Nobody waits for an answer on an idle connection.
            self._head.exception()
        self._more.set()

    # -- httptools -----------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.status < 200:  # an interim answer
            self.headers = []
            return
        if not self._head.done():
            self._head.set_result(None)
        if self._bare:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._take(len(body))
        self._more.set()

    def on_message_complete(self) -> None:
        if self._head.done():
            # The parser knows it now, and no more when it has left this message.
            self._keeps = self._parser.should_keep_alive()
            self.complete = True
            self._more.set()

    def _take(self, more: int) -> None:
        before, self._waiting = self._waiting, self._waiting + more
        assert self._transport is not None
        if before <= _HIGH_BYTES < self._waiting:
            self._transport.pause_reading()
        elif self._waiting <= _HIGH_BYTES < before and not self._lost:
            self._transport.resume_reading()


class ReplicaAnswer:
    """A replica's answer. `close` must be called once, whether or not the body was read."""

    def __init__(self, upstream: Upstream, connection: _Connection) -> None:
        self._upstream = upstream
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    def parts(self) -> AsyncIterator[bytes]:
        """Yields the body as it comes. Raises ReplicaLostError."""
        return self._connection.parts()

    def close(self) -> None:
        """Keeps the connection if the answer was read whole, and ends it otherwise: the replica
        then aborts the request."""
        self._upstream.release(self._connection)


class Upstream:
    """The connections to one replica.

    Attributes:
        heard: whether anything has come on any of them; who asks sets it back.

    Raises:
        ConfigError: `url` is no http address.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        parts = split_url(url, "replicas")
        if parts.query or parts.hostname is None:
            raise ConfigError(f"{url!r} is no http address", "replicas")
        base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{base}"
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._base = base.encode()
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._idle: deque[_Connection] = deque()
        self._used: set[_Connection] = set()
        self.heard = False

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes | bytearray
    ) -> ReplicaAnswer:
        """Sends a request and waits for the head of its answer. headers: without those of the
        connection. Raises ReplicaLostError."""
        lines = [method.encode(), b" ", self._base + target, b" HTTP/1.1\r\nhost: "]
        lines += [self._authority, b"\r\ncontent-length: %d\r\n" % len(body)]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        data = [b"".join((*lines, b"\r\n")), body]
        while True:
            connection, fresh = await self._connection()
            self._used.add(connection)
            connection.begin(data, bare=method == "HEAD")
            try:
                await connection.head()
                return ReplicaAnswer(self, connection)
            except ReplicaLostError:
                given_up = connection not in self._used
                self._used.discard(connection)
                # A kept connection may have been closed meanwhile: then nothing was computed.
                if fresh or given_up or not connection.silent:
                    raise
            except asyncio.CancelledError:
                self._used.discard(connection)
                connection.abort()
                raise

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._hear), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise UnreachableError("it does not accept connections") from None
        except OSError as error:
            kind = UnreachableError if error.errno in _NO_HOST else ReplicaLostError
            raise kind(str(error) or "it does not accept connections") from None
        return connection, True

    def _hear(self) -> None:
        self.heard = True

    def release(self, connection: _Connection) -> None:
        """Takes back a connection of an answer that is read, or given up."""
        self._used.discard(connection)
        if connection.reusable and len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def give_up(self) -> None:
        """Ends the connections in use: who waits for an answer gets ReplicaLostError."""
        while self._used:
            self._used.pop().abort()

    def close(self) -> None:
        """Ends the connections that are not in use."""
        while self._idle:
            self._idle.pop().abort()
