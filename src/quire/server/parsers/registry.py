"""Registry of the formats by name, and of the templates that teach them."""

from __future__ import annotations

from quire.server.parsers.hermes import HermesParser
from quire.server.parsers.llama3_json import Llama3JsonParser
from quire.server.parsers.mistral import MistralParser
from quire.server.parsers.pythonic import PythonicParser
from quire.server.parsers.qwen3_xml import Qwen3XmlParser
from quire.server.parsers.stream import ToolParser
from quire.server.parsers.think import ReasoningFormat

# The first whose mark is in the template is taken: XML within <tool_call> before JSON there.
_TOOL_PARSERS: tuple[type[ToolParser], ...] = (
    Qwen3XmlParser,
    HermesParser,
    MistralParser,
    PythonicParser,
    Llama3JsonParser,
)
_REASONING = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", implied=True),
)

TOOL_PARSERS = {parser.name: parser for parser in _TOOL_PARSERS}
REASONING_FORMATS = {format.name: format for format in _REASONING}


def tool_parser(name: str, template: str) -> type[ToolParser] | None:
    """Returns the parser of this name; "auto" returns the one that fits the template, if any
    does."""
    if name != "auto":
        return TOOL_PARSERS.get(name)
    return next((parser for parser in _TOOL_PARSERS if parser.in_template in template), None)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Returns the format of this name; "auto" returns the one that the template mentions, if
    any."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((format for format in _REASONING if format.close in template), None)
