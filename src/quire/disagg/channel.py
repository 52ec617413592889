"""A connection between engines: messages behind their lengths, and raw blocks."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from quire.disagg.messages import Message, decode, encoder

_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 20
"""The most of a message; blocks are not part of it."""


class BrokenMessageError(Exception):
    """Bytes came over a connection that are no message."""


class PeerChannel:
    """Sends and receives on a connected socket, each from one thread; `end` from any."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Message) -> None:
        """Raises OSError where the peer is gone."""
        data = encoder.encode(message)
        self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def send_block(self, block: memoryview) -> None:
        self._socket.sendall(block)

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            OSError: the connection has ended, or the time limit has passed (TimeoutError).
            BrokenMessageError: it is no message.
        """
        head = bytearray(_LENGTH_BYTES)
        self.receive_into(memoryview(head))
        size = int.from_bytes(head, "little")
        if size > _MOST_BYTES:
            raise BrokenMessageError(f"a message of {size} bytes")
        data = bytearray(size)
        self.receive_into(memoryview(data))
        try:
            return decode(bytes(data))
        except msgspec.DecodeError as error:
            raise BrokenMessageError(str(error)) from None

    def receive_into(self, data: memoryview) -> None:
        """Fills memory. Raises OSError as `receive`."""
        while len(data):
            count = self._socket.recv_into(data)
            if not count:
                raise ConnectionResetError("the peer has ended the connection")
            data = data[count:]

    def end(self) -> None:
        """Ends the connection for both directions; calls that wait return. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._socket.close()
