"""Decides whether the options of a `oneOf` exclude each other.

If they do, at most one of them matches any document, and `oneOf` means the same as `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from quire.errors import GrammarError
from quire.grammar.patterns import contradict, escape, format_rules, rules_of

Json = Any
_MOST_COMPARISONS = 20_000
_MOST_VALUES = 200
"""Most strings of an enumeration to compare with patterns."""
_MOST_STEPS = 16
"""Most references to follow in a row, and deepest nesting of properties to look at."""


def disjoint(options: Sequence[Json], root: Json) -> bool:
    """Returns whether no document matches two of the options, as far as it can be proved.

    It gives up and returns False after a bounded number of comparisons.

    Args:
        options: the schemas in `oneOf`.
        root: the whole schema, in which local references are resolved.
    """
    judge = _Judge(root)
    return all(judge.exclude(a, b, 0) for a, b in combinations(options, 2))


class _Judge:
    def __init__(self, root: Json) -> None:
        self._root = root
        self._left = _MOST_COMPARISONS

    def exclude(self, a: Json, b: Json, depth: int) -> bool:
        self._left -= 1
        if self._left < 0 or depth > _MOST_STEPS:
            return False
        a, b = _target(a, self._root), _target(b, self._root)
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            if any(self.exclude(part, other, depth + 1) for part in _list(one.get("allOf"))):
                return True
            for name in ("anyOf", "oneOf"):
                options = _list(one.get(name))
                if options and all(self.exclude(option, other, depth + 1) for option in options):
                    return True
        types = _types(a) & _types(b)
        if not types:
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None and not values_a & values_b:
            return True
        if types == {"string"}:
            return _other_strings(a, b)
        if types == {"array"} and (_least(a, "minItems") or _least(b, "minItems")):
            items = a.get("items"), b.get("items")
            return all(isinstance(i, dict) for i in items) and self.exclude(*items, depth + 1)
        if types != {"object"}:
            return False
        if _requires_forbidden(a, b) or _requires_forbidden(b, a):
            return True
        # Both require a property that cannot be valid for both.
        return any(
            self.exclude(a["properties"][name], b["properties"][name], depth + 1)
            for name in _names(a)
            if name in set(_names(b))
        )


def _target(schema: Json, root: Json) -> Json:
    """Returns the schema to which a reference leads, or the schema itself without a reference.

    Other keywords next to a reference are ignored, because they only narrow the schema further.
    """
    for _ in range(_MOST_STEPS):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _types(schema: dict[str, Json]) -> set[str]:
    given = schema.get("type")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if given is None and isinstance(listed, list):
        return {_KINDS.get(type(value), "object") for value in listed}
    if given is None:
        return {"null", "boolean", "number", "string", "array", "object"}
    names = [*given] if isinstance(given, list) else [given]
    if schema.get("nullable") is True:
        names.append("null")
    # An integer is a number too, so both types can match the same document.
    return {"number" if name == "integer" else str(name) for name in names}


def _values(schema: dict[str, Json]) -> set[str] | None:
    """Returns the only documents that can match, in normal form, or None if they are not listed."""
    if "const" in schema:
        return {_written(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_written(value) for value in schema["enum"]}
    return None


def _written(value: Json) -> str:
    """Returns a value's normal form. It is equal for 1 and 1.0, but not for 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        pairs = sorted((json.dumps(key), _written(part)) for key, part in value.items())
        return "{" + ",".join(f"{key}:{part}" for key, part in pairs) + "}"
    return json.dumps(value)


_KINDS: dict[type, str] = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string",
    list: "array",
}  # fmt: skip


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _least(schema: dict[str, Json], name: str) -> bool:
    value = schema.get(name)
    return isinstance(value, int | float) and value >= 1


def _other_strings(a: dict[str, Json], b: dict[str, Json]) -> bool:
    """Returns whether no string matches the patterns, formats and values of two schemas."""
    try:
        rules_a, rules_b = _string_rules(a), _string_rules(b)
    except GrammarError:
        return False
    return contradict([*rules_a, *rules_b])


def _string_rules(schema: dict[str, Json]) -> list[str]:
    """Returns patterns that every string of a schema matches."""
    pattern, format = schema.get("pattern"), schema.get("format")
    rules = format_rules(format) if isinstance(format, str) else []
    if isinstance(pattern, str):
        rules += rules_of(pattern, None)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and len(values) <= _MOST_VALUES:
        texts = [escape(value) for value in values if isinstance(value, str)]
        rules.append(f"^(?:{'|'.join(texts)})$")
    return rules


def _requires_forbidden(a: dict[str, Json], b: dict[str, Json]) -> bool:
    """Returns whether objects of `a` require a property that objects of `b` cannot have."""
    needed = {name for name in _list(a.get("required")) if isinstance(name, str)}
    listed = b.get("properties", {})
    if not isinstance(listed, dict):
        return False
    if any(listed.get(name) is False for name in needed):
        return True
    excluded = b.get("not")
    if isinstance(excluded, dict) and excluded.keys() == {"required"}:
        without = _list(excluded["required"])
        if without and all(name in needed for name in without):
            return True
    closed = b.get("additionalProperties") is False and not b.get("patternProperties")
    return closed and bool(needed - listed.keys())


def _names(schema: dict[str, Json]) -> list[str]:
    """Returns the properties that are both described and required."""
    described, required = schema.get("properties"), schema.get("required")
    if not isinstance(described, dict) or not isinstance(required, list):
        return []
    return [name for name in required if isinstance(name, str) and name in described]
