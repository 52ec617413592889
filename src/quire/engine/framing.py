"""Messages on a stream: each behind its length, of four bytes."""

from __future__ import annotations

_HEAD = 4


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(_HEAD, "little") + message


class FrameDecoder:
    """Cuts what was read into messages again, wherever the stream was cut before."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now, in order."""
        rest = self._rest
        rest += data
        messages, at = [], 0
        while len(rest) - at >= _HEAD:
            begin = at + _HEAD
            end = begin + int.from_bytes(rest[at:begin], "little")
            if end > len(rest):
                break
            messages.append(bytes(rest[begin:end]))
            at = end
        del rest[:at]
        return messages
