"""Turns a request's structured output into a grammar for llguidance, without a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from quire.errors import GrammarError
from quire.grammar.json_schema import enforceable
from quire.grammar.patterns import check_repeats
from quire.sampling_params import StructuredOutputsParams

MAX_BYTES = 512 * 1024
"""Size limit of a schema, expression or grammar, or of all choices together."""
MAX_REGEX_BYTES = 64 * 1024
MAX_GBNF_BYTES = 16 * 1024
MAX_CHOICES = 10_000

# White space is limited to two spaces or an indented line, because models that may write any amount
# of it sometimes never stop.
MOST_INDENT = 32
"""Most blanks and tabs behind a line break between the tokens of a document."""
_SPACE = rf"[\x20\x09]{{1,2}}|\x0D?\x0A[\x20\x09]{{0,{MOST_INDENT}}}"
# \uXXXX is not allowed, because the same name could then be written in a way the grammar misses.
_ESCAPES = 'nrbtf\\"'

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
# Comments, strings, expressions and special tokens come first, because a "%json" in them is no
# directive. Unclosed ones match too, so that the search stays linear in the text.
_LARK_TOKEN = re.compile(
    r"""(?://|\#)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?|<[^>\s]*|(?P<schema>%json\b)"""
    r"""|\[[^\[\]]*\b(?P<attribute>temperature|stop)\s*=""",
)


def compilable(params: StructuredOutputsParams) -> str:
    """Returns the grammar in the form that llguidance takes.

    Raises:
        GrammarError: the input is malformed or too large, or has a rule that cannot be enforced.
            `pointer` leads to the keyword in a schema.
    """
    for name, build in _KINDS.items():
        value = getattr(params, name)
        if value or isinstance(value, str):
            try:
                return build(value)
            except RecursionError:
                raise GrammarError("It is nested too deeply.", code="grammar_too_large") from None
    raise GrammarError("nothing is asked for")


def _check_size(text: str, limit: int = MAX_BYTES) -> None:
    check_size(len(text.encode("utf-8", "surrogatepass")), limit)


def check_size(size: int, limit: int = MAX_BYTES) -> None:
    """Raises GrammarError if `size`, in bytes, exceeds `limit`."""
    if size > limit:
        raise GrammarError(
            f"It has {size} bytes, at most {limit} are allowed.", code="grammar_too_large"
        )


def _json(schema: str) -> str:
    _check_size(schema)
    try:
        parsed = json.loads(schema, parse_constant=_no_constant)
    except ValueError as error:
        raise GrammarError(f"The schema is not valid JSON: {error}.", code="invalid_json") from None
    return _of_schema(parsed)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_with_options(enforceable(schema))))


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with llguidance's options: its own separators, Quire's escapes and
    spaces."""
    own = schema.get("x-guidance", {})
    options = {name: own[name] for name in ("item_separator", "key_separator") if name in own}
    options["json_allowed_escapes"] = _ESCAPES
    if own.get("whitespace_flexible", True):
        options["whitespace_pattern"] = _SPACE
    else:
        options["whitespace_flexible"] = False
    return {**schema, "x-guidance": options}


def _json_object(_: bool) -> str:
    return _of_schema({"type": "object"})


def _regex(pattern: str) -> str:
    _check_size(pattern, MAX_REGEX_BYTES)
    try:
        check_repeats(pattern)
    except GrammarError as error:
        raise GrammarError(f"The regular expression cannot be enforced: {error}.") from None
    return LLMatcher.grammar_from_regex(pattern)


def _choice(choices: tuple[str, ...]) -> str:
    if len(choices) > MAX_CHOICES:
        raise GrammarError(
            f"There are {len(choices)} choices, at most {MAX_CHOICES} are allowed.",
            code="grammar_too_large",
        )
    if any(not isinstance(choice, str) for choice in choices):
        raise GrammarError("The choices must be strings.")
    # All choices form one terminal, which becomes an automaton. In a grammar rule each alternative
    # would take an item of the parser's row, which is limited to 2000. A terminal cannot match an
    # empty text, so an empty choice is added separately.
    texts = [json.dumps(choice, ensure_ascii=False) for choice in choices if choice]
    start = "start: " + ("CHOICE" if texts else '""') + ("?" if texts and "" in choices else "")
    lark = start + ("\nCHOICE: " + " | ".join(texts) if texts else "")
    _check_size(lark)
    return LLMatcher.grammar_from_lark(lark)


def _grammar(text: str) -> str:
    _check_size(text)
    return LLMatcher.grammar_from_lark(_checked_lark(as_lark(text)))


def as_lark(text: str) -> str:
    """Returns a grammar in Lark, given one in Lark or GBNF. Raises GrammarError."""
    if not _GBNF_RULE.search(text):
        return text
    _check_size(text, MAX_GBNF_BYTES)
    try:
        lark: str = any_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarError(f"The grammar is not valid GBNF: {error}") from None
    except RecursionError:
        raise GrammarError("It is nested too deeply.", code="grammar_too_large") from None
    return lark


def _checked_lark(text: str) -> str:
    """Returns a Lark grammar in which embedded schemas are made enforceable."""
    out, done = [], 0
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    at = 0
    while (found := _LARK_TOKEN.search(text, at)) is not None:
        at = found.end()
        if found["attribute"]:
            raise GrammarError(f"A rule's attribute '{found['attribute']}' cannot be enforced.")
        if not found["schema"]:
            continue
        start = at + len(text[at:]) - len(text[at:].lstrip())
        try:
            schema, end = decoder.raw_decode(text, start)
        except ValueError as error:
            raise GrammarError(f"The schema after '%json' is not valid JSON: {error}.") from None
        prepared = json.dumps(_with_options(enforceable(schema)))
        out += [text[done:start], prepared]
        done = at = end
    return "".join([*out, text[done:]])


_KINDS: dict[str, Callable[[Any], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
