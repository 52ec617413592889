"""Whether the options of a `oneOf` exclude each other, so far as that can be seen.

If they do, at most one of them ever matches, and `oneOf` asks no more than `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Json = Any
_MOST_COMPARISONS = 20_000
_MOST_STEPS = 16
"""References followed in a row, and properties within properties."""


def disjoint(options: Sequence[Json], root: Json) -> bool:
    """options: schemas of the document `root`, which local references are looked up in. Gives up,
    and says no, after a bounded number of comparisons."""
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
            for name in ("anyOf", "oneOf"):
                options = one.get(name)
                if not isinstance(options, list) or not options:
                    continue
                if all(self.exclude(option, other, depth + 1) for option in options):
                    return True
        if not _types(a) & _types(b):
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None and not values_a & values_b:
            return True
        # Objects with a property that both must have, and that cannot be right for both.
        if _types(a) & _types(b) != {"object"}:
            return False
        return any(
            self.exclude(a["properties"][name], b["properties"][name], depth + 1)
            for name in _names(a)
            if name in set(_names(b))
        )


def _target(schema: Json, root: Json) -> Json:
    """Follows references that stand alone or beside annotations; beside other keywords they only
    narrow the schema further, so what they lead to is looked at alone."""
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
    if given is None:
        return {"null", "boolean", "number", "string", "array", "object"}
    names = given if isinstance(given, list) else [given]
    # An integer is a number, and one option may allow it as the other.
    return {"number" if name == "integer" else str(name) for name in names}


def _values(schema: dict[str, Json]) -> set[str] | None:
    """The only documents that can match, each written in one way; None: no such list."""
    if "const" in schema:
        return {_written(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_written(value) for value in schema["enum"]}
    return None


def _written(value: Json) -> str:
    """1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        pairs = sorted((json.dumps(key), _written(part)) for key, part in value.items())
        return "{" + ",".join(f"{key}:{part}" for key, part in pairs) + "}"
    return json.dumps(value)


def _names(schema: dict[str, Json]) -> list[str]:
    """The properties that are both described and required."""
    described, required = schema.get("properties"), schema.get("required")
    if not isinstance(described, dict) or not isinstance(required, list):
        return []
    return [name for name in required if isinstance(name, str) and name in described]
