"""Keywords of schemas: annotations, keywords that are not enforced, and misspelled keywords.

The specification says that unknown keywords and formats are ignored. A word that looks like a
misspelled keyword is refused all the same, because its rule would be lost silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Json = Any
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "$comment", "discriminator",
     # OpenAPI's, editors' and generators'
     "externalDocs", "xml", "propertyOrdering", "markdownDescription", "enumNames",
     "enumDescriptions", "markdownEnumDescriptions", "deprecationMessage", "errorMessage",
     "defaultSnippets", "doNotSuggest", "suggestSortText", "tsType"}
)  # fmt: skip
NOT_ENFORCED = frozenset(
    {"if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems",
     "unevaluatedProperties", "contentSchema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
     "$recursiveAnchor", "$vocabulary",
     # draft 3
     "extends", "disallow", "divisibleBy",
     # Ajv's
     "formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum",
     "patternRequired", "instanceof", "typeof", "regexp", "prohibited", "anyRequired",
     "oneRequired", "allRequired", "deepProperties", "deepRequired", "uniqueItemProperties",
     "$merge", "$patch"}
)  # fmt: skip
"""Keywords with rules that cannot be enforced."""

_SCHEMA = (dict, bool)
_VALUES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties",
         "minContains", "maxContains", "minimum", "maximum", "multipleOf"), (int, float)
    ),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (int, float, bool)),
    **dict.fromkeys(("enum", "required", "allOf", "anyOf", "oneOf", "prefixItems"), (list,)),
    **dict.fromkeys(("pattern", "format"), (str,)),
    **dict.fromkeys(("uniqueItems", "nullable"), (bool,)),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependencies", "dependentRequired",
         "dependentSchemas"), (dict,)
    ),
    **dict.fromkeys(
        ("additionalProperties", "propertyNames", "not", "if", "then", "else", "contains",
         "additionalItems", "unevaluatedItems", "unevaluatedProperties"), _SCHEMA
    ),
    "items": (*_SCHEMA, list),
    "type": (str, list),
    "const": (object,),
    "$ref": (str,),
}  # fmt: skip
"""Types of values for each keyword with a rule."""
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_LETTERS = re.compile("[^a-z0-9]")
_DIGITS = re.compile("[0-9]")
_SHORT, _LONG = 4, 10
"""Fewest letters of a word in which one wrong letter, or two, count as a misspelling."""


def closest_keyword(name: str, value: Json) -> str | None:
    """Returns the keyword of which `name` is a misspelling, or None. The value must fit it."""
    for keyword, kinds in _VALUES.items():
        if not isinstance(value, kinds) or not is_misspelling(name, keyword):
            continue
        types = value if isinstance(value, list) else [value]
        if keyword == "type" and not all(isinstance(t, str) and t in _TYPES for t in types):
            continue
        if keyword == "$ref" and not str(value).startswith("#"):
            continue
        return keyword
    return None


def closest_word(name: str, known: Iterable[str]) -> str | None:
    """Returns the known word of which `name` is a misspelling, or None. Digits must be equal."""
    letters, digits = _DIGITS.sub("", name), _DIGITS.findall(name)
    for word in known:
        if digits == _DIGITS.findall(word) and is_misspelling(letters, _DIGITS.sub("", word)):
            return word
    return None


def is_misspelling(name: str, word: str) -> bool:
    """Returns whether two words differ only in case and punctuation, or in one letter (two in long
    words)."""
    if _letters(name) == _letters(word):
        return True
    most = 0 if len(word) < _SHORT else 2 if len(word) >= _LONG else 1
    if len(name) == len(word) == _SHORT and sorted(name) != sorted(word):
        return False  # 'when' is another word, not a misspelled 'then'
    return abs(len(name) - len(word)) <= most and _distance(name, word) <= most


def _letters(word: str) -> str:
    return _LETTERS.sub("", word.lower())


def _distance(a: str, b: str) -> int:
    """Returns the Damerau-Levenshtein distance: fewest insertions, deletions, substitutions and
    swaps of neighbours that turn `a` into `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, before = before, row
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
