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

from quire.errors import ConfigError
from quire.http_client import split_url
from quire.server.http.replica_proofs import TAG_HEADER, tag_in
from quire.server.process.uvicorn_server import FRAMING_PER_BYTE, HEAD_BYTES

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


class BadAnswerError(ReplicaLostError):
    """A replica's answer is none that can be passed on."""


class SilentError(ReplicaLostError):
    """Nothing of a request's answer has come for too long."""


class _StrayAnswerError(Exception):
    """A kept connection brought an answer that does not show whose it is."""


class _Connection(asyncio.Protocol):
    """One connection, and the answer that it is reading.

    The head of an answer has at most `HEAD_BYTES` (in whole reads), interim ones included, and so
    have its trailers and the framing of its chunks. Trailers are dropped. Anything that comes
    behind an answer ends the connection: it would be taken for the next request's.

    Args:
        on_data: called when anything comes.
    """

    def __init__(self, on_data: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[None] = self._loop.create_future()
        self._more = asyncio.Event()
        self._parts: deque[bytes] = deque()
        self._waiting = self._framing = 0
        self._lost = self._bare = self._keeps = self._used = False
        self._fault: ReplicaLostError | None = None
        self._tag = b""
        self._heard = 0.0
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
        """Whether another request can be sent. None can while reading is paused, as behind a large
        answer whose client has left: nobody would read on."""
        paused = self._waiting > _HIGH_BYTES
        return self.complete and not self._lost and self._keeps and not paused

    @property
    def lost(self) -> bool:
        return self._lost or self._fault is not None

    def begin(self, data: Sequence[bytes | bytearray], tag: bytes, *, bare: bool) -> None:
        """Sends a request. tag: of the request. bare: its answer has no body, whatever its headers
        say."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._head = self._loop.create_future()
        self._more.clear()
        self._parts.clear()
        self.headers, self._waiting, self._framing, self._bare = [], 0, 0, bare
        self.complete, self.silent = False, True
        self._tag, self._heard = tag, self._loop.time()
        self._transport.writelines(data)

    async def head(self) -> None:
        """Waits for the answer's head.

        Raises:
            ReplicaLostError: there is none, or none that can be passed on.
            _StrayAnswerError: it may be the answer to an earlier request.
        """
        await self._head
        # One whose answers have had tags is kept, so that a head without one is none of these.
        reused, self._used = self._used, True
        tag = tag_in(self.headers)
        if tag == self._tag:
            return
        self._keeps = False
        if reused:
            raise _StrayAnswerError
        if tag is not None:
            raise BadAnswerError("its answer is to another request")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the answer's body as it comes. Raises ReplicaLostError."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._take(-len(part))
                yield part
            if self.complete:
                return
            if self._lost or self._fault is not None:
                raise self._fault or ReplicaLostError("the connection ended within an answer")
            self._more.clear()
            await self._more.wait()

    def silence(self, now: float) -> float:
        """Returns the seconds for which the answer has brought nothing; 0 while nobody reads on."""
        if self.complete or self._waiting > _HIGH_BYTES:
            return 0.0
        return now - self._heard

    def fail(self, fault: ReplicaLostError) -> None:
        """Ends the connection. fault: raised for who waits for more of its answer."""
        self._fault, self._keeps = self._fault or fault, False
        if not self._head.done():
            self._head.set_exception(self._fault)
            self._head.exception()  # nobody waits for an answer on an idle connection
        self._more.set()
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport, but do the same.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return
        self.silent, self._heard = False, self._loop.time()
        self._on_data()
        if self.complete:
            self.fail(BadAnswerError("it sent what nobody had asked for"))
            return
        self._framing += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(BadAnswerError("it changes to another protocol"))
        except httptools.HttpParserError as error:
            reason = error.__context__ or error
            self.fail(BadAnswerError(f"its answer is not valid HTTP: {reason}"))
        if self._framing > HEAD_BYTES:
            what = "trailer or framing" if self._head.done() else "head"
            self.fail(BadAnswerError(f"the {what} of its answer has more than {HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if not self._head.done():
            self._head.set_exception(ReplicaLostError("the connection ended before an answer"))
            # Nobody waits for an answer on an idle connection.
            self._head.exception()
        self._more.set()

    # -- httptools -----------------------------------------------------------------------------

    # An exception ends the parsing of the answer.

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
        self._framing = 0
        self._head.set_result(None)
        if self._bare:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._check_incomplete()
        self._framing = max(0, self._framing - (1 + FRAMING_PER_BYTE) * len(body))
        self._parts.append(body)
        self._take(len(body))
        self._more.set()

    def on_message_complete(self) -> None:
        if self._head.done():
            # The parser knows it now, and no more when it has left this message.
            self._keeps = self._parser.should_keep_alive()
            self.complete = True
            self._framing = 0
            self._more.set()

    def _check_incomplete(self) -> None:
        if self.complete:
            raise ValueError("more came than one answer")

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

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address and port of the other end; None where it has gone."""
        return self._connection.peer

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
        host, port: of the address.
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
        self.host, self.port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._base = base.encode()
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._tags = itertools.count(1)
        self._idle: deque[_Connection] = deque()
        self._used: set[_Connection] = set()
        self.heard = False

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes | bytearray
    ) -> ReplicaAnswer:
        """Sends a request and waits for the head of its answer. headers: without those of the
        connection.

        Raises:
            ReplicaLostError: it cannot be reached, or gives no answer that can be passed on.
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
            connection, fresh = await self._connection(kept=not stray)
            self._used.add(connection)
            connection.begin(data, tag, bare=method == "HEAD")
            try:
                await connection.head()
                return ReplicaAnswer(self, connection)
            except _StrayAnswerError:
                self._used.discard(connection)
                connection.abort()
                stray = True
            except ReplicaLostError:
                given_up = connection not in self._used
                self._used.discard(connection)
                connection.abort()
                # A kept connection may have been closed meanwhile: then nothing was computed.
                if fresh or given_up or not connection.silent:
                    raise
            except asyncio.CancelledError:
                self._used.discard(connection)
                connection.abort()
                raise

    async def _connection(self, *, kept: bool) -> tuple[_Connection, bool]:
        """Returns a connection, and whether it is a new one. kept: it need not be."""
        while kept and self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._hear), self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            raise UnreachableError("it does not accept connections") from None
        except (OSError, ValueError) as error:
            kind = (
                UnreachableError if getattr(error, "errno", None) in _NO_HOST else ReplicaLostError
            )
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

    def give_up_silent(self, seconds: float) -> None:
        """Ends the connections in use of whose answers nothing has come for so long: who waits gets
        SilentError."""
        now = asyncio.get_running_loop().time()
        for connection in [each for each in self._used if each.silence(now) > seconds]:
            self._used.discard(connection)
            connection.fail(SilentError(f"it sent nothing for {seconds:g} s (--answer-timeout)"))

    def close(self) -> None:
        """Ends the connections that are not in use."""
        while self._idle:
            self._idle.pop().abort()
