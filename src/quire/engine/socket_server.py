"""The engine's end of its connections.

The engine's loop reads and writes them itself between steps. A thread for that would be woken for
every message, and while the loop keeps a core busy that can take as long as a step.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from pathlib import Path

from quire.engine.framing import FrameDecoder, framed

_READ_BYTES = 1 << 18
_BACKLOG = 64
_WATCHED = object()


class Connection:
    """A client's connection.

    Attributes:
        unsent: bytes that its socket had no room for, bounded by the client's running requests.
    """

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.decoder = FrameDecoder()
        self.unsent = bytearray()


class SocketServer:
    """Listens on a Unix socket at `address`, a path. Never waits for a client that reads slowly.

    Raises OSError where the path cannot be bound.
    """

    def __init__(self, address: str) -> None:
        self._path = Path(address)
        self._path.unlink(missing_ok=True)  # an engine that was killed leaves it
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
        """Returns the next message and its connection; None if there is none, or a watched
        descriptor is readable.

        The message is None, once, when its connection has ended.

        Args:
            wait: sleeps until there is a message.
        """
        woken = False
        while not self._arrived and not woken:
            woken = self._poll(None if wait else 0.0)
            if not wait:
                break
        return self._arrived.popleft() if self._arrived else None

    def _poll(self, timeout: float | None) -> bool:
        """Handles what is ready; returns whether a watched descriptor is."""
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
        with contextlib.suppress(OSError):  # it has left already
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
        """Sends as much as there is room for at once, the rest later; nothing to an ended one."""
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
            patience: seconds that unsent messages have to leave.
        """
        deadline = time.monotonic() + patience
        while any(one.unsent for one in self._connections) and time.monotonic() < deadline:
            self._poll(max(0.0, deadline - time.monotonic()))
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
