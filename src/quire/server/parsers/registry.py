"""The formats by name, and detection of the format that a chat template writes."""

from __future__ import annotations

import json
from typing import Any

from quire.server.parsers.gemma import FunctionGemmaParser, GemmaParser
from quire.server.parsers.harmony import HarmonyParser
from quire.server.parsers.json_formats import (
    ApertusParser,
    AprielParser,
    CommandParser,
    CommandRParser,
    GigaChat3Parser,
    GigaChatParser,
    GraniteParser,
    HermesParser,
    Llama3JsonParser,
    MiniMaxM1Parser,
    MistralParser,
    NemotronParser,
    Phi4Parser,
)
from quire.server.parsers.minimax_m3 import MiniMaxM3Parser
from quire.server.parsers.named_json import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    FunctionaryParser,
    FunctionaryV32Parser,
    KimiK2Parser,
    SolarParser,
)
from quire.server.parsers.pythonic import Lfm2Parser, PythonicParser
from quire.server.parsers.qwen3_xml import (
    Glm45Parser,
    MiniMaxM2Parser,
    Qwen3XmlParser,
    SeedOssParser,
)
from quire.server.parsers.stream import CallArguments, CallBegin, CallEnd, Text, ToolParser
from quire.server.parsers.tagged_calls import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    HunyuanParser,
    KimiK3Parser,
    MiniCpm5Parser,
)
from quire.server.parsers.think import ReasoningFormat
from quire.text.template_traits import PROBED_CALL, PROBED_TOOL

# The first parser that reads a template's call is chosen. Formats with more marks come first,
# because a simpler format's parser can read a part of theirs.
_TOOL_PARSERS: tuple[type[ToolParser], ...] = (
    MiniMaxM3Parser,
    KimiK3Parser,
    DeepSeekV32Parser,
    DeepSeekV4Parser,
    HunyuanParser,
    Qwen3XmlParser,
    SeedOssParser,
    MiniMaxM2Parser,
    MiniCpm5Parser,
    Glm45Parser,
    HermesParser,
    MistralParser,
    KimiK2Parser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    SolarParser,
    CommandParser,
    CommandRParser,
    ApertusParser,
    NemotronParser,
    MiniMaxM1Parser,
    AprielParser,
    Lfm2Parser,
    GraniteParser,
    Phi4Parser,
    GigaChatParser,
    GigaChat3Parser,
    FunctionaryParser,
    FunctionaryV32Parser,
    GemmaParser,
    FunctionGemmaParser,
    HarmonyParser,
    PythonicParser,
    Llama3JsonParser,
)
_REASONING = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("hunyuan", "<think:opensource>", "</think:opensource>", hint="<think{}>"),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer="<|open|>response<|sep|>",
        hint="<|end_of_msg|>",
    ),
    ReasoningFormat(
        "solar",
        "<|think|>",
        "<|end|>",
        turn="<|begin|>assistant",
        answer="<|content|>",
        hint="<|begin|>assistant<|think|>",
    ),
    ReasoningFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("command", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>"),
    ReasoningFormat(
        "gpt_oss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        turn="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        hint="<|channel|>analysis<|message|>",
    ),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", implicit_open=True),
)

TOOL_PARSERS = {parser.name: parser for parser in _TOOL_PARSERS}
REASONING_FORMATS = {format.name: format for format in _REASONING}


def tool_parser(name: str, written: str | None, template: str = "") -> type[ToolParser] | None:
    """Returns the parser of this name; None if there is none.

    Args:
        name: "auto" selects the first parser that can read the text in `written`.
        written: the chat template's text for the call `template_traits.PROBED_CALL`; None if the
            template does not show calls.
        template: text of a template that shows tools. Without `written`, "auto" selects the parser
            whose hints it has.
    """
    if name != "auto":
        return TOOL_PARSERS.get(name)
    if written is None:
        hinted = (each for each in _TOOL_PARSERS if each.hints)
        return next((each for each in hinted if all(h in template for h in each.hints)), None)
    return next((parser for parser in _TOOL_PARSERS if _reads_back(parser, written)), None)


def _reads_back(parser: type[ToolParser], written: str) -> bool:
    """Tells whether a parser reads exactly the probed call, and leaves no mark in the text."""
    function = PROBED_TOOL["function"]
    reader = parser({function["name"]: function["parameters"]}, enforced=True)
    parts = reader.feed(written) + reader.finish()
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    text = "".join(part.text for part in parts if isinstance(part, Text))
    whole = any(isinstance(part, CallEnd) for part in parts)
    marks = (*parser.starts, *parser.marks)
    if names != [function["name"]] or not whole or any(mark in text for mark in marks):
        return False
    return _decode(arguments) == PROBED_CALL and not any(mark in text for mark in _MARKS)


_MARKS = ("<|/tool_call|>", "</tool_call>")
"""Closing tags that tell otherwise identical formats apart."""


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Returns the format of this name; None if there is none.

    Args:
        name: "auto" selects the first format whose hint or closing mark is in the template.
        template: the text of the chat templates.
    """
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((each for each in _REASONING if (each.hint or each.close) in template), None)
