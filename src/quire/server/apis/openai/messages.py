"""Messages and tools of `/v1/chat/completions`, as clients may send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from quire.errors import RequestError
from quire.features.call import PromptPart
from quire.server.chat.custom_tools import custom_tool, grammar_text, input_arguments
from quire.server.chat.dialogue import ToolChoice, call_text, is_json_object
from quire.server.chat.prompt_parts import add_part
from quire.server.errors import ApiError, from_validation
from quire.server.http.strict_model import Name, StrictModel, ToolName, drop_unused

MAX_CALLS = 1024

Model = TypeVar("Model", bound=BaseModel)

_ROLES_WITH_IMAGES = ("user", "tool", "function")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_UNSUPPORTED_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "refusal": ("",),
}


# Where prompts are cached anyway, asking for it changes nothing.
_UNUSED_IN_PART: dict[str, tuple[Any, ...]] = {
    "cache_control": tuple(
        {"type": "ephemeral", **ttl} for ttl in ({}, {"ttl": "5m"}, {"ttl": "1h"})
    )
}


class TextPartParam(StrictModel):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        return drop_unused(data, _UNUSED_IN_PART)


class ImageUrl(StrictModel):
    """An image: a data URI, or an http address of a host that the server may ask."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePartParam(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        return drop_unused(data, _UNUSED_IN_PART)

    @field_validator("image_url", mode="before", json_schema_input_type=ImageUrl | str)
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class VideoUrl(StrictModel):
    """A video: a data URI, or an http address of a host that the server may ask."""

    url: str


class VideoPartParam(StrictModel):
    type: Literal["video_url"]
    video_url: VideoUrl

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        return drop_unused(data, _UNUSED_IN_PART)


_PARTS: dict[str, type[BaseModel]] = {
    "text": TextPartParam,
    "image_url": ImagePartParam,
    "video_url": VideoPartParam,
}


def parse_part(data: Any) -> Any:
    """Parses a part of a message's content by its type."""
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        return TextPartParam.model_validate(data)
    model = _PARTS.get(data["type"])
    if model is None:
        raise RequestError(
            f"parts of type {data['type'][:40]!r} are not supported, only text, images and videos "
            "are.",
            code="unsupported_parameter",
        )
    return model.model_validate(data)


ContentPart = Annotated[
    TextPartParam | ImagePartParam | VideoPartParam,
    PlainValidator(
        parse_part, json_schema_input_type=TextPartParam | ImagePartParam | VideoPartParam
    ),
]


class CalledFunction(StrictModel):
    """A called function. `arguments`: the text of a JSON object; empty is one without members.

    Other text is what an answer that was cut short had of it (see `generation.conversation`).
    """

    name: Name
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, arguments: str) -> str:
        return arguments or "{}"


_TOOL_TYPES = ("function", "custom")


def _check_type(data: Any, what: str) -> None:
    """Checks that `data` has a known type, and the field of that type."""
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        return
    if kind not in _TOOL_TYPES:
        raise RequestError(
            f"{what} of type {kind[:40]!r} are not supported, only functions and custom tools are.",
            code="unsupported_parameter",
        )
    if data.get(kind) is None:
        raise RequestError(
            f"{what} of type {kind!r} need '{kind}'.", kind, code="missing_required_parameter"
        )
    other = next(
        (name for name in _TOOL_TYPES if name != kind and data.get(name) is not None), None
    )
    if other is not None:
        raise RequestError(f"{what} of type {kind!r} have no '{other}'.", other)


class CalledCustomTool(StrictModel):
    name: Name
    input: str


class ToolCallParam(StrictModel):
    id: Name
    type: str
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        _check_type(data, "calls")
        return data

    @property
    def name(self) -> str:
        called = self.function or self.custom
        return called.name if called is not None else ""

    @property
    def shape(self) -> dict[str, Any]:
        """The call as chat templates take it: that of a custom tool is a function's."""
        if self.function is not None:
            called = {"name": self.name, "arguments": self.function.arguments}
        else:
            text = self.custom.input if self.custom is not None else ""
            called = {"name": self.name, "arguments": input_arguments(text)}
        return {"id": self.id, "type": "function", "function": called}


class ChatMessageParam(StrictModel):
    """A chat message.

    `developer` is OpenAI's newer name of `system`. Role `function` and `function_call` are its
    older names of a tool and its call. `reasoning` is another name of `reasoning_content`.
    """

    role: str
    content: Annotated[list[ContentPart], Field(max_length=1024, fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: (
        Annotated[list[ToolCallParam], Field(max_length=MAX_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: Name | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        data = drop_unused(data, _UNSUPPORTED_IN_MESSAGE)
        if isinstance(data, dict) and data.get("reasoning") is not None:
            data = {**data}
            reasoning = data.pop("reasoning")
            if data.get("reasoning_content") not in (None, reasoning):
                raise RequestError(
                    "'reasoning' and 'reasoning_content' are two names of one field, with two "
                    "values.",
                    "reasoning",
                )
            data["reasoning_content"] = reasoning
        return data

    @field_validator(
        "content", mode="before", json_schema_input_type=str | list[ContentPart] | None
    )
    @classmethod
    def _one_part(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role not in _ROLES:
            raise RequestError(
                f"role {role[:40]!r} is not supported; known are {', '.join(_ROLES)}."
            )
        return role

    @model_validator(mode="after")
    def _as_the_role_has_it(self) -> ChatMessageParam:
        for place, part in enumerate(self.content or ()):
            if not isinstance(part, TextPartParam) and self.role not in _ROLES_WITH_IMAGES:
                raise RequestError(
                    f"a message of role {self.role!r} has no images or videos; those of "
                    f"{', '.join(_ROLES_WITH_IMAGES)} may have some.",
                    f"content[{place}]",
                )
        for name in ("tool_calls", "function_call", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise RequestError(f"only messages of the assistant have '{name}'.", name)
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise RequestError(
                "a message of a tool names its call in 'tool_call_id', and no other has one.",
                "tool_call_id",
            )
        if self.tool_calls and self.function_call:
            raise RequestError("it has 'tool_calls' or a 'function_call', not both.", "tool_calls")
        if self.role == "function" and self.name is None:
            raise RequestError(
                "a message of a function has its 'name'.",
                "name",
                code="missing_required_parameter",
            )
        if self.content is None and not (
            self.tool_calls or self.function_call or self.reasoning_content
        ):
            raise RequestError(
                "Missing required parameter: 'content'.",
                "content",
                code="missing_required_parameter",
            )
        return self

    @property
    def text(self) -> str:
        """The content without images and videos."""
        return "".join(part.text for part in self.content or () if isinstance(part, TextPartParam))

    def marked_text(self, parts: list[PromptPart], param: str) -> str:
        """Returns the content, with a mark for each image and video.

        Args:
            parts: gets the images and videos.
            param: the message's field, for errors.
        """
        text = ""
        for place, part in enumerate(self.content or ()):
            where = f"{param}.content[{place}]"
            if isinstance(part, TextPartParam):
                text += part.text
            elif isinstance(part, VideoPartParam):
                text += add_part(parts, PromptPart("video", part.video_url.url, where))
            else:
                image = part.image_url
                text += add_part(
                    parts, PromptPart("image", image.url, where, image.detail or "auto")
                )
        return text


class FunctionDefinition(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarDefinition(StrictModel):
    definition: str
    syntax: Literal["lark", "regex"]

    @model_validator(mode="after")
    def _enforceable(self) -> GrammarDefinition:
        grammar_text(self.definition, self.syntax)
        return self


class ChatCustomFormat(StrictModel):
    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None

    @model_validator(mode="after")
    def _complete(self) -> ChatCustomFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise RequestError("a format of type 'grammar', and no other, has a 'grammar'.")
        return self


class CustomDefinition(StrictModel):
    name: ToolName
    description: str | None = None
    format: ChatCustomFormat | None = None

    @property
    def shape(self) -> dict[str, Any]:
        grammar = self.format.grammar if self.format is not None else None
        if grammar is None:
            return custom_tool(self.name, self.description)
        return custom_tool(self.name, self.description, grammar.syntax, grammar.definition)


class ChatToolParam(StrictModel):
    type: str
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        _check_type(data, "tools")
        return data

    @property
    def shape(self) -> dict[str, Any]:
        if self.custom is not None:
            return self.custom.shape
        function = self.function.model_dump(exclude_none=True) if self.function else {}
        return {"type": "function", "function": function}


class FunctionName(StrictModel):
    name: Name


FunctionChoice = Literal["none", "auto"] | FunctionName
"""`function_call` of a request."""


class _NamedTool(StrictModel):
    type: Literal["function", "custom"]
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        _check_type(data, "choices")
        return data

    @property
    def name(self) -> str:
        chosen = self.function or self.custom
        return chosen.name if chosen is not None else ""


class _AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=256, fail_fast=True)]


class _Allowed(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoiceParam = Literal["auto", "none", "required"] | _NamedTool | _Allowed


def parse_tool_choice(value: Any) -> Any:
    """Parses `tool_choice` in OpenAI's forms to a `ToolChoice`."""
    if value is None or isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value in ("auto", "none", "required"):
            return ToolChoice(value)  # type: ignore[arg-type]
        raise RequestError("it must be 'auto', 'none', 'required', or an object.")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in _TOOL_TYPES:
        return ToolChoice.named(_read(_NamedTool, value).name)
    if kind == "allowed_tools":
        allowed = _read(_Allowed, value).allowed_tools
        return ToolChoice(allowed.mode, tuple(tool.name for tool in allowed.tools))
    raise RequestError(
        f"choices of type {str(kind)[:40]!r} are not supported; known are function, custom "
        "and allowed_tools."
    )


def _read(model: type[Model], value: Any) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = from_validation(error)
        raise RequestError(str(found), found.param, found.code) from None


def template_messages(
    messages: Sequence[ChatMessageParam], parts: list[PromptPart]
) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them, with marks for images.

    A call whose arguments were cut short becomes text. A tool's result needs no call, which may
    have been trimmed.

    Args:
        parts: gets the images.

    Raises:
        RequestError: a function's result without a call.
    """
    called: dict[str, str] = {}
    functions: dict[str, str] = {}
    out = []
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        text = message.marked_text(parts, f"messages[{place}]")
        entry: dict[str, Any] = {"role": role, "content": text}
        if message.name is not None:
            entry["name"] = message.name
        if message.reasoning_content:
            entry["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            _add_calls(entry, [call.shape for call in message.tool_calls])
            called.update((call.id, call.name) for call in message.tool_calls)
        if message.function_call is not None:
            function = message.function_call.model_dump()
            _add_calls(entry, [{"id": f"call_{place}", "type": "function", "function": function}])
            functions[message.function_call.name] = f"call_{place}"
        if message.role == "function":
            entry["role"] = "tool"
            entry["tool_call_id"] = functions.pop(message.name or "", None)
            if entry["tool_call_id"] is None:
                param = f"messages[{place}].name"
                raise RequestError(f"'{param}': no message before calls this function.", param)
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                entry.setdefault("name", called[message.tool_call_id])
        out.append(entry)
    return out


def _add_calls(entry: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    whole = [call for call in calls if is_json_object(call["function"]["arguments"])]
    if whole:
        entry["tool_calls"] = whole
    for call in calls:
        if call not in whole:
            text = call_text(call["function"]["name"], call["function"]["arguments"])
            entry["content"] = f"{entry['content']}\n\n{text}" if entry["content"] else text


def check_continuation(
    messages: Sequence[ChatMessageParam],
    continue_final_message: bool | None,
    add_generation_prompt: bool | None,
) -> None:
    """Checks that the last message can be continued where that is asked for.

    Raises:
        ApiError: 400.
    """
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise ApiError(
            400,
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
        )
    if messages[-1].role != "assistant":
        raise ApiError(
            400,
            "'continue_final_message' needs a last message of the assistant.",
            param="continue_final_message",
        )
