"""Tells a router that limits keys over the fleet what a request has used.

An answer in one piece says it in a header. A stream of events ends with a comment, which the router
takes off. Streams of bare text say nothing.
"""

from __future__ import annotations

from starlette.types import Message

from quire.server.context.request_context import RequestContext

ASK_HEADER = b"x-quire-report-usage"
"""A request's header: the answer is to tell."""
USED_HEADER = b"x-quire-usage"
"""An answer's header: tokens of prompts and answers."""

_MARK = b"\n: quire-usage "
"""The comment, with the end of the line before it."""


def add_usage(message: Message, context: RequestContext) -> Message:
    """Returns a message of an answer, values of in `context`, that tells what the request used."""
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
    """Takes what a server tells off an answer. headers: of the answer.

    used: tokens; None while it has values none.
    """

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        values = dict(headers)
        self.used = _number(values.get(USED_HEADER, b""))
        self._is_stream = values.get(b"content-type", b"").startswith(b"text/event-stream")
        self._last_byte = b"\n"
        """The last byte that was passed on."""
        self._held = b""

    def pass_on(self, part: bytes) -> bytes:
        """Returns what of the body is the client's by now."""
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
        """Returns what is left of a body that has come to its end."""
        if self._held.startswith(_MARK[1:]):
            self.used = _number(self._held.removeprefix(_MARK[1:]).strip())
            self._held = b""
        return self._held


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 12 else None
