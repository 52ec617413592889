"""<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>: gpt-oss."""

from __future__ import annotations

import re
import string
from collections.abc import Generator, Mapping
from typing import Any

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import NotACallError, Reading

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_HEADER = _NAME | frozenset("=<|> ")
_TO = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]{1,128}?)(?=<|\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>([a-z]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = ("<|start|>", "<|channel|>")
_MARK = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_LONGEST_HEADER = 300


class HarmonyParser(JsonToolParser):
    """Parses messages, whose headers name a channel and a recipient.

    A message to a function is a call. A message to the user, or to an unknown function, is text
    without its marks. Messages in the analysis channel are dropped; the first of them is the
    reasoning, which `think` has split off already.
    """

    name = "gpt_oss"
    starts = (*_HEADS, "to=functions.", *_ENDS, "<|constrain|>", "<|message|>")
    first_chars = "t"  # A header may come without a mark before it: to=f
    marks_text = True
    _has_text = False

    def calls(self) -> Reading:
        mark = self.read_so_far.lstrip()
        if not mark:
            yield from self.expect("to=")
        elif not mark.startswith((*_HEADS, "to=")):
            return
        while (yield from self._message()):
            pass

    def _message(self) -> Generator[None, None, bool]:
        """Reads a header and, if its message is a call or analysis, also the message.

        Returns:
            True if the next header has begun.
        """
        header = yield from self._header()
        to, channel = _TO.search(header), _CHANNEL.search(header)
        if to is not None and to[1] in self.tools:
            yield from self.space()
            if self.char == "{":
                yield from self.arguments(to[1])
                self.end_call()
                return False
            if self.char == "<" or (not self.char and self.stopped):
                self.begin_call(to[1])
                self.emit_arguments("{}")
                self.end_call()
                return False
        elif to is None and channel is not None and channel[1] == "analysis":
            return (yield from self._skip()) in _HEADS
        if self._has_text:
            self._emit_text("\n\n")
        return False

    def _emit_text(self, text: str) -> None:
        super()._emit_text(text)
        self._has_text = self._has_text or bool(text)

    def as_text(self, read: str) -> str:
        return _MARK.sub("", read)

    def _header(self) -> Generator[None, None, str]:
        """Reads the rest of a header, and returns the whole header."""
        header = self.read_so_far
        while not header.endswith("<|message|>"):
            allowed = _NAME if header.endswith(("to=functions.", "to=")) else _HEADER
            if self.char not in allowed or len(header) > _LONGEST_HEADER:
                raise NotACallError
            header += self.char
            yield
        return header

    def _skip(self) -> Generator[None, None, str]:
        """Skips a message, and returns the mark that ends it."""
        text = ""
        while True:
            if not self.char:
                raise NotACallError
            text = (text + self.char)[-len("<|channel|>") :]
            yield
            for mark in (*_ENDS, *_HEADS):
                if text.endswith(mark):
                    self._consumed = [mark]
                    return mark

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            rules.literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            + f" {rules.json(schema)}"
            for name, schema in tools.items()
        )
        between = rules.literal("<|call|><|start|>assistant")
        return f"{call} ({between} {call})*" if parallel else call
