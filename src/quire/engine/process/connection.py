"""The connection between a client and an engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from quire.engine.loop.messages import FromEngine, Ping, ToEngine, decode_from_engine, encode
from quire.errors import EngineDeadError

_LENGTH_BYTES = 4


def framed(message: bytes) -> bytes:
    """Returns the message after its length (little-endian)."""
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class FrameDecoder:
    """Splits a byte stream into messages. The chunks of the stream may have any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the next chunk of the stream. Returns the messages that it completes, in order."""
        rest = self._rest
        rest += data
        messages, at = [], 0
        while len(rest) - at >= _LENGTH_BYTES:
            begin = at + _LENGTH_BYTES
            end = begin + int.from_bytes(rest[at:begin], "little")
            if end > len(rest):
                break
            messages.append(bytes(rest[begin:end]))
            at = end
        del rest[:at]
        return messages


# The client's end of its connection to an engine's process.

_RECONNECT_SECONDS = 0.05
_PING_SECONDS = 0.5
_SILENCE_SECONDS = 2.0
"""Seconds without an answer after which other engines are chosen first."""


class Link(asyncio.Protocol):
    """Connects to the Unix socket at `address` as soon as the engine listens there, and again after
    every loss of the connection. It calls the three functions on the event loop.

    Args:
        on_up: called when the connection is made.
        on_down: called when the connection is lost. Messages in transit are lost.
        on_message: called with each message.
    """

    def __init__(
        self,
        address: str,
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_message: Callable[[FromEngine], None],
    ) -> None:
        self._address = address
        self._on_up, self._on_down, self._on_message = on_up, on_down, on_message
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._task = asyncio.create_task(self._keep_connected())

    def send(self, message: ToEngine) -> None:
        """Sends a message. Raises EngineDeadError if there is no connection."""
        if self._transport is None:
            raise EngineDeadError("the engine has stopped")
        self._transport.write(framed(encode(message)))

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            with contextlib.suppress(OSError):  # The engine does not listen yet.
                await loop.create_unix_connection(lambda: self, self._address)
                await self._lost.wait()
            await asyncio.sleep(_RECONNECT_SECONDS)

    def close(self) -> None:
        """Disconnects for good. Idempotent."""
        self._task.cancel()
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._decoder = FrameDecoder()
        self._transport = transport  # type: ignore[assignment]
        self._on_up()

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._on_message(decode_from_engine(message))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost.set()
        self._on_down()


class Heartbeat:
    """Pings the engine's loop twice a second, and notes its answers.

    Silence is measured in unanswered pings, not in time. While this process does not run, answers
    wait unread, but it sends no pings either, so the engine does not count as silent.
    """

    def __init__(self) -> None:
        self._unanswered = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, link: Link, on_silence: Callable[[float], None]) -> None:
        """Starts the pings. on_silence: called twice a second with the seconds of silence."""
        self.note_answer()
        self._task = asyncio.create_task(self._ping(link, on_silence))

    async def _ping(self, link: Link, on_silence: Callable[[float], None]) -> None:
        while True:
            with contextlib.suppress(EngineDeadError):
                link.send(Ping())
            self._unanswered += 1
            await asyncio.sleep(_PING_SECONDS)
            on_silence(self.silence)

    def note_answer(self) -> None:
        self._unanswered = 0

    @property
    def silence(self) -> float:
        """Seconds for which the loop has not answered."""
        return max(0, self._unanswered - 1) * _PING_SECONDS

    @property
    def recent(self) -> bool:
        return self.silence < _SILENCE_SECONDS

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


# The engine's end of its connections.

_READ_BYTES = 1 << 18
_BACKLOG = 64
_WATCHED = object()


class Connection:
    """A client's connection.

    Attributes:
        unsent: bytes that the socket had no room for. The client's running requests bound them.
    """

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.decoder = FrameDecoder()
        self.unsent = bytearray()


class SocketServer:
    """Listens on a Unix socket at `address`, a path. Never waits for a client that reads slowly.

    Raises:
        OSError: the path cannot be bound.
    """

    def __init__(self, address: str) -> None:
        self._path = Path(address)
        self._path.unlink(missing_ok=True)  # A killed engine has left it.
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: set[Connection] = set()
        self._arrived: deque[tuple[Connection, bytes | None]] = deque()

    def watch(self, descriptor: int) -> None:
        """Makes `receive` return also when this descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, _WATCHED)

    def receive(self, *, wait: bool) -> tuple[Connection, bytes | None] | None:
        """Returns the next message and its connection; None if there is no message, or a watched
        descriptor is readable.

        When a connection has ended, it is returned once more, with None as its message.

        Args:
            wait: sleeps until a message arrives or a watched descriptor is readable.
        """
        woken = False
        while not self._arrived and not woken:
            woken = self._poll(None if wait else 0.0)
            if not wait:
                break
        return self._arrived.popleft() if self._arrived else None

    def _poll(self, timeout: float | None) -> bool:
        """Handles all ready sockets. Returns whether a watched descriptor is readable."""
        woken = False
        for key, events in self._selector.select(timeout):
            connection = key.data
            if connection is _WATCHED:
                woken = True
                continue
            if connection is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection in self._connections:
                self._read(connection)
        return woken

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # The client has left already.
            client, _ = self._listener.accept()
            client.setblocking(False)
            connection = Connection(client)
            self._connections.add(connection)
            self._selector.register(client, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
        self._arrived += [(connection, message) for message in connection.decoder.feed(data)]

    def send(self, connection: Connection, message: bytes) -> None:
        """Sends a message. Bytes that the socket has no room for are sent later. A message to a
        connection that has ended is dropped."""
        if connection not in self._connections:
            return
        idle = not connection.unsent
        connection.unsent += framed(message)
        if idle:
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._arrived.append((connection, None))

    def close(self, patience: float) -> None:
        """Closes all connections, and removes the socket.

        Args:
            patience: seconds to wait for the sending of unsent messages.
        """
        deadline = time.monotonic() + patience
        while any(one.unsent for one in self._connections) and time.monotonic() < deadline:
            self._poll(max(0.0, deadline - time.monotonic()))
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
