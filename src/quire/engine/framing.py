"""Framing of messages on a byte stream: each message follows its length, four bytes."""

from __future__ import annotations

_LENGTH_BYTES = 4


def framed(message: bytes) -> bytes:
    """Returns the message behind its length (little-endian)."""
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class FrameDecoder:
    """Splits a stream into messages again, however it was cut in transit."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in more of the stream; returns the messages that are complete now, in order."""
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
