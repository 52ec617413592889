"""Steering: input of the user for a response that runs on a WebSocket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from quire.errors import QuireError
from quire.server.apis.responses.items import (
    MAX_ITEMS,
    MessageItem,
    OutputCall,
    OutputCustomToolCall,
    OutputFunctionCall,
    Response,
)
from quire.server.state import new_id

MAX_STEERS = 16
"""Most steering inputs that wait for the end of one response."""
_FIELDS = {"previous_response_id", "input"}


class SteerError(QuireError):
    """Steering input cannot be taken, or cannot be committed.

    Args:
        code: one of OpenAI's error codes of steering.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Steer:
    """Steering input of one event.

    Attributes:
        parent: id of the response that it steers.
        given: the input as the client sent it.
        items: the input as items.
        size: number of characters of the event.
    """

    parent: str
    given: Any
    items: list[dict[str, Any]]
    size: int
    id: str = field(default_factory=lambda: new_id("steer", "_"))


def read_steer(event: dict[str, Any], size: int) -> Steer:
    """Returns the steering input of an event, without its type.

    Args:
        size: number of characters of the event.

    Raises:
        SteerError: the input is not one or more messages of the user, or a field is unknown.
    """
    unknown = sorted(event.keys() - _FIELDS)
    if unknown:
        raise SteerError("invalid_input", f"'response.steer' has no field {unknown[0][:100]!r}.")
    parent, given = event.get("previous_response_id"), event.get("input")
    if not isinstance(parent, str):
        raise SteerError("invalid_input", "'previous_response_id' must name a response.")
    items = input_items(given)
    if not items or len(items) > MAX_ITEMS:
        raise SteerError("invalid_input", f"'input' must have 1 to {MAX_ITEMS} messages.")
    for place, item in enumerate(items):
        if not isinstance(item, dict) or item.get("role") != "user":
            raise SteerError("invalid_input", f"input[{place}] is not a message of the user.")
        try:
            MessageItem.model_validate(item)
        except (ValidationError, QuireError) as error:
            raise SteerError("invalid_input", f"input[{place}]: {_reason(error)}") from None
    return Steer(parent, given, items, size)


def input_items(given: Any) -> list[Any]:
    """Returns the items of an `input`, which may be a text. They are not checked."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else [given]


def _reason(error: Exception) -> str:
    return str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)


def required_input(response: Response) -> list[dict[str, str]]:
    """Returns stubs of the results that a response waits for, one for each call of a tool."""
    return [_stub(item) for item in response.output if isinstance(item, OutputCall)]


def _stub(call: OutputCall) -> dict[str, str]:
    if isinstance(call, OutputFunctionCall):
        return {"type": "function_call_output", "call_id": call.call_id, "name": call.name}
    if isinstance(call, OutputCustomToolCall):
        return {"type": "custom_tool_call_output", "call_id": call.call_id}
    return {"type": "tool_search_output", "call_id": call.call_id, "execution": "client"}


def accepted_event(steer: Steer, number: int) -> bytes:
    return _event("accepted", number, {"id": steer.id, "previous_response_id": steer.parent})


def pending_event(steer: Steer, number: int, needed: Sequence[dict[str, str]]) -> bytes:
    return _event(
        "pending",
        number,
        {"id": steer.id, "previous_response_id": steer.parent},
        reason="waiting_for_required_input",
        required_input=needed,
    )


def failed_event(error: SteerError, number: int, steer: dict[str, Any]) -> bytes:
    """Returns the event that gives input back.

    Args:
        steer: the input, its response's id, and its own id if it had one.
    """
    shown = {"type": "invalid_request_error", "code": error.code, "message": str(error)}
    return _event("failed", number, steer, error=shown)


def _event(kind: str, number: int, steer: dict[str, Any], **more: Any) -> bytes:
    event = {"type": f"response.steer.{kind}", "sequence_number": number, "steer": steer, **more}
    return msgspec.json.encode(event)
