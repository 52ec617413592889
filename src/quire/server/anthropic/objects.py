"""Answers of the Messages API, as msgspec structs with fields in Anthropic's order."""

from __future__ import annotations

from typing import Any

import msgspec


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
