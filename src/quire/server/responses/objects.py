"""Answers of the Responses API, as msgspec structs with fields in OpenAI's order."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class OutputTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class OutputTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OutputTopLogprob]


class OutputText(msgspec.Struct, tag="output_text", kw_only=True):
    """logprobs: of each token an `OutputTokenLogprob`."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[msgspec.Raw] = []


class OutputReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputFunctionCall(msgspec.Struct, tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    id: str
    status: str
    content: list[OutputReasoningText]
    summary: list[Any] = []


OutputItem = OutputMessage | OutputFunctionCall | OutputReasoning


class InputTokensDetails(msgspec.Struct):
    """Counts of the prompt's tokens. Nothing is written to the prefix cache on demand."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ErrorDetails(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool
    completed_at: int | None = None
    error: ErrorDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | UnsetType = UNSET
    reasoning: dict[str, Any]
    safety_identifier: str | UnsetType = UNSET
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | UnsetType = UNSET


class DeletedResponse(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"
