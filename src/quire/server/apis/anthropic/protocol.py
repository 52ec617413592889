"""Content blocks of Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, field_validator, model_validator

from quire.errors import RequestError
from quire.sampling_params import ANTHROPIC
from quire.server.apis.sampling import sampling_model
from quire.server.chat.prompt_parts import StoredFile
from quire.server.chat.sealed import is_sealed, unseal
from quire.server.context.hints import decline, refuses_hints
from quire.server.http.strict_model import INT32_MAX, Name, StrictModel, drop_unused

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


class ImageSource(StrictModel):
    """The data of an image: base64, an http address, or a file of `/v1/files`."""

    type: Literal["base64", "url", "file"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None
    file_id: Name | None = None

    @model_validator(mode="after")
    def _complete(self) -> ImageSource:
        needed = _SOURCE_FIELDS[self.type]
        for name in ("media_type", "data", "url", "file_id"):
            if (getattr(self, name) is not None) != (name in needed):
                has = "needs" if name in needed else "has no"
                raise RequestError(f"a source of type '{self.type}' {has} '{name}'.", name)
        return self

    @property
    def source(self) -> str | StoredFile:
        if self.file_id is not None:
            return StoredFile(self.file_id)
        return self.url or f"data:{self.media_type};base64,{self.data}"


_SOURCE_FIELDS = {"base64": ("media_type", "data"), "url": ("url",), "file": ("file_id",)}


class ImageBlock(_Block):
    type: Literal["image"]
    source: ImageSource


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
    """A block of thinking.

    `signature` may be another server's, and is not checked. That of a block whose thinking was
    omitted has the thinking.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, exclude=True)

    @model_validator(mode="after")
    def _unsealed(self) -> ThinkingBlock:
        if not self.thinking and self.signature is not None and is_sealed(self.signature):
            self.thinking = unseal("reasoning", self.signature, "signature")
        return self


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock

_KINDS: dict[str, type[BaseModel]] = {
    "text": TextBlock,
    "image": ImageBlock,
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
    return _parse(data, {"text": TextBlock, "image": ImageBlock})


AnyBlock = Annotated[Block, PlainValidator(_parse_block, json_schema_input_type=Block)]
TextBlockOnly = Annotated[
    TextBlock, PlainValidator(_parse_text_block, json_schema_input_type=TextBlock)
]
Texts = Annotated[list[TextBlockOnly], Field(max_length=MAX_BLOCKS, fail_fast=True)]

ResultBlock = Annotated[
    TextBlock | ImageBlock,
    PlainValidator(
        _parse_result_block, json_schema_input_type=TextBlock | ImageBlock | ToolReference
    ),
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
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


# `/v1/messages` as clients may send it. Whatever is not listed here is refused by name.

MAX_MESSAGES = 100_000
MAX_TOOLS = 256

# Fields of Anthropic's API that are not implemented, with the values that mean "not used".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
_HINTS = frozenset({"context_management"})
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that Claude Code writes for Anthropic. It changes with every
prompt, so that no prefix behind it would be found in the cache."""
_UNSUPPORTED_IN_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    # Arguments are always streamed as they come.
    "eager_input_streaming": (True, False),
    "input_examples": ([],),
}


class ToolParam(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise RequestError(
                f"tools of type {kind[:40]!r} are not supported, only custom ones are.",
                code="unsupported_parameter",
            )
        return drop_unused(data, _UNSUPPORTED_IN_TOOL, ("defer_loading",), "tools.")


class ToolChoiceConfig(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoiceConfig:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError("type 'tool' needs a 'name', and no other type has one.", "name")
        if self.type == "none" and self.disable_parallel_tool_use is not None:
            raise RequestError(
                "type 'none' has no 'disable_parallel_tool_use'.", "disable_parallel_tool_use"
            )
        return self


class ThinkingConfig(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1024, le=INT32_MAX)
    display: Literal["omitted"] | None = None

    @field_validator("display", mode="before")
    @classmethod
    def _no_summary(cls, display: Any) -> Any:
        if display in ("summarized", "updates"):
            if not refuses_hints():
                decline("thinking.display")
                return None
            raise RequestError(
                f"{display!r} is not supported: thinking is returned whole, or with 'omitted' not "
                "at all.",
                code="unsupported_parameter",
            )
        return display

    @model_validator(mode="after")
    def _budget(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise RequestError(
                "type 'enabled' needs 'budget_tokens', and no other type has them.",
                "budget_tokens",
            )
        if self.type == "disabled" and self.display is not None:
            raise RequestError("type 'disabled' has no 'display'.", "display")
        return self


class MessageMetadata(StrictModel):
    """Holds an opaque identifier, which is accepted and not used."""

    user_id: Name | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def _parse_system(system: Any) -> Any:
    return [{"type": "text", "text": system}] if isinstance(system, str) else system


class CountTokensRequest(StrictModel):
    """The fields that make up the prompt: all that counting its tokens needs."""

    model: Name
    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: Texts | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceConfig | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return drop_unused(data, _UNSUPPORTED, _HINTS)

    @field_validator("system", mode="before", json_schema_input_type=str | Texts | None)
    @classmethod
    def _one_block(cls, system: Any) -> Any:
        return _parse_system(system)

    @field_validator("system", mode="after")
    @classmethod
    def _without_billing(cls, system: list[TextBlock] | None) -> list[TextBlock] | None:
        if system and system[0].text.startswith(_BILLING) and not refuses_hints():
            decline("system.x-anthropic-billing-header")
            return system[1:]
        return system

    @property
    def budget(self) -> int | None:
        return None if self.thinking is None else self.thinking.budget_tokens


_DeclaredFields: Any = sampling_model(ANTHROPIC)


class MessagesRequest(CountTokensRequest, _DeclaredFields):  # type: ignore[misc]
    max_tokens: int = Field(ge=1, le=INT32_MAX)
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    # Anthropic's API has no -1.
    top_k: int | None = Field(None, ge=0, le=INT32_MAX)

    @model_validator(mode="after")
    def _budget_fits(self) -> MessagesRequest:
        if self.budget is not None and self.budget >= self.max_tokens:
            raise RequestError(
                f"'thinking.budget_tokens' ({self.budget}) must be less than max_tokens "
                f"({self.max_tokens}).",
                param="thinking.budget_tokens",
            )
        return self
