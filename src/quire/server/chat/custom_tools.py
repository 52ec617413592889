"""Custom tools: tools whose input is free text, or text that a grammar describes.

Chat templates only know functions. So the model sees a custom tool as a function with one string,
`input`, and answers get the text back out of the arguments.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from quire.errors import GrammarError, RequestError
from quire.grammar.grammar import check_size
from quire.grammar.lark import GrammarText

INPUT = "input"
MAX_DEFINITION = 64 * 1024
"""Most bytes of a grammar."""
_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*(?=\S)')
_ESCAPE = re.compile(r"(?:[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})*")
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def custom_tool(
    name: str,
    description: str | None,
    syntax: Literal["lark", "regex"] | None = None,
    definition: str = "",
) -> dict[str, Any]:
    """Returns the function that stands for a custom tool, in OpenAI's shape.

    Args:
        syntax: the syntax of the grammar of the tool's input; None allows any text.
        definition: the grammar. The model reads it in the description.

    Raises:
        RequestError: the grammar is invalid.
    """
    function: dict[str, Any] = {"name": name, "strict": syntax is not None}
    value: dict[str, Any] = {"type": "string"}
    parts = [description] if description else []
    if syntax is not None:
        value = grammar_text(definition, syntax)
        kind = "Lark grammar" if syntax == "lark" else "regular expression"
        parts.append(f"The text in '{INPUT}' must match this {kind}:\n{definition}")
    if parts:
        function["description"] = "\n\n".join(parts)
    function["parameters"] = {
        "type": "object",
        "properties": {INPUT: value},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {"type": "function", "function": function}


def grammar_text(definition: str, syntax: str) -> GrammarText:
    """Returns the schema of a text that a grammar describes.

    Raises:
        RequestError: the definition is too large, or has a repeat that cannot be enforced. The
            engine finds other errors when it compiles the grammar.
    """
    try:
        check_size(len(definition.encode("utf-8", "surrogatepass")), MAX_DEFINITION)
        return GrammarText(definition, syntax)
    except GrammarError as error:
        raise RequestError(str(error), "definition", code=error.code) from None


def input_arguments(text: str) -> str:
    """Returns the arguments of the function that stands for a custom tool, as JSON text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the text in `input` out of a call's arguments, piece by piece.

    A model without a grammar may write other arguments. They become the input as they are; the only
    string of an object becomes its text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._in_string: bool | None = None
        self._ended = False

    def feed(self, arguments: str) -> str:
        """Returns the text that more of the arguments adds to the input."""
        if self._ended:
            return ""
        self._text += arguments
        if self._in_string is None:
            found = _INPUT.match(self._text)
            if found is not None:
                self._in_string = self._text[found.end()] == '"'
                if self._in_string:
                    self._text = self._text[found.end() + 1 :]
        return self._read_string() if self._in_string else ""

    def finish(self) -> str:
        """Returns the rest of the input, at the end of the call."""
        if self._in_string:
            return ""
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return self._text
        if isinstance(value, dict) and len(value) == 1:
            ((name, inner),) = value.items()
            if isinstance(inner, str):
                return inner.encode("utf-8", "replace").decode()
            if name == INPUT:
                return json.dumps(inner, ensure_ascii=False)
        return self._text

    def _read_string(self) -> str:
        """Decodes the string up to its end, or up to an escape that is not complete."""
        end = 0
        while (end := self._text.find('"', end)) >= 0:
            before = self._text[:end]
            if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
                self._ended = True
                break
            end += 1
        raw = self._text[:end] if self._ended else self._text
        whole = raw
        if not self._ended:
            found = _ESCAPE.match(raw)
            whole = found.group() if found is not None else ""
            if high := _HIGH.search(whole):
                whole = whole[: high.start()]
        self._text = self._text[len(whole) :]
        text: str = json.loads(f'"{whole}"', strict=False)
        # A model may write half of a surrogate pair, which no encoding has.
        return text.encode("utf-8", "replace").decode()
