"""A WebSocket client for tests, over a plain socket."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def frame_of(
    opcode: int, payload: bytes, *, final: bool = True, masked: bool = True, bits: int = 0
) -> bytes:
    size = len(payload)
    short = size if size < 126 else 126 if size < 65536 else 127
    head = struct.pack(">BB", 0x80 * final | bits | opcode, 0x80 * masked | short)
    head += {126: struct.pack(">H", size & 0xFFFF), 127: struct.pack(">Q", size)}.get(short, b"")
    mask = os.urandom(4) if masked else b""
    if masked:
        payload = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
    return head + mask + payload


class SocketClient:
    """A connection.

    Args:
        behind: bytes to send with the handshake.

    Attributes:
        status: the status of the handshake's answer.
    """

    def __init__(
        self,
        url: str,
        path: str = "/v1/responses",
        headers: dict[str, str] | None = None,
        behind: bytes = b"",
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = base64.b64encode(os.urandom(16)).decode()
        given = {
            "Host": parts.netloc,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key,
            **(headers or {}),
        }
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + behind)
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self._fill()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        self.head = head.decode()
        self.status = int(head.split()[1])

    def _fill(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.buffer += data

    def rest(self) -> bytes:
        """All bytes until the server closes the connection."""
        try:
            while True:
                self._fill()
        except ConnectionError:
            return self.buffer

    def send_frame(
        self, opcode: int, payload: bytes, *, final: bool = True, masked: bool = True, bits: int = 0
    ) -> None:
        data = frame_of(opcode, payload, final=final, masked=masked, bits=bits)
        self.socket.sendall(data)

    def frame(self) -> tuple[int, bytes]:
        """The next frame: its opcode and payload."""
        while len(self.buffer) < 2:
            self._fill()
        opcode, size = self.buffer[0] & 15, self.buffer[1]
        at = 2
        if size > 125:
            form = ">H" if size == 126 else ">Q"
            at += struct.calcsize(form)
            while len(self.buffer) < at:
                self._fill()
            (size,) = struct.unpack(form, self.buffer[2:at])
        while len(self.buffer) < at + size:
            self._fill()
        payload, self.buffer = self.buffer[at : at + size], self.buffer[at + size :]
        return opcode, payload

    def event(self) -> dict[str, Any]:
        """The next event. Pings in between are answered."""
        while True:
            opcode, payload = self.frame()
            if opcode == PING:
                self.send_frame(PONG, payload)
                continue
            assert opcode == TEXT, (opcode, payload)
            found: dict[str, Any] = json.loads(payload)
            return found

    def send(self, **fields: Any) -> None:
        event = {"type": "response.create", **fields}
        self.send_frame(TEXT, json.dumps(event).encode())

    def turn(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of a turn."""
        self.send(**fields)
        events = []
        while not events or events[-1]["type"] not in (
            "response.completed", "response.incomplete", "response.failed", "error"
        ):  # fmt: skip
            events.append(self.event())
        return events

    def close(self) -> None:
        self.send_frame(CLOSE, struct.pack(">H", 1000))
        self.socket.close()
