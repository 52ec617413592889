"""Tools of the Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from quire.errors import RequestError
from quire.server.chat.custom_tools import custom_tool, grammar_text
from quire.server.http.strict_model import StrictModel, ToolName, drop_unused

MAX_TOOLS = 256
TOOL_SEARCH = "tool_search"
"""The name by which the model knows the tool that finds tools."""
_PATHS: dict[str, Any] = {
    "type": "object",
    "properties": {"paths": {"type": "array", "items": {"type": "string"}}},
    "required": ["paths"],
    "additionalProperties": False,
}
"""Parameters of a tool search that names none."""
_UNSUPPORTED_IN_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}


class FunctionTool(StrictModel):
    """A tool. `strict` null or absent is false."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise RequestError(
                f"tools of type {kind[:40]!r} are not supported; known are {', '.join(_TOOLS)}.",
                code="unsupported_parameter",
            )
        return drop_unused(data, _UNSUPPORTED_IN_TOOL, ("defer_loading",), "tools.")


class CustomFormat(StrictModel):
    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None

    @model_validator(mode="after")
    def _complete(self) -> CustomFormat:
        for name in ("definition", "syntax"):
            if (self.type == "grammar") != (getattr(self, name) is not None):
                raise RequestError(f"a format of type 'grammar', and no other, has {name!r}.", name)
        if self.syntax is not None:
            grammar_text(self.definition or "", self.syntax)
        return self


class CustomTool(StrictModel):
    """A tool whose input is free text, or text that a grammar describes."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return drop_unused(data, _UNSUPPORTED_IN_TOOL, ("defer_loading",), "tools.")

    @property
    def shape(self) -> dict[str, Any]:
        """The function that stands for the tool."""
        format = self.format
        if format is None or format.syntax is None:
            return custom_tool(self.name, self.description)
        return custom_tool(self.name, self.description, format.syntax, format.definition or "")


class ToolSearch(StrictModel):
    """A tool that finds other tools. The client searches, and answers with tools to add."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return TOOL_SEARCH


def _parse_inner_tool(data: Any) -> Any:
    if isinstance(data, dict) and data.get("type") == "custom":
        return CustomTool.model_validate(data)
    return FunctionTool.model_validate(data)


InnerTool = Annotated[
    FunctionTool | CustomTool,
    PlainValidator(_parse_inner_tool, json_schema_input_type=FunctionTool | CustomTool),
]


class NamespaceTool(StrictModel):
    """A group of tools, as Codex sends those of an MCP server.

    The model sees each as `namespace__name`.
    """

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[InnerTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


_TOOLS: dict[str, type[StrictModel]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    "tool_search": ToolSearch,
}


def parse_tool(data: Any) -> Any:
    kind = data.get("type") if isinstance(data, dict) else None
    model = _TOOLS.get(kind, FunctionTool) if isinstance(kind, str) else FunctionTool
    return model.model_validate(data)


Tool = FunctionTool | CustomTool | NamespaceTool | ToolSearch
ToolParam = Annotated[Tool, PlainValidator(parse_tool, json_schema_input_type=Tool)]


def flat_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


ModelTool = FunctionTool | CustomTool | ToolSearch


def model_tools(tools: Sequence[Tool] | None) -> Iterator[tuple[str | None, ModelTool]]:
    """Yields the tools that the model may call, each with its namespace if it is in one."""
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            yield from ((tool.name, inner) for inner in tool.tools)
        else:
            yield None, tool


def tool_shape(tool: ModelTool, namespace: str | None) -> dict[str, Any]:
    """Returns a tool in the shape that chat templates take."""
    if isinstance(tool, CustomTool):
        shape = tool.shape
        shape["function"]["name"] = flat_name(namespace, tool.name)
        return shape
    function: dict[str, Any] = {"name": flat_name(namespace, tool.name)}
    for name in ("description", "parameters", "strict"):
        if getattr(tool, name, None) is not None:
            function[name] = getattr(tool, name)
    if isinstance(tool, ToolSearch):
        function.setdefault("parameters", _PATHS)
    return {"type": "function", "function": function}


def shown_tool(tool: Tool) -> dict[str, Any]:
    """Returns a tool as responses show it."""
    if isinstance(tool, NamespaceTool):
        own = tool.model_dump(exclude_none=True, exclude={"tools"})
        return own | {"tools": [shown_tool(each) for each in tool.tools]}
    if isinstance(tool, FunctionTool):
        empty = {"description": None, "parameters": None, "strict": False}
        return empty | tool.model_dump(exclude_none=True)
    shown: dict[str, Any] = tool.model_dump(exclude_none=True)
    if isinstance(tool, CustomTool):
        shown.setdefault("format", {"type": "text"})
    return shown
