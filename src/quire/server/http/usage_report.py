"""Reports a request's tokens to a router, which limits keys over its whole fleet.

A JSON answer has the number in a header. A stream of events has it in a comment at its end, which
the router removes. A stream of plain text has no report.
"""

from __future__ import annotations

from starlette.types import Message

from quire.server.context.request_context import RequestContext

ASK_HEADER = b"x-quire-report-usage"
"""Header of a request that asks for the report."""
USED_HEADER = b"x-quire-usage"
"""Header of an answer with the report: tokens of the prompts and of the answers."""

_MARK = b"\n: quire-usage "
"""Beginning of the comment, with the end of the line before it."""


def add_usage(message: Message, context: RequestContext) -> Message:
    """Returns an ASGI message of an answer with the report added.

    Args:
        message: the answer's start, or a part of its body.
        context: the request's context.
    """
    used = context.used_tokens
    if message["type"] == "http.response.start":
        kinds = [value for name, value in message["headers"] if name == b"content-type"]
        context.is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        if any(kind.startswith(b"application/json") for kind in kinds):
            headers = [*message["headers"], (USED_HEADER, b"%d" % used)]
            return {**message, "headers": headers}
    elif context.is_stream and not message.get("more_body", False):
        return {**message, "body": message.get("body", b"") + _MARK[1:] + b"%d\n\n" % used}
    return message


class UsageReader:
    """Removes the report from a server's answer.

    Args:
        headers: the answer's headers.

    Attributes:
        used: the reported tokens; None until the report has arrived.
    """

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        values = dict(headers)
        self.used = _number(values.get(USED_HEADER, b""))
        self._is_stream = values.get(b"content-type", b"").startswith(b"text/event-stream")
        self._last_byte = b"\n"
        """The last byte that was returned."""
        self._held = b""

    def pass_on(self, part: bytes) -> bytes:
        """Returns the bytes of the body that may be forwarded.

        Bytes that may begin the comment are held back.
        """
        if not self._is_stream:
            return part
        data = self._last_byte + self._held + part
        at = data.rfind(_MARK)
        if at < 0:
            sizes = range(min(len(data), len(_MARK) - 1), 1, -1)
            at = next((len(data) - n for n in sizes if data.endswith(_MARK[:n])), len(data) - 1)
        forwarded, self._held = data[1 : at + 1], data[at + 1 :]
        self._last_byte = data[at : at + 1]
        return forwarded

    def end(self) -> bytes:
        """Returns the last bytes of the body, without the comment."""
        if self._held.startswith(_MARK[1:]):
            self.used = _number(self._held.removeprefix(_MARK[1:]).strip())
            self._held = b""
        return self._held


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 12 else None
