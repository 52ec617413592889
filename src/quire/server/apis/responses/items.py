"""Items of the Responses API: a request's `input`, and a conversation's history.

Items that the server sends as `output` are valid input too: clients send them back, and the store
keeps them as the beginning of the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, Field, PlainValidator, field_validator, model_validator

from quire.errors import RequestError
from quire.server.apis.responses.tools import (
    MAX_TOOLS,
    ToolParam,
    model_tools,
    shown_tool,
    tool_shape,
)
from quire.server.chat.prompt_parts import StoredFile
from quire.server.chat.sealed import is_sealed, unseal
from quire.server.context.hints import decline, refuses_hints
from quire.server.http.query import Page
from quire.server.http.strict_model import Name, StrictModel, drop_unused

MAX_ITEMS = 4096
MAX_PARTS = 1024

Status = Literal["in_progress", "completed", "incomplete"]

_TEXT_PARTS = ("input_text", "output_text", "refusal")
_KNOWN_PARTS = (*_TEXT_PARTS, "input_image")
_UNUSED_IN_PART: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "prompt_cache_breakpoint": (),
}
_UNUSED_IN_ITEM: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "created_by": (),
    "phase": (),
}


class ItemText(StrictModel):
    """A part of an item: `input_text`, `output_text` or `refusal`.

    Log-probabilities may come back as they were sent; they are not used.
    """

    type: Literal["input_text", "output_text", "refusal"]
    text: str
    logprobs: Any = Field(None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = data.get("type")
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise RequestError(
                f"parts of type {kind[:40]!r} are not supported; known are "
                f"{', '.join(_KNOWN_PARTS)}.",
                code="unsupported_parameter",
            )
        if kind == "refusal" and "text" not in data and "refusal" in data:
            data = {**data, "text": data["refusal"]}
            del data["refusal"]
        return drop_unused(data, _UNUSED_IN_PART)

    def shown(self) -> dict[str, Any]:
        if self.type == "output_text":
            return {"type": self.type, "text": self.text, "annotations": []}
        if self.type == "refusal":
            return {"type": self.type, "refusal": self.text}
        return {"type": self.type, "text": self.text}


class ItemImage(StrictModel):
    """An image: a data URI, an http address, or a file of `/v1/files`."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Name | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        return drop_unused(data, _UNUSED_IN_PART)

    @model_validator(mode="after")
    def _one_source(self) -> ItemImage:
        if (self.image_url is None) == (self.file_id is None):
            raise RequestError(
                "an image has an 'image_url' or a 'file_id', and not both.", "image_url"
            )
        return self

    @property
    def source(self) -> str | StoredFile:
        return StoredFile(self.file_id) if self.file_id is not None else self.image_url or ""

    def shown(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "detail": self.detail or "auto",
            "file_id": self.file_id,
            "image_url": self.image_url,
        }


def _parse_part(data: Any) -> Any:
    if isinstance(data, ItemText | ItemImage):
        return data
    is_image = isinstance(data, dict) and data.get("type") == "input_image"
    return (ItemImage if is_image else ItemText).model_validate(data)


ItemPart = Annotated[
    ItemText | ItemImage,
    PlainValidator(_parse_part, json_schema_input_type=ItemText | ItemImage),
]


class _Item(StrictModel):
    id: Name | None = None
    status: Status | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return drop_unused(data, _UNUSED_IN_ITEM, ("phase",), "input.")


Parts = Annotated[list[ItemPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def _text(parts: Sequence[ItemText | ItemImage]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ItemText))


def _parts(content: Any, kind: str) -> Any:
    return [{"type": kind, "text": content}] if isinstance(content, str) else content


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    @model_validator(mode="before")
    @classmethod
    def _text_as_parts(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "content" not in data:
            return data
        kind = "output_text" if data.get("role") == "assistant" else "input_text"
        return {**data, "content": _parts(data["content"], kind)}

    @model_validator(mode="after")
    def _images_of_users(self) -> MessageItem:
        for place, part in enumerate(self.content):
            if isinstance(part, ItemImage) and self.role != "user":
                raise RequestError(
                    f"a message of role {self.role!r} has no images; those of user may have some.",
                    f"content[{place}]",
                )
        return self

    @property
    def text(self) -> str:
        """The content without images."""
        return _text(self.content)


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: str

    @property
    def text(self) -> str:
        return self.arguments


class _CallOutputItem(_Item):
    type: str
    call_id: Name
    output: Parts
    name: Name | None = None

    @field_validator("output", mode="before", json_schema_input_type=str | Parts)
    @classmethod
    def _one_part(cls, output: Any) -> Any:
        return _parts(output, "input_text")

    @property
    def text(self) -> str:
        """The output without images."""
        return _text(self.output)


class FunctionCallOutputItem(_CallOutputItem):
    type: Literal["function_call_output"]
    namespace: Name | None = None


class CustomToolCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    input: str

    @property
    def text(self) -> str:
        return self.input


class CustomToolCallOutputItem(_CallOutputItem):
    type: Literal["custom_tool_call_output"]


class ToolSearchCallItem(_Item):
    """A call of the tool that finds tools."""

    type: Literal["tool_search_call"]
    call_id: Name
    arguments: dict[str, Any]
    execution: Literal["client"] = "client"

    @property
    def text(self) -> str:
        return msgspec.json.encode(self.arguments).decode()


class ToolSearchOutputItem(_Item):
    """The tools that a search found. The model may call them from here on."""

    type: Literal["tool_search_output"]
    call_id: Name
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)]
    execution: Literal["client"] = "client"

    @property
    def text(self) -> str:
        """The found tools' definitions, under the names by which the model knows them."""
        shapes = [tool_shape(tool, namespace) for namespace, tool in model_tools(self.tools)]
        return msgspec.json.encode([shape["function"] for shape in shapes]).decode()


class ItemReasoningText(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[ItemReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)]
    content: (
        Annotated[list[ItemReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None
    ) = None
    encrypted_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _unsealed(cls, data: Any) -> Any:
        """Replaces sealed reasoning by its text. That of other servers is a hint."""
        sealed = data.get("encrypted_content") if isinstance(data, dict) else None
        if not isinstance(sealed, str):
            return data
        data = {name: value for name, value in data.items() if name != "encrypted_content"}
        if is_sealed(sealed):
            text = unseal("reasoning", sealed)
            if not data.get("content"):
                data["content"] = [{"type": "reasoning_text", "text": text}] if text else []
        elif refuses_hints():
            raise RequestError(
                "'encrypted_content' is another server's, which this one cannot read.",
                "encrypted_content",
                code="invalid_encrypted_content",
            )
        else:
            decline("input.encrypted_content")
        return data

    @property
    def text(self) -> str:
        """The reasoning itself where there is some, else its summary."""
        return "".join(part.text for part in self.content or self.summary)


class CompactionItem(_Item):
    """The summary of earlier turns, which `/v1/responses/compact` wrote."""

    type: Literal["compaction"]
    encrypted_content: str

    @model_validator(mode="after")
    def _sealed_here(self) -> CompactionItem:
        unseal("compaction", self.encrypted_content)
        return self

    @property
    def text(self) -> str:
        return unseal("compaction", self.encrypted_content)


class ItemReference(StrictModel):
    type: Literal["item_reference"] | None = None
    id: Name


Item = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | ReasoningItem
    | CompactionItem
)
CallItem = FunctionCallItem | CustomToolCallItem | ToolSearchCallItem
CallOutputItem = FunctionCallOutputItem | CustomToolCallOutputItem | ToolSearchOutputItem

_KINDS: dict[str, type[BaseModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": CustomToolCallOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "item_reference": ItemReference,
}


def parse_item(data: Any) -> Any:
    """Parses an item of the type that `data` names.

    A message may leave its type out, and a reference may be nothing but an id.

    Raises:
        RequestError, ValidationError: pydantic puts the place of the item before the field's name.
    """
    if isinstance(data, _Item | ItemReference):
        return data
    if not isinstance(data, dict):
        raise RequestError("an item must be an object.")
    kind = data.get("type")
    if kind is None:
        kind = "item_reference" if data.keys() == {"id"} else "message"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"items of type {str(kind)[:40]!r} are not supported; known are {', '.join(_KINDS)}.",
            code="unsupported_parameter",
        )
    return model.model_validate(data)


InputItem = Annotated[
    Item | ItemReference, PlainValidator(parse_item, json_schema_input_type=Item | ItemReference)
]


def shown(item: Item) -> dict[str, Any]:
    """Returns the item as the API lists it; its ids must be set."""
    out: dict[str, Any] = {"id": item.id, "type": item.type, "status": item.status or "completed"}
    if isinstance(item, MessageItem):
        out |= {"role": item.role, "content": [part.shown() for part in item.content]}
    elif isinstance(item, FunctionCallItem | CustomToolCallItem):
        name = "arguments" if isinstance(item, FunctionCallItem) else "input"
        out |= {"call_id": item.call_id, "name": item.name, name: item.text}
        if item.namespace is not None:
            out["namespace"] = item.namespace
    elif isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem):
        out |= {"call_id": item.call_id, "output": [part.shown() for part in item.output]}
    elif isinstance(item, ToolSearchCallItem):
        out |= {"call_id": item.call_id, "execution": "client", "arguments": item.arguments}
    elif isinstance(item, ToolSearchOutputItem):
        tools = [shown_tool(tool) for tool in item.tools]
        out |= {"call_id": item.call_id, "execution": "client", "tools": tools}
    elif isinstance(item, CompactionItem):
        out["encrypted_content"] = item.encrypted_content
    else:
        content = [part.model_dump() for part in item.content or ()]
        out |= {"summary": [part.model_dump() for part in item.summary], "content": content}
    return out


# Answers of the Responses API, as msgspec structs with fields in OpenAI's order.


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


class OutputCustomToolCall(msgspec.Struct, tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


class OutputToolSearchCall(msgspec.Struct, tag="tool_search_call"):
    id: str
    status: str
    call_id: str
    arguments: dict[str, Any] = {}
    execution: str = "client"


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    id: str
    status: str
    content: list[OutputReasoningText]
    summary: list[Any] = []
    encrypted_content: str | UnsetType = UNSET


OutputCall = OutputFunctionCall | OutputCustomToolCall | OutputToolSearchCall
OutputItem = OutputMessage | OutputCall | OutputReasoning


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


class CompactedResponse(msgspec.Struct):
    """A conversation's user messages, and one item with the summary of all else."""

    id: str
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage
    object: str = "response.compaction"


class DeletedResponse(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Page[dict[str, Any]]):
    pass


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"
