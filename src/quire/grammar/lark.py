"""Grammars that make a model call tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from quire.grammar.bounded import resolve
from quire.grammar.grammar import check_size
from quire.grammar.json_text import json_lark
from quire.grammar.patterns import check_repeats

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON separators that templates use."""
_OF_ROOTS = ("x-guidance", "$schema", "$id", "id", "$defs", "definitions")
"""Keywords that are allowed only at a schema's root, or that only references need."""
_QUOTE = '"\\""'
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_SPECIAL = frozenset(r".^$*+?()[]{}|\/")


class GrammarText(dict[str, Any]):
    """Schema of a string whose text must match a grammar.

    Args:
        definition: the grammar, or a regular expression in Rust's syntax.
        syntax: "lark" or "regex".

    Attributes:
        lark: the grammar in Lark.

    Raises:
        GrammarError: the regular expression cannot be enforced.
    """

    def __init__(self, definition: str, syntax: str) -> None:
        super().__init__(type="string")
        self.lark = definition
        if syntax == "regex":
            check_repeats(definition)
            self.lark = f"start: /{_between_slashes(definition)}/"


class Rules:
    """Collects the rules of a grammar and names them.

    Args:
        added: maps the text of tokens outside the ordinary vocabulary to their ids; a grammar must
            name them by id.
    """

    def __init__(self, added: Mapping[str, int], template: str = "") -> None:
        self.template = template
        self.lines: list[str] = []
        self._added = added
        self._copied = 0  # bytes of definitions, which each property has for itself
        names = sorted(map(re.escape, added), key=len, reverse=True)
        self._split = re.compile("({})".format("|".join(names))) if names else None

    def literal(self, text: str) -> str:
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(
            f"<[{self._added[part]}]>" if part in self._added else _quoted(part)
            for part in parts
            if part
        )

    def json(self, schema: Mapping[str, Any]) -> str:
        """Adds a rule for the documents of a schema, written as templates write JSON."""
        if isinstance(schema, GrammarText):
            return self.add(f"{_QUOTE} {self._nested(json_lark(schema.lark))} {_QUOTE}")
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and len(properties) == 1:
            ((name, inner),) = properties.items()
            if isinstance(inner, GrammarText):
                begin = self.literal(f"{{{json.dumps(name)}: ")
                return self.add(f'{begin} {self.json(inner)} "}}"')
        options = {**_SEPARATORS, **schema.get("x-guidance", {})}
        return self.schema({**schema, "x-guidance": options})

    def schema(self, schema: Mapping[str, Any] | bool) -> str:
        """Adds a rule for the documents of a schema, which is not rewritten."""
        # `msgspec` is used because `json.dumps` takes six times as long and tools have many
        # schemas.
        return self.add(f"%json {msgspec.json.encode(schema).decode()}")

    def property(self, schema: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Returns the schema of a property, with copies of all definitions that it refers to.

        Raises:
            GrammarError: the copies of all properties together are too large.
        """
        value = schema["properties"][key]
        if isinstance(value, GrammarText):
            return value
        if not isinstance(value, Mapping):
            value = {} if value else {"not": {}}
        names: dict[str, str] = {}
        alone: dict[str, Any] = _renamed(value, names)
        if "x-guidance" in schema:
            alone["x-guidance"] = schema["x-guidance"]
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):  # a definition may refer to further ones
            for pointer in list(names)[len(definitions) :]:
                target = resolve(schema, unquote(pointer))
                if pointer == "#":
                    target = {name: part for name, part in schema.items() if name not in _OF_ROOTS}
                definitions[names[pointer]] = _renamed(target, names)
        if definitions:
            alone["$defs"] = definitions
            self._copied += len(msgspec.json.encode(definitions))
            check_size(self._copied)
        return alone

    def members(
        self,
        schema: Mapping[str, Any],
        begin: Callable[[str], str],
        separator: str,
        value: Callable[[Rules, Mapping[str, Any]], str],
    ) -> str:
        """Adds rules of the properties in their order, each at most once; returns an expression.

        The rules are built from the last property: `first` and `more` are the continuations where
        no property, and where some, have been written.

        Args:
            begin: returns the text before a value, given its name.
            value: returns an expression of a value, given its schema.
        """
        required = frozenset(schema.get("required", ()))
        first = more = '""'
        for key in reversed(schema.get("properties", {})):
            inner = value(self, self.property(schema, key))
            pair = f"{self.literal(begin(key))} {inner}"
            begun, going = f"{pair} {more}", f"{self.literal(separator)} {pair} {more}"
            if key not in required:
                begun, going = f"{begun} | {first}", f"{going} | {more}"
            first, more = self.add(begun), self.add(going)
        return first

    def bare_string(self, schema: Mapping[str, Any], end: str) -> str:
        """Returns an expression for a string without quotes or escapes, followed by `end`."""
        if isinstance(schema, GrammarText):
            return f"{self._nested(schema.lark)} {self.literal(end)}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is None:
            return self.add_until(end)
        return f"{self.texts([str(item) for item in values])} {self.literal(end)}"

    def texts(self, texts: Iterable[str]) -> str:
        """Adds a rule that matches any of the texts, and returns its name."""
        plain: list[str] = []
        others: list[str] = []
        for text in texts:
            named = not text or (self._split is not None and self._split.search(text))
            (others if named else plain).append(text)
        choices = [self.literal(text) for text in others]
        if plain:
            # One terminal for all texts, because the parser has no room for thousands of rules.
            choices.append(f"TEXTS_{len(self.lines)}")
            self.lines.append(f"{choices[-1]}: {' | '.join(map(_quoted, plain))}")
        return self.any_of(choices)

    def any_of(self, choices: Iterable[str]) -> str:
        return self.add(" | ".join(choices))

    def add(self, body: str) -> str:
        """Adds a rule, and returns its name."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def regex(self, pattern: str) -> str:
        return self.add(f"/{_between_slashes(pattern)}/")

    def _nested(self, grammar: str) -> str:
        """Adds a rule for the texts of another grammar."""
        check_size(len(grammar.encode("utf-8", "surrogatepass")))
        return self.add(f"%lark {{\n{grammar}\n}}")

    def add_text(self, without: Collection[str], first: str = "") -> str:
        """Adds a terminal for any text that neither contains one of `without` nor begins with a
        character of `first`."""
        marks = [_escaped(text) for text in without if text not in self._added]
        barred = [f"(?s:.*)({'|'.join(marks)})(?s:.*)"] if marks else []
        barred += [f"\\s*{_escaped(char)}(?s:.*)" for char in first]
        body = " & ".join(["/(?s:.+)/", *(f"~/{pattern}/" for pattern in barred)])
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def optional_call(
        self,
        call: str,
        starts: Collection[str],
        first: str,
        answer: str = "",
        must_answer: bool = False,
    ) -> str:
        """Returns an expression for any text, or for text followed by `call`.

        If no special token starts a call, or text begins with `answer`, the expression allows
        either text or a call. Otherwise the grammar could not tell where the text ends.

        Args:
            must_answer: all text begins with `answer`.
        """
        text = self.add_text(starts, first)
        if must_answer:
            return f"{answer} {text} | {call}"
        if answer:
            return f"({answer})? {text} | {call}"
        if first or any(start not in self._added for start in starts):
            return f"{text} | {call}"
        return f"{text}? {call}? | {text}"

    def add_until(self, end: str) -> str:
        """Adds a rule for any text up to the first `end`, and for `end` itself."""
        token = self._split.search(end) if self._split is not None else None
        if token is not None:
            # No expression matches an added token, so the text ends there.
            at = token.start()
            return self.add(f"/(?s:.*){_escaped(end[:at])}/ {self.literal(end[at:])}")
        name = f"until_{len(self.lines)}"
        self.lines.append(f"{name}[suffix={_quoted(end)}]: /(?s:.*)/")
        return name

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.lines]) + "\n"


def _between_slashes(pattern: str) -> str:
    """Escapes the slashes of a regular expression, unless they already are escaped."""
    return _SLASH.sub(lambda found: found[1] or "\\/", pattern)


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    """Returns a schema whose references lead to definitions, with names by pointer in `names`."""
    if isinstance(schema, list):
        return [_renamed(part, names) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {key: _renamed(part, names) for key, part in schema.items()}
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/")):
        out["$ref"] = f"#/$defs/{names.setdefault(pointer, str(len(names)))}"
    return out


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Escapes text for a regular expression between slashes."""
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)
