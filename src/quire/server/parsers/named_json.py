"""Calls as a name between marks and then JSON: Kimi K2, DeepSeek V3, Functionary, Solar."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import NotACallError, Reading

_NAME = frozenset(string.ascii_letters + string.digits + "_-.:")
_ID = string.ascii_lowercase + string.digits
_INDEX = re.compile(r":[0-9]+$")


class NamedJsonParser(JsonToolParser):
    """Parses a sequence of calls, with or without marks around the whole sequence.

    Attributes:
        section, section_end: marks around all calls; empty for formats without them. Models may
            leave out the first.
        other_section_ends: other marks that models write at the end of a section.
        call_begin: mark before a name.
        middle: mark between the name and its arguments.
        call_end: mark after the arguments.
        between: text between two calls.
        numbers_calls: a name ends in a colon and the call's number.
    """

    section: ClassVar[str] = ""
    section_end: ClassVar[str] = ""
    other_section_ends: ClassVar[tuple[str, ...]] = ()
    call_begin: ClassVar[str]
    middle: ClassVar[str]
    call_end: ClassVar[str]
    between: ClassVar[str] = ""
    numbers_calls: ClassVar[bool] = False

    def calls(self) -> Reading:
        if not self.read_so_far.endswith(self.call_begin):
            yield from self.space()
            yield from self.expect(self.call_begin)
        while True:
            yield from self._read_call()
            if not (yield from self._has_next()):
                return

    def _read_call(self) -> Reading:
        name = yield from self._name()
        if self.middle[0] not in " \n":
            yield from self.space()
        yield from self.expect(self.middle)
        yield from self.space()
        yield from self.arguments(name)
        self.end_call()
        yield from self.space()

    def _has_next(self) -> Generator[None, None, bool]:
        """Reads the marks after a call; returns whether another call follows in the section.

        Models may leave out the mark that ends a call.
        """
        end = self.call_end.lstrip()
        if not self.section:
            if self.char == end[0]:
                yield from self.expect(end)
            return False
        while self.char:
            mark = yield from self.one_of(
                end, self.call_begin, self.section_end, *self.other_section_ends
            )
            if mark != end:
                return mark == self.call_begin
            yield from self.space()
        return False

    def _name(self) -> Generator[None, None, str]:
        letters = []
        while self.char in _NAME:
            letters.append(self.char)
            yield
        name = "".join(letters)
        if self.numbers_calls:
            name = _INDEX.sub("", name).removeprefix("functions.")
        if name not in self.tools:
            raise NotACallError
        return name

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        prefix, number = ("functions.", '":" /[0-9]{1,3}/') if cls.numbers_calls else ("", "")
        calls = []
        for name, schema in tools.items():
            begin = cls.name_rule(rules, prefix + name)
            middle, end = rules.literal(cls.middle), rules.literal(cls.call_end)
            calls.append(f"{begin} {number} {middle} {rules.json(schema)} {end}")
        call = rules.any_of(calls)
        more = f"({rules.literal(cls.between)} {call})*" if parallel else ""
        return f"{rules.literal(cls.section)} {call} {more} {rules.literal(cls.section_end)}"

    @classmethod
    def name_rule(cls, rules: Rules, name: str) -> str:
        """Returns a rule for the mark before a name and for the name."""
        return rules.literal(cls.call_begin + name)


class KimiK2Parser(NamedJsonParser):
    """<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a
    section."""

    name = "kimi_k2"
    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_begin, middle = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    call_end = "<|tool_call_end|>"
    numbers_calls = True
    other_section_ends = ("<|tool_call_section_end|>",)
    starts = (section,)
    lenient_starts = ("<|tool_call_section_begin|>", call_begin)
    marks = (section_end, *other_section_ends, call_begin, middle, call_end)


class DeepSeekV31Parser(NamedJsonParser):
    """<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜> in a section: DeepSeek V3.1."""

    name = "deepseek_v31"
    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call_begin, middle = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    call_end = "<｜tool▁call▁end｜>"
    starts = (section,)
    lenient_starts = (call_begin,)
    marks = (section_end, call_begin, middle, call_end)


class DeepSeekV3Parser(NamedJsonParser):
    """The same with a type before the name and JSON in a block of code: DeepSeek V3 and R1."""

    name = "deepseek_v3"
    section, section_end = DeepSeekV31Parser.section, DeepSeekV31Parser.section_end
    call_begin = f"{DeepSeekV31Parser.call_begin}function{DeepSeekV31Parser.middle}"
    middle = "\n```json\n"
    call_end = f"\n```{DeepSeekV31Parser.call_end}"
    between = "\n"
    starts = (section,)
    lenient_starts = (call_begin,)
    marks = DeepSeekV31Parser.marks


class FunctionaryParser(NamedJsonParser):
    """<function=f>{...}</function>: Functionary 3.1."""

    name = "functionary"
    call_begin, middle, call_end = "<function=", ">", "</function>"
    starts = (call_begin,)


class SolarParser(NamedJsonParser):
    """<|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|> in a
    section: Solar Open."""

    name = "solar"
    section, section_end = "<|tool_calls|>", "<|calls|>"
    call_begin, middle = "<|tool_call:begin|>", "<|tool_call:args|>"
    call_end = "<|tool_call:end|>"
    name_mark: ClassVar[str] = "<|tool_call:name|>"
    """Mark between a call's id and its name."""
    starts = (section,)
    lenient_starts = (call_begin,)
    answer = "<|content|>"
    text_marks = ("<|begin|>assistant", answer, "<|end|>")
    marks_text = True
    marks = (section_end, call_begin, name_mark, middle, call_end)

    def _name(self) -> Generator[None, None, str]:
        while self.char in _NAME:
            yield
        yield from self.expect(self.name_mark)
        return (yield from super()._name())

    def new_id(self) -> str:
        """Returns ten letters and digits, as the chat template tells the model to write."""
        return "".join(secrets.choice(_ID) for _ in range(10))

    @classmethod
    def name_rule(cls, rules: Rules, name: str) -> str:
        begin, mark = rules.literal(cls.call_begin), rules.literal(cls.name_mark + name)
        return f"{begin} /[a-z0-9]{{10}}/ {mark}"


class FunctionaryV32Parser(JsonToolParser):
    """>>>f and {...} on the next line: Functionary 3.2.

    The prompt ends with the first mark, so a completion begins with a name. The name "all" begins
    text.
    """

    name = "functionary_v32"
    starts = (">>>",)
    answer = "all\n"
    marks_text = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], enforced: bool = False) -> None:
        super().__init__(tools, enforced)
        self.began_with_mark = True
        self._reading = self.calls()

    def calls(self) -> Reading:
        name = ""
        while self.char != "\n":
            name += self.char
            if not self.char or not any(each.startswith(name) for each in ("all", *self.tools)):
                raise NotACallError
            yield
        yield
        if name != "all":
            yield from self.space()
            yield from self.arguments(name)
            self.end_call()

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            f"{rules.literal(name)} {rules.json(schema)}"
            for name, schema in ((f"{name}\n", schema) for name, schema in tools.items())
        )
        return f'{call} ("{cls.starts[0]}" {call})*' if parallel else call
