"""WebSocket connections (RFC 6455) as ASGI sees them. uvicorn brings no protocol of its own."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import http
import logging
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger("quire.server")

Headers = list[tuple[bytes, bytes]]

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_MOST_CONTROL = 125
"""Most bytes of a control frame."""
_MOST_WAITING = 1024 * 1024
"""Bytes of messages that wait for the application, above which reading pauses."""
_MESSAGE_BYTES = 1024
"""Bytes that a waiting message counts for besides its text."""
PING_SECONDS = 30.0
"""Seconds between pings. A peer that answers none of two is gone."""
_CLOSE_SECONDS = 5.0
"""Seconds that the peer has for its part of the closing handshake."""
_STOP_SECONDS = 0.5
"""The same where the server stops: an idle client may never answer."""

NORMAL, GOING_AWAY, PROTOCOL_ERROR, BAD_TYPE, BAD_TEXT = 1000, 1001, 1002, 1003, 1007
TOO_LARGE, INTERNAL_ERROR, RESTART = 1009, 1011, 1012


def accept_key(headers: Headers) -> bytes | None:
    """Returns the answer to a client's handshake; None if the headers are not a valid one."""
    values = dict(headers)
    upgrade = values.get(b"upgrade", b"").lower()
    key = values.get(b"sec-websocket-key", b"").strip()
    if upgrade != b"websocket" or values.get(b"sec-websocket-version", b"").strip() != b"13":
        return None
    try:
        if len(base64.b64decode(key, validate=True)) != 16:
            return None
    except binascii.Error:
        return None
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


class ProtocolError(Exception):
    """The peer broke the protocol.

    Args:
        code: the code of the close frame.
    """

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class FrameReader:
    """Turns bytes into messages and control frames.

    Args:
        most: most bytes of a message.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = bytearray()
        self._message = bytearray()
        self._kind = 0

    def feed(self, data: bytes) -> Iterable[tuple[int, bytes]]:
        """Yields (opcode, payload) of each complete message and control frame.

        Raises:
            ProtocolError: the peer broke the protocol, or sent a message that is too large.
        """
        self._buffer += data
        while (frame := self._frame()) is not None:
            final, opcode, payload = frame
            if opcode >= _CLOSE:
                yield opcode, payload
                continue
            if (opcode == _CONTINUATION) == (self._kind == 0):
                raise ProtocolError(PROTOCOL_ERROR, "a frame is out of order")
            self._kind = self._kind or opcode
            self._message += payload
            if final:
                message, kind = bytes(self._message), self._kind
                self._message, self._kind = bytearray(), 0
                yield kind, message

    def _frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, opcode, size = bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[1] & 0x7F
        if buffer[0] & 0x70 or opcode not in (_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG):
            raise ProtocolError(PROTOCOL_ERROR, "a frame has unknown bits or an unknown opcode")
        if not buffer[1] & 0x80:
            raise ProtocolError(PROTOCOL_ERROR, "a frame is not masked")
        if opcode >= _CLOSE and (size > _MOST_CONTROL or not final):
            raise ProtocolError(PROTOCOL_ERROR, "a control frame is too large, or in parts")
        at = 2
        if size > 125:
            form = ">H" if size == 126 else ">Q"
            at += struct.calcsize(form)
            if len(buffer) < at:
                return None
            (size,) = struct.unpack_from(form, buffer, 2)
        if opcode < _CLOSE and len(self._message) + size > self._most:
            raise ProtocolError(TOO_LARGE, f"a message has more than {self._most} bytes")
        if len(buffer) < at + 4 + size:
            return None
        payload = _unmasked(bytes(buffer[at + 4 : at + 4 + size]), bytes(buffer[at : at + 4]))
        del buffer[: at + 4 + size]
        return final, opcode, payload


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    if not size:
        return payload
    repeated = (mask * (size // 4 + 1))[:size]
    number = int.from_bytes(payload, "little") ^ int.from_bytes(repeated, "little")
    return number.to_bytes(size, "little")


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.get("text") or message.get("bytes") or "")


def frame(opcode: int, payload: bytes) -> bytes:
    """Returns an unmasked frame, as servers send them."""
    size = len(payload)
    if size < 126:
        head = struct.pack(">BB", 0x80 | opcode, size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", 0x80 | opcode, 126, size)
    else:
        head = struct.pack(">BBQ", 0x80 | opcode, 127, size)
    return head + payload


class WebSocketProtocol(asyncio.Protocol):
    """One connection after its upgrade. It runs the application with an ASGI websocket scope.

    Args:
        connections: the server's open connections, which it asks to shut down.
        tasks: the server's running applications.
        most: most bytes of a message.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        accept: bytes,
        transport: asyncio.Transport,
        *,
        connections: set[Any],
        tasks: set[asyncio.Task[None]],
        most: int,
    ) -> None:
        self._accept_key = accept
        self._transport = transport
        self._connections = connections
        self._reader = FrameReader(most)
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Message] = deque([{"type": "websocket.connect"}])
        self._waiting = _size(self._messages[0])
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._accepted = False
        self._closing = False
        self._unanswered = 0
        self._response: Message | None = None
        self._timer: asyncio.TimerHandle | None = None
        connections.add(self)
        task = self._loop.create_task(self._run(app, scope))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # -- the connection ------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unanswered = 0
        try:
            for opcode, payload in self._reader.feed(data):
                self._read(opcode, payload)
        except ProtocolError as error:
            self._close(error.code, str(error))
        except UnicodeDecodeError:
            self._close(BAD_TEXT, "a text is not UTF-8")
        if self._waiting > _MOST_WAITING and not self._transport.is_closing():
            self._transport.pause_reading()

    def _read(self, opcode: int, payload: bytes) -> None:
        if self._closing and opcode != _CLOSE:
            return
        if opcode == _TEXT:
            self._add({"type": "websocket.receive", "text": payload.decode()})
        elif opcode == _BINARY:
            self._add({"type": "websocket.receive", "bytes": payload})
        elif opcode == _PING:
            self._transport.write(frame(_PONG, payload))
        elif opcode == _CLOSE:
            code = struct.unpack(">H", payload[:2])[0] if len(payload) >= 2 else NORMAL
            if not self._closing:
                self._transport.write(frame(_CLOSE, payload[:2]))
            self._disconnect(code)
            self._transport.close()

    def _add(self, message: Message) -> None:
        self._messages.append(message)
        self._waiting += _size(message)
        self._arrived.set()

    def _disconnect(self, code: int) -> None:
        self._closing = True
        self._add({"type": "websocket.disconnect", "code": code})

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()
        self._disconnect(1006)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def shutdown(self) -> None:
        """Lets the application finish: it gets a disconnect as its next message."""
        self._add({"type": "websocket.disconnect", "code": RESTART})

    def _close(self, code: int, reason: str) -> None:
        """Sends a close frame, and cuts the connection if the peer does not answer it."""
        if self._closing or self._transport.is_closing():
            return
        self._disconnect(code)
        text = reason.encode()[: _MOST_CONTROL - 2].decode("utf-8", "ignore")
        self._transport.write(frame(_CLOSE, struct.pack(">H", code) + text.encode()))
        seconds = _STOP_SECONDS if code == RESTART else _CLOSE_SECONDS
        self._loop.call_later(seconds, self._transport.abort)

    def _ping(self) -> None:
        if self._unanswered >= 2:
            self._transport.abort()
            return
        self._unanswered += 1
        self._transport.write(frame(_PING, b""))
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    # -- the application -----------------------------------------------------------------------

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            logger.exception("unexpected error in a websocket")
            self._close(INTERNAL_ERROR, "")
        if not self._accepted:
            self._transport.close()
        else:
            self._close(NORMAL, "")

    async def _receive(self) -> Message:
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        before, self._waiting = self._waiting, self._waiting - _size(message)
        paused = before > _MOST_WAITING >= self._waiting
        if paused and not self._transport.is_closing():
            self._transport.resume_reading()
        return message

    async def _send(self, message: Message) -> None:
        await self._writable.wait()
        if self._transport.is_closing():
            return
        match message["type"]:
            case "websocket.accept":
                self._accept(message.get("headers", ()))
            case "websocket.send":
                text = message.get("text")
                if text is None:
                    self._transport.write(frame(_BINARY, message["bytes"]))
                else:
                    data = text if isinstance(text, bytes) else text.encode()
                    self._transport.write(frame(_TEXT, data))
            case "websocket.close" if self._accepted:
                self._close(message.get("code", NORMAL), message.get("reason") or "")
            case "websocket.close":
                self._refuse({"status": 403, "headers": []}, b"")
            case "websocket.http.response.start":
                self._response = message
            case "websocket.http.response.body" if self._response is not None:
                self._refuse(self._response, message.get("body", b""))

    def _accept(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._accepted = True
        lines = [
            b"HTTP/1.1 101 Switching Protocols",
            b"Upgrade: websocket",
            b"Connection: Upgrade",
            b"Sec-WebSocket-Accept: " + self._accept_key,
            *(name + b": " + value for name, value in headers),
        ]
        self._transport.write(b"\r\n".join([*lines, b"", b""]))
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def _refuse(self, response: Message, body: bytes) -> None:
        """Answers the handshake with an HTTP error, and closes the connection."""
        status = response["status"]
        lines = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode(),
            *(name + b": " + value for name, value in response["headers"]
              if name != b"content-length"),
            b"content-length: " + str(len(body)).encode(),
            b"connection: close",
        ]  # fmt: skip
        self._transport.write(b"\r\n".join([*lines, b"", body]))
        self._transport.close()
