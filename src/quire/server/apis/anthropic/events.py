"""Answers of the Messages API, as msgspec structs with fields in Anthropic's order."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec
from pydantic_core import from_json

from quire.server.chat.sealed import seal


class TextContent(msgspec.Struct, tag="text"):
    text: str = ""


class ThinkingContent(msgspec.Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokensDetails(msgspec.Struct):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct):
    """Token counts. `input_tokens` leaves out tokens found in the prefix cache, which fills itself:
    `cache_creation_input_tokens` is always 0."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails
    cache_creation_input_tokens: int = 0
    service_tier: str = "standard"


class Message(msgspec.Struct, tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class ModelInfo(msgspec.Struct, tag="model"):
    id: str
    display_name: str
    created_at: str


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenCount(msgspec.Struct):
    input_tokens: int


# Events of a streamed message, and the message itself, built from the model's output.

_encoder = msgspec.json.Encoder()


class MessageWriter:
    """Builds `message`, and appends its events to `out`.

    Args:
        streams: False leaves the events out.
        show_thinking: False leaves thinking blocks empty but for their signature, which has the
            thinking.
    """

    def __init__(self, message: Message, *, streams: bool, show_thinking: bool) -> None:
        self.message = message
        self.out = bytearray()
        self._streams = streams
        self._show_thinking = show_thinking
        self._block: Block | None = None
        self._texts: list[str] = []

    def take(self) -> bytes:
        out, self.out = bytes(self.out), bytearray()
        return out

    def begin(self) -> None:
        self._emit("message_start", message=self.message)

    def text(self, text: str) -> None:
        if not text:
            return
        if not isinstance(self._block, TextContent):
            self._open(TextContent())
        self._delta("text_delta", text=text)
        self._texts.append(text)

    def thinking(self, text: str) -> None:
        if not text:
            return
        if not isinstance(self._block, ThinkingContent):
            self._open(ThinkingContent())
        if self._show_thinking:
            self._delta("thinking_delta", thinking=text)
        self._texts.append(text)

    def tool_use(self, id: str, name: str) -> None:
        self._open(ToolUseContent(id, name))

    def input_json(self, text: str) -> None:
        """Adds to the input of the tool use that began last."""
        if text and isinstance(self._block, ToolUseContent):
            self._delta("input_json_delta", partial_json=text)
            self._texts.append(text)

    def finish(self, usage: MessageUsage, stop_reason: str, stop_sequence: str | None) -> None:
        if not self.message.content:
            self._open(TextContent())
        self._close()
        self.message.stop_reason, self.message.stop_sequence = stop_reason, stop_sequence
        self.message.usage = usage
        counts = msgspec.structs.asdict(usage)
        del counts["service_tier"]
        self._emit(
            "message_delta",
            delta={"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            usage=counts,
        )
        self._emit("message_stop")

    def _open(self, block: Block) -> None:
        self._close()
        self._block = block
        place = len(self.message.content)
        self.message.content.append(block)
        self._emit("content_block_start", index=place, content_block=block)
        if place == 0:
            self._emit("ping")

    def _close(self) -> None:
        block, text = self._block, "".join(self._texts)
        if block is None:
            return
        if isinstance(block, TextContent):
            block.text = text
        elif isinstance(block, ToolUseContent):
            block.input = _object(text)
        else:
            block.thinking = text if self._show_thinking else ""
            # The client sends an empty block back. Its signature then holds the thinking.
            block.signature = _signature(text) if self._show_thinking else seal("reasoning", text)
            self._delta("signature_delta", signature=block.signature)
        self._emit("content_block_stop", index=len(self.message.content) - 1)
        self._block, self._texts = None, []

    def _delta(self, kind: str, **fields: Any) -> None:
        place = len(self.message.content) - 1
        self._emit("content_block_delta", index=place, delta={"type": kind, **fields})

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._streams:
            write_event(self.out, kind, {"type": kind, **fields})


def write_event(buffer: bytearray, kind: str, value: Any) -> None:
    buffer += b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


def _object(text: str) -> dict[str, Any]:
    """Returns a tool's input. An input that was cut off is parsed as far as it came."""
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _signature(thinking: str) -> str:
    """Returns a signature of thinking, as clients drop thinking that is not signed.

    The text is the client's to read and to change, so a digest is enough.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
