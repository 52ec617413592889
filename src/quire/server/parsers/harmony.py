"""<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>: gpt-oss."""

from __future__ import annotations

import re
import string
from collections.abc import Generator, Mapping
from typing import Any

from quire.server.parsers.grammar import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import NotACallError, Reading

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_HEADER = _NAME | frozenset("=<|> ")
_TO = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,128}?)(?=<|\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>([a-z]+)")
_CHANNELS = ("analysis", "commentary", "final")
_LONGEST_HEADER = 300


class HarmonyParser(JsonToolParser):
    """Parses messages, each with a header that names its channel and whom it is for.

    Messages to functions are calls. The marks around others are dropped, and with them all of the
    analysis, of which the first message is the reasoning (see `think`).
    """

    name = "gpt_oss"
    starts = ("<|channel|>", "<|start|>assistant", "to=functions.", "<|end|>", "<|call|>")
    marks = ("<|start|>", "<|constrain|>", "<|message|>")
    marks_text = True
    _spoke = False

    def calls(self) -> Reading:
        if "".join(self._held).lstrip().startswith(("<|end|>", "<|call|>")):
            return
        header = yield from self._header()
        to, channel = _TO.search(header), _CHANNEL.search(header)
        if to is not None:
            yield from self.space()
            yield from self.arguments(to[1])
            self.end()
        elif channel is None or channel[1] not in _CHANNELS:
            raise NotACallError
        elif channel[1] == "analysis":
            yield from self._skip("<|end|>")
        elif self._spoke:
            self._give("\n\n")

    def _give(self, text: str) -> None:
        super()._give(text)
        self._spoke = self._spoke or bool(text)

    def _header(self) -> Generator[None, None, str]:
        """Reads the rest of a header; returns all of it."""
        header = "".join(self._held)
        while not header.endswith("<|message|>"):
            allowed = _NAME if header.endswith("to=functions.") else _HEADER
            if self.char not in allowed or len(header) > _LONGEST_HEADER:
                raise NotACallError
            header += self.char
            yield
        return header

    def _skip(self, end: str) -> Reading:
        tail = ""
        while tail != end:
            if not self.char:
                raise NotACallError
            tail = (tail + self.char)[-len(end) :]
            yield

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            rules.literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            + f" {rules.json(schema)}"
            for name, schema in tools.items()
        )
        between = rules.literal("<|call|><|start|>assistant")
        return f"{call} ({between} {call})*" if parallel else call
