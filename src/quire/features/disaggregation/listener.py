"""The connections of readers: a thread that accepts them, and two for each."""

from __future__ import annotations

import errno
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection

from quire.errors import ConfigError
from quire.features.disaggregation.log_limit import LogLimit
from quire.features.disaggregation.messages import (
    BatchAck,
    BlockBatch,
    BrokenMessageError,
    End,
    Grant,
    MapReply,
    Message,
    OpenGrant,
    PeerChannel,
)
from quire.features.disaggregation.reader_link import LinkClosed, ReaderLink, ReaderMessage

_log = logging.getLogger(__name__)
_log.addFilter(LogLimit())

_TICK = 0.25
"""Seconds after which the loop is woken while grants are open, because leases may have expired."""
_BACKLOG = 128
_MOST_LINKS = 256
_ENDED = frozenset({errno.EBADF, errno.EINVAL})
"""Errors after which no reader can connect. Others, such as too many open files, may pass."""

View = Callable[[int, int], memoryview]
"""Returns the bytes of a group's slot. Not used if readers read the cache itself."""
Tell = Callable[[ReaderMessage | LinkClosed], None]
Greet = Callable[[ReaderLink, Grant], None]
"""Greets a reader that shows a grant; see `Exports.greet`."""


class ReaderConnection:
    """A reader's connection. One thread reads its messages, and another sends the loop's messages.

    The reading thread ends before the sending thread reports the end of the connection.

    Args:
        send_seconds: seconds that the reader may take for a piece of a message.

    Attributes:
        silent: the reader has not shown its grant yet.

    Raises:
        OSError: the reader is gone already.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        connected: socket.socket,
        view: View | None,
        tell: Tell,
        greet: Greet,
        send_seconds: float,
    ) -> None:
        self.silent = True
        self.since = time.monotonic()
        self._channel = PeerChannel(connected)
        self._view = view
        self._tell = tell
        self._greet = greet
        self._shared = False
        self._acked: set[int] = set()
        self._awaited: frozenset[int] = frozenset()
        self._end: End | None = None
        """The message to send when the awaited batches have been acknowledged."""
        self._lock = threading.Lock()
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        seconds = int(send_seconds * 1000)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds)
        self._reader = threading.Thread(target=self._read, daemon=True, name="kv-reader")
        self._writer = threading.Thread(target=self._write, daemon=True, name="kv-writer")
        self._broken = False
        self._writer.start()
        try:
            self._reader.start()
        except RuntimeError:
            self._out.put(None)
            raise

    def send(self, message: Message) -> None:
        self._out.put(message)

    def end_after(self, numbers: Collection[int], end: End) -> None:
        with self._lock:
            self._awaited, self._end = frozenset(numbers), end
            self._end_if_taken()

    def _end_if_taken(self) -> None:
        if self._end is not None and self._awaited <= self._acked:
            self._out.put(self._end)
            self._end = None

    def close(self) -> None:
        with self._lock:
            self._end = None
            self._out.put(None)

    def cut(self) -> None:
        """Ends the connection at once. Idempotent."""
        self._channel.end()

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, MapReply):
                    self._shared = message.shared
                    continue
                if isinstance(message, OpenGrant):
                    self.silent = False
                    self._greet(self, message.grant)
                if isinstance(message, BatchAck):
                    with self._lock:
                        self._acked.add(message.number)
                        self._end_if_taken()
                self._tell(ReaderMessage(self, message))
        except (OSError, BrokenMessageError) as error:
            self._broken = isinstance(error, BrokenMessageError)
            if self._broken:
                _log.warning("a reader sent no valid message: %s", error)
        self._channel.end()
        self._out.put(None)

    def _write(self) -> None:
        try:
            while (message := self._out.get()) is not None:
                self._send(message)
        except OSError:
            pass  # The reader is gone. The other thread notices it as well.
        self._channel.end()
        if self._reader.is_alive():  # The thread may not have been started.
            self._reader.join()
        self._channel.close()
        self._tell(LinkClosed(self, self._broken))

    def _send(self, message: Message) -> None:
        if not isinstance(message, BlockBatch) or self._shared or self._view is None:
            self._channel.send(message)
            return
        self._channel.send(BlockBatch(message.number, message.group, message.first, message.count))
        for slot in message.slots or ():
            self._channel.send_block(self._view(message.group, slot))


class Listener:
    """Accepts readers at an address.

    A reader must show a grant within `lease` seconds. If there are too many connections, the one
    that has been silent longest is closed earlier. A reader may also take `lease` seconds for a
    piece of a message.

    Args:
        open_grants: returns the number of open grants.
        wake: wakes the loop. It is called regularly while grants are open.

    Raises:
        ConfigError: it cannot listen at the address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        view: View | None,
        tell: Tell,
        wake: Callable[[], None],
        greet: Greet,
        lease: float,
        open_grants: Callable[[], int],
    ) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"kv_port: cannot listen on {host}:{port} ({error})", "kv_port"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._view = view
        self._told = tell
        self._wake = wake
        self._greet = greet
        self._lease = lease
        self._open_grants = open_grants
        self._links: set[ReaderConnection] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True, name="kv-listener")
        self._socket.settimeout(_TICK)
        self._thread.start()

    def _accept(self) -> None:
        told = False
        while not self._closed.is_set():
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                self._wake_for_grants()
            except OSError as error:
                if self._closed.is_set():
                    return
                if error.errno in _ENDED:
                    _log.exception("readers can no longer connect")
                    return
                if not told:
                    _log.warning("readers cannot connect for now: %s", error)
                told = True
                self._wake_for_grants()
                self._closed.wait(_TICK)
            else:
                told = False
                self._add(connected)
            self._cut_silent()

    def _wake_for_grants(self) -> None:
        if self._open_grants():
            self._wake()

    def _add(self, connected: socket.socket) -> None:
        """Accepts a reader if there is room for another connection."""
        connected.settimeout(None)
        try:
            with self._lock:
                self._make_room()
                if len(self._links) < _MOST_LINKS and not self._closed.is_set():
                    self._links.add(
                        ReaderConnection(
                            connected, self._view, self._tell, self._greet, self._lease
                        )
                    )
                    return
        except (OSError, RuntimeError) as error:
            _log.warning("a reader's connection failed: %s", error)
        connected.close()

    def _make_room(self) -> None:
        """Closes the connection that has been silent longest, if there is no room for another."""
        silent = [link for link in self._links if link.silent]
        if silent and len(self._links) >= _MOST_LINKS:
            self._cut(min(silent, key=lambda link: link.since))

    def _cut_silent(self) -> None:
        """Closes the connections that have not shown a grant in time."""
        begin = time.monotonic() - self._lease
        with self._lock:
            for link in [link for link in self._links if link.silent and link.since < begin]:
                self._cut(link)

    def _cut(self, link: ReaderConnection) -> None:
        self._links.discard(link)
        link.cut()

    def _tell(self, event: ReaderMessage | LinkClosed) -> None:
        if isinstance(event, LinkClosed) and isinstance(event.link, ReaderConnection):
            with self._lock:
                self._links.discard(event.link)
        self._told(event)

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        self._closed.set()
        self._socket.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        self._thread.join(2 * _TICK)
