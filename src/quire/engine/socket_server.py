"""The engine's end of its connections.

The loop itself reads and writes them between steps: a thread for that would be woken for every
message, and while the loop keeps a core busy that can take as long as a step.
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
_CLIENTS_WAITING = 64


class Connection:
    """A client's connection. unsent: what its socket had no room for; it is bounded by what the
    client's requests can bring."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.cutter = FrameDecoder()
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
        self._listener.listen(_CLIENTS_WAITING)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: set[Connection] = set()
        self._arrived: deque[tuple[Connection, bytes | None]] = deque()

    def receive(self, *, wait: bool) -> tuple[Connection, bytes | None] | None:
        """The next message and whose it is; in place of a message None, once, where the peer is
        gone. None: there is nothing; wait: sleeps until there is."""
        while not self._arrived:
            self._poll(None if wait else 0.0)
            if not wait:
                break
        return self._arrived.popleft() if self._arrived else None

    def _poll(self, timeout: float | None) -> None:
        for key, events in self._selector.select(timeout):
            peer = key.data
            if peer is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ and peer in self._peers:
                self._read(peer)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has left already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            peer = Connection(connection)
            self._peers.add(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Connection) -> None:
        try:
            data = peer.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        self._arrived += [(peer, message) for message in peer.cutter.feed(data)]

    def send(self, peer: Connection, message: bytes) -> None:
        """At once as far as there is room, the rest as it comes. Nothing where the peer is gone."""
        if peer not in self._peers:
            return
        idle = not peer.unsent
        peer.unsent += framed(message)
        if idle:
            self._flush(peer)

    def _flush(self, peer: Connection) -> None:
        try:
            del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.socket).events != events:
            self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: Connection) -> None:
        self._peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._arrived.append((peer, None))

    def close(self, patience: float) -> None:
        """Last words have `patience` seconds to leave. Removes the socket."""
        deadline = time.monotonic() + patience
        while any(peer.unsent for peer in self._peers) and time.monotonic() < deadline:
            self._poll(max(0.0, deadline - time.monotonic()))
        for peer in self._peers:
            peer.socket.close()
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
