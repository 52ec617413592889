"""`functions` and `function_call`, OpenAI's older names of tools and their choice."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from quire.server.errors import ApiError
from quire.server.generation.dialogue import ToolChoice
from quire.server.openai.messages import FunctionName
from quire.server.openai.objects import ChatDelta, ChatFunctionCall, ChatMessage, FunctionDelta
from quire.server.openai.protocol import ChatRequest

ERROR_NAMES = {"tools": "functions", ".function.": ".", "tool_choice": "function_call"}
"""Maps parts of fields' paths to their older names."""


def check(body: ChatRequest) -> None:
    """Checks that older and newer fields are not mixed. Raises ApiError."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old) and getattr(body, new):
            raise ApiError(400, f"'{old}' and '{new}' exclude each other.", param=old)
    if isinstance(body.function_call, FunctionName) and not body.functions:
        raise ApiError(400, "'function_call' needs 'functions'.", param="function_call")


def tools_of(body: ChatRequest) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": function.model_dump(exclude_none=True)}
        for function in body.functions or ()
    ]


def choice_of(body: ChatRequest) -> ToolChoice:
    choice = body.function_call
    if isinstance(choice, FunctionName):
        return ToolChoice.named(choice.name)
    return ToolChoice(choice or "auto")


def in_message(message: ChatMessage) -> None:
    """Turns the message's call, which is one at most, into a `function_call`."""
    for call in [] if message.tool_calls is UNSET else message.tool_calls:
        message.function_call = ChatFunctionCall(call.function.name, call.function.arguments)
    message.tool_calls = UNSET


def in_delta(delta: ChatDelta) -> None:
    for call in [] if delta.tool_calls is UNSET else delta.tool_calls:
        delta.function_call = FunctionDelta(call.function.name, call.function.arguments)
    delta.tool_calls = UNSET


def finish_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
