"""Body of `POST /v1/responses`. Fields that are not listed here are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, field_validator, model_validator

from quire.errors import RequestError
from quire.sampling_params import RESPONSES
from quire.server.apis.responses.items import MAX_ITEMS, InputItem
from quire.server.apis.responses.tools import MAX_TOOLS, ToolParam
from quire.server.apis.sampling import sampling_model
from quire.server.context.hints import decline, refuses_hints
from quire.server.http.strict_model import (
    INT32_MAX,
    LogitBias,
    Metadata,
    Name,
    ServiceTier,
    StrictModel,
    TemplateKwargs,
    drop_unused,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

# Fields of OpenAI's API that are not implemented, with the values that mean "not used".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "client_metadata": (),
    "background_options": ({}, {"completion_window": "soonest"}),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory",),
}
_HINTS = frozenset(
    {"client_metadata", "context_management", "prompt_cache_options", "prompt_cache_retention"}
)
_HOSTED = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools that OpenAI runs itself. They are never offered to the model."""
_UNSUPPORTED_IN_REASONING: dict[str, tuple[Any, ...]] = {
    "context": ("auto",),
    # There is no summary beside the reasoning itself, which "auto" leaves open.
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}


class NamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _parse_tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return choice
        raise RequestError("it must be none, auto, required, or an object.")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return NamedTool.model_validate(choice)
    if kind == "allowed_tools":
        return AllowedTools.model_validate(choice)
    raise RequestError(
        f"choices of type {str(kind)[:40]!r} are not supported; known are function, custom "
        "and allowed_tools.",
        code="unsupported_parameter",
    )


ToolChoiceParam = Annotated[
    str | NamedTool | AllowedTools,
    PlainValidator(
        _parse_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    ),
]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")] | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        given = {"name", "description", "json_schema", "strict"} & self.model_fields_set
        if self.type != "json_schema" and given:
            raise RequestError(f"a format of type {self.type!r} has no other fields.")
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError(
                "a format of type 'json_schema' needs a 'schema'.",
                param="schema",
                code="missing_required_parameter",
            )
        return self


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        hints = ("generate_summary", "summary")
        return drop_unused(data, _UNSUPPORTED_IN_REASONING, hints, "reasoning.")


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool = False


class PromptFields(StrictModel):
    """The fields that make up the prompt: all that counting its tokens needs."""

    model: Name | None = None
    input: Annotated[
        list[InputItem], Field(max_length=MAX_ITEMS, default_factory=list, fail_fast=True)
    ]
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Name | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tool_choice: ToolChoiceParam | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return drop_unused(data, _UNSUPPORTED, _HINTS)

    @field_validator("tools", mode="before", json_schema_input_type=list[ToolParam] | None)
    @classmethod
    def _without_hosted(cls, tools: Any) -> Any:
        """Drops hosted tools, which are hints."""
        if not isinstance(tools, list) or refuses_hints():
            return tools
        kept = []
        for tool in tools:
            kind = tool.get("type") if isinstance(tool, dict) else None
            hosted = kind == "tool_search" and tool.get("execution") != "client"
            if isinstance(kind, str) and (hosted or kind in _HOSTED):
                decline(f"tools.{kind}")
            else:
                kept.append(tool)
        return kept

    @field_validator("input", mode="before", json_schema_input_type=str | list[InputItem])
    @classmethod
    def _one_message(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "message", "role": "user", "content": value}]
        return value

    @model_validator(mode="after")
    def _something_to_answer(self) -> PromptFields:
        if not self.input and self.previous_response_id is None and self.instructions is None:
            raise RequestError(
                "one of 'input', 'instructions' and 'previous_response_id' is needed.",
                param="input",
                code="missing_required_parameter",
            )
        return self

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort


class CompactRequest(PromptFields):
    """Body of `POST /v1/responses/compact`."""

    prompt_cache_key: Name | None = None
    service_tier: ServiceTier | None = None


_DeclaredFields: Any = sampling_model(RESPONSES)


class CreateRequest(PromptFields, _DeclaredFields):  # type: ignore[misc]
    """Body of `POST /v1/responses`.

    `user`, `safety_identifier` and `prompt_cache_key` are identifiers: echoed, not used (the prefix
    cache needs no key, and there is one server to route to). Sampling fields that OpenAI does not
    have are those of the other routes.
    """

    background: bool | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    user: Name | None = None

    cache_salt: Name | None = None
    logit_bias: LogitBias | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    stop: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None

    @field_validator("include")
    @classmethod
    def _includable(cls, include: list[str] | None) -> list[str] | None:
        for name in include or ():
            if name not in (LOGPROBS, ENCRYPTED):
                raise RequestError(
                    f"{name[:100]!r} is not supported; known are {LOGPROBS!r} and {ENCRYPTED!r}.",
                    code="unsupported_parameter",
                )
        return include

    @field_validator("stop", mode="before", json_schema_input_type=list[str] | str | None)
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _consistent(self) -> CreateRequest:
        if self.background and self.store is False:
            raise RequestError(
                "'background' needs store=true: the response is fetched later.", param="background"
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "'stream_options' is only allowed with stream=true.", param="stream_options"
            )
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise RequestError(
                f"'top_logprobs' needs {LOGPROBS!r} in 'include'.", param="top_logprobs"
            )
        return self
