"""Messages over a socket, in both directions, without waiting."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

_HEAD = struct.Struct("<I")
_CHUNK = 1 << 18


class MaskChannel:
    """Sends and receives messages of bytes. What the socket does not take is sent later.

    Any thread may send. One thread receives.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._unread = bytearray()

    def send(self, message: bytes) -> None:
        """Sends a message. Does nothing if the other end is gone, which `receive` tells."""
        with self._lock:
            self._unsent += _HEAD.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        if not self._unsent:
            return
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()

    def receive(self) -> list[bytes]:
        """Returns the messages that have come.

        Raises:
            EOFError: the other end is gone.
        """
        self.flush()
        try:
            while True:
                data = self.socket.recv(_CHUNK)
                if not data:
                    raise EOFError
                self._unread += data
                if len(data) < _CHUNK:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            raise EOFError from error
        return self._messages()

    def _messages(self) -> list[bytes]:
        found, at, unread = list[bytes](), 0, self._unread
        while at + _HEAD.size <= len(unread):
            (size,) = _HEAD.unpack_from(unread, at)
            end = at + _HEAD.size + size
            if end > len(unread):
                break
            found.append(bytes(unread[at + _HEAD.size : end]))
            at = end
        del unread[:at]
        return found

    def wait(self, seconds: float | None) -> None:
        """Waits until messages come, or for so many seconds."""
        out = [self.socket] if self._unsent else []
        select.select([self.socket], out, [], seconds)

    def close(self) -> None:
        """Closes the channel, for copies of the socket too."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
