"""Content blocks of Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, field_validator, model_validator

from quire.errors import RequestError
from quire.server.strict_model import Name, StrictModel, drop_unused

MAX_BLOCKS = 4096

_UNUSED: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "toolset_name": (),
}


class CacheControl(StrictModel):
    """A cache hint. It changes nothing: the prefix cache keeps every prompt while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(StrictModel):
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return drop_unused(data, _UNUSED)


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


def _texts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: ResultBlocks = Field(default_factory=list)
    is_error: bool | None = None

    @field_validator("content", mode="before", json_schema_input_type=Any)
    @classmethod
    def _one_block(cls, content: Any) -> Any:
        return _texts(content)


class ToolReference(_Block):
    """Names a tool that a search found. All tools are in the prompt already."""

    type: Literal["tool_reference"]
    tool_name: Name


class ThinkingBlock(StrictModel):
    """A block of thinking. `signature` is opaque, may be another server's, and is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, exclude=True)


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock

_KINDS: dict[str, type[BaseModel]] = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
}


def _parse(data: Any, kinds: dict[str, type[BaseModel]]) -> Any:
    kind = data.get("type") if isinstance(data, dict) else None
    model = kinds.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"blocks of type {str(kind)[:40]!r} are not supported here; known are "
            f"{', '.join(kinds)}.",
            code="unsupported_parameter",
        )
    return model.model_validate(data)


def _parse_block(data: Any) -> Any:
    return _parse(data, _KINDS)


def _parse_text_block(data: Any) -> Any:
    return _parse(data, {"text": TextBlock})


def _parse_result_block(data: Any) -> Any:
    """Parses a block of a tool's result. A reference to a tool that was found becomes its name."""
    if isinstance(data, dict) and data.get("type") == "tool_reference":
        return TextBlock(type="text", text=ToolReference.model_validate(data).tool_name)
    return _parse_text_block(data)


AnyBlock = Annotated[Block, PlainValidator(_parse_block, json_schema_input_type=Block)]
TextBlockOnly = Annotated[
    TextBlock, PlainValidator(_parse_text_block, json_schema_input_type=TextBlock)
]
Texts = Annotated[list[TextBlockOnly], Field(max_length=MAX_BLOCKS, fail_fast=True)]

ResultBlock = Annotated[
    TextBlock,
    PlainValidator(_parse_result_block, json_schema_input_type=TextBlock | ToolReference),
]
ResultBlocks = Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]

ToolResultBlock.model_rebuild()


class MessageParam(StrictModel):
    """A turn of the conversation. Content that is a string becomes one text block."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[AnyBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]

    @field_validator("content", mode="before", json_schema_input_type=str | list[AnyBlock])
    @classmethod
    def _one_block(cls, content: Any) -> Any:
        return _texts(content)

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> MessageParam:
        allowed = _BLOCKS_OF[self.role]
        for place, block in enumerate(self.content):
            if block.type not in allowed:
                raise RequestError(
                    f"a message of role '{self.role}' cannot have a block of type '{block.type}'.",
                    param=f"content[{place}]",
                    code="invalid_value",
                )
        return self


_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
