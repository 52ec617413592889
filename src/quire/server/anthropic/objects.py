"""What the Messages API sends back, as msgspec structs: fields in Anthropic's order."""

from __future__ import annotations

from typing import Any

import msgspec


class Text(msgspec.Struct, tag="text"):
    text: str = ""


class Thinking(msgspec.Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = Text | Thinking | ToolUse


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int = 0


class Usage(msgspec.Struct):
    """`input_tokens` leaves out what came from the cache. The prefix cache fills itself: nothing is
    ever written to it on demand."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_creation_input_tokens: int = 0


class MessageUsage(Usage):
    service_tier: str = "standard"


class Message(msgspec.Struct, tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int
