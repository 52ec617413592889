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
    """The formats in which a model writes tool calls and reasoning.

    Attributes:
        tool_parser: parser of its tool calls; None if their format is unknown.
        reasoning: format of its reasoning; None if it is not known to reason.
        template: the text of all its chat templates.
        keep_special: ids of special tokens in the formats' marks, which must stay in the text.
        error: why the sandbox could not render a call with the chat template; None if it could.
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
        shows_tools = False
        if tokenizer.chat_templates:
            # An invalid template only makes chats fail. `ServerState` logs the reason.
            with contextlib.suppress(RequestError):
                traits = tokenizer.traits(tokenizer.template(with_tools=True))
                written, error = traits.call, traits.error
                shows_tools = traits.shows_tools
        parser = tool_parser(args.tool_call_parser, written, template if shows_tools else "")
        reasoning = reasoning_format(args.reasoning_parser, template)
        marks = () if parser is None else (*parser.starts, *parser.lenient_starts, *parser.marks)
        if reasoning is not None:
            marks = (*marks, reasoning.open, reasoning.close)
        # A mark may consist of several tokens, so any special token inside a mark is kept.
        added = tokenizer.added_tokens.items() if marks else ()
        ids = (id for text, id in added if any(text in mark for mark in marks))
        kept = frozenset(id for id in ids if id in tokenizer.special_ids)
        return cls(parser, reasoning, template, kept, error)
