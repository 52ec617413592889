"""[f(city="Oslo", days=2), g()]: calls in Python's syntax, which Llama 3.2 and 4 write."""

from __future__ import annotations

import ast
import json
import string
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.stream import NotACallError, Reading, ToolParser

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """Parses calls in Python's syntax.

    They begin with a bracket at the start of the answer, or with <|python_start|>. Arguments are
    keywords with literal values. Each argument is emitted when it is complete.
    """

    name = "pythonic"
    starts = ("<|python_start|>",)
    first_chars = "["
    close: ClassVar[str] = "<|python_end|>"
    marks = (close,)
    by_property = True

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.expect("[")
        yield from self.comma_separated(self._call)
        yield from self.expect("]")
        yield from self.space()
        if self.char == "<":
            yield from self.expect(self.close)

    def _call(self) -> Reading:
        name = yield from self._name()
        yield from self.expect("(")
        yield from self.space()
        keys: set[str] = set()
        while self.char != ")":
            key = yield from self._name()
            yield from self.space()
            yield from self.expect("=")
            if not key or key in keys:
                raise NotACallError
            value = json_text((yield from self._literal()))
            if not keys:
                self.begin_call(name)
            self.emit_arguments(f"{', ' if keys else '{'}{json.dumps(key)}: {value}")
            keys.add(key)
            if self.char == ",":
                yield
                yield from self.space()
        if not keys:
            self.begin_call(name)
        self.emit_arguments("}" if keys else "{}")
        yield
        self.end_call()

    def _name(self) -> Generator[None, None, str]:
        letters = []
        while self.char in _NAME:
            letters.append(self.char)
            yield
        return "".join(letters)

    def _literal(self) -> Generator[None, None, str]:
        """Reads the text up to the comma or parenthesis that ends it."""
        chars, depth, quote = [], 0, ""
        while True:
            char = self.char
            if char == "":
                raise NotACallError
            if quote:
                if char == "\\":
                    chars.append(char)
                    yield
                    if not self.char:
                        raise NotACallError
                elif char == quote:
                    quote = ""
                elif char < " ":  # Models write raw line breaks in strings.
                    chars.append(json.dumps(char)[1:-1])
                    yield
                    continue
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif depth == 0 and char in "),":
                return "".join(chars)
            elif char in ")]}":
                depth -= 1
            chars.append(self.char)
            yield

    @classmethod
    def _keywords(cls, rules: Rules, schema: Mapping[str, Any]) -> str:
        return rules.members(schema, lambda key: f"{key}=", ", ", Rules.json)

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            f'{rules.literal(f"{name}(")} {cls._keywords(rules, schema)} ")"'
            for name, schema in tools.items()
        )
        more = f'(", " {call})*' if parallel else ""
        opened, closed = ("", "") if cls.first_chars else (cls.starts[0], cls.close)
        return f'{rules.literal(opened)} "[" {call} {more} "]" {rules.literal(closed)}'


def json_text(literal: str) -> str:
    """Returns a Python literal as JSON text.

    Raises:
        NotACallError: `literal` is not a literal.
    """
    try:
        # Python warns about unknown escapes, which only helps the author of a program.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = _evaluate(ast.parse(literal.strip(), mode="eval").body)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACallError from None
    return text


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_evaluate(item) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = zip(keys, values, strict=True)
            return {str(key.value): _evaluate(value) for key, value in pairs}  # type: ignore[union-attr]
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
    raise ValueError("not a literal")


class Lfm2Parser(PythonicParser):
    """<|tool_call_start|>[f(city="Oslo")]<|tool_call_end|>: LFM2."""

    name = "lfm2"
    starts = ("<|tool_call_start|>",)
    first_chars = ""
    close = "<|tool_call_end|>"
    marks = (close,)
    hints = ("List of tools: ", "ns.system_prompt")

    @classmethod
    def write(cls, calls: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
        entries = (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
            for name, values in calls
        )
        return f"{cls.starts[0]}[{', '.join(entries)}]{cls.close}"
