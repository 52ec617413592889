"""The served model's formats of tool calls and reasoning."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import RequestError
from quire.server.args import ServerArgs
from quire.server.parsers.registry import reasoning_format, tool_parser
from quire.server.parsers.stream import ToolParser
from quire.server.parsers.think import ReasoningFormat

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of a model.

    Attributes:
        tool_parser: None where the model's format of tool calls is not known.
        reasoning: None where the model is not known to reason.
        template: text of all of the model's chat templates.
        keep_special: special tokens that the formats use, which must stay in the text.
        error: why the sandbox refuses the chat template, where that keeps it from showing calls.
    """

    tool_parser: type[ToolParser] | None
    reasoning: ReasoningFormat | None
    template: str
    keep_special: frozenset[int]
    error: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, args: ServerArgs) -> ChatFormat:
        if tokenizer is None:
            return cls(None, None, "", frozenset())
        template = "\n".join(tokenizer.chat_templates.values())
        written = error = None
        if tokenizer.chat_templates:
            # Chats are refused where a template is not valid, which the log has told.
            with contextlib.suppress(RequestError):
                traits = tokenizer.traits(tokenizer.template(with_tools=True))
                written, error = traits.call, traits.error
        parser = tool_parser(args.tool_call_parser, written)
        reasoning = reasoning_format(args.reasoning_parser, template)
        marks = () if parser is None else (*parser.starts, *parser.loose, *parser.marks)
        if reasoning is not None:
            marks = (*marks, reasoning.open, reasoning.close)
        # A mark may be made of several tokens.
        added = tokenizer.added_tokens.items() if marks else ()
        ids = (id for text, id in added if any(text in mark for mark in marks))
        kept = frozenset(id for id in ids if id in tokenizer.special_ids)
        return cls(parser, reasoning, template, kept, error)
