"""Adds bounds to a schema where it has none, so that even a small model finishes its answer.

Numbers get bounds and a last decimal place. Documents of any kind get a maximal depth. Objects that
list properties get no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

EXACT = 2**53
"""Largest bound. Bounds are compared as doubles, which are not exact for larger integers."""
LAST_PLACE = 1e-9
"""Last decimal place of numbers, which are written without an exponent."""
ANY_DEPTH = 6
"""Depth of arrays and objects in a document of any kind."""

Json = Any
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INDEX = re.compile("[0-9]{1,9}")
_ANY = "quire:any-document-"
"""Prefix for the names of added definitions."""


def bound(
    root: dict[str, Json], places: Iterable[Json], *, open_objects: bool, open_numbers: bool
) -> None:
    """Adds bounds to `places`, the schemas of the document `root`, itself among them."""
    schemas = [place for place in places if isinstance(place, dict)]
    combined = _Combined(root)
    for schema in schemas:
        combined.look_at(schema)
    for schema in schemas:
        if not open_numbers:
            _bound_number(schema)
        if id(schema) in combined.found:
            continue
        if not open_objects:
            _close(schema)
        if not open_numbers:
            _bound_any(schema)
    if not open_numbers and any(_names_any(schema) for schema in schemas):
        definitions = {_ANY + str(depth): _any(depth) for depth in range(ANY_DEPTH + 1)}
        root["$defs"] = {**root.get("$defs", {}), **definitions}


def resolve(schema: Json, pointer: str) -> Json:
    """Returns the part of a schema to which a JSON pointer ('#/...') leads, or None."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(name)
        elif isinstance(schema, list) and _INDEX.fullmatch(name) and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def types_of(schema: dict[str, Json]) -> set[str]:
    """Returns the types in the keyword `type`, or an empty set without it."""
    given = schema.get("type", [])
    return set(given if isinstance(given, list) else [given])


def _bound_number(schema: dict[str, Json]) -> None:
    types = types_of(schema)
    numeric = types & {"integer", "number"} or any(name in schema for name in _NUMERIC)
    if not numeric or "enum" in schema or "const" in schema:
        return
    if "exclusiveMinimum" not in schema:
        schema.setdefault("minimum", -EXACT)
    if "exclusiveMaximum" not in schema:
        schema.setdefault("maximum", EXACT)
    if "number" in types or "integer" not in types:
        schema.setdefault("multipleOf", LAST_PLACE)


def _close(schema: dict[str, Json]) -> None:
    """Forbids unlisted properties if the schema lists some."""
    listed = schema.get("properties")
    by_pattern = schema.get("patternProperties")
    if "additionalProperties" in schema or (not listed and not by_pattern):
        return
    unlisted = [name for name in schema.get("required", ()) if name not in (listed or {})]
    if unlisted and by_pattern:
        return
    names = {**(listed or {}), **{name: {} for name in unlisted}}
    if not by_pattern and schema.get("minProperties", 0) > len(names):
        return
    for name in unlisted:
        _bound_any(names[name])
    schema["properties"] = names
    schema["additionalProperties"] = False


def _bound_any(schema: dict[str, Json]) -> None:
    """Limits the depth of documents of any kind: the schema itself, its additional items or its
    additional properties."""
    if not schema:
        schema["$ref"] = _reference(ANY_DEPTH)
        return
    types = types_of(schema)
    if _parts(schema) or "enum" in schema or "const" in schema:
        return
    if "array" in types and "items" not in schema:
        schema["items"] = {"$ref": _reference(ANY_DEPTH - 1)}
    if "object" in types and "additionalProperties" not in schema:
        schema["additionalProperties"] = {"$ref": _reference(ANY_DEPTH - 1)}


def _names_any(schema: dict[str, Json]) -> bool:
    inner = [schema, schema.get("items"), schema.get("additionalProperties")]
    inner += schema.get("properties", {}).values()
    return any(isinstance(s, dict) and _ANY in str(s.get("$ref", "")) for s in inner)


def _reference(depth: int) -> str:
    return f"#/$defs/{_ANY}{depth}"


def _any(depth: int) -> dict[str, Json]:
    number: dict[str, Json] = {"type": "number"}
    _bound_number(number)
    options: list[dict[str, Json]] = [{"type": ["null", "boolean", "string"]}, number]
    if depth:
        inner = {"$ref": _reference(depth - 1)}
        options += [
            {"type": "array", "items": inner},
            {"type": "object", "additionalProperties": inner},
        ]
    return {"anyOf": options}


class _Combined:
    """Finds schemas that apply together with others to the same object.

    They may not forbid unlisted properties, because the others may list them.
    """

    def __init__(self, root: dict[str, Json]) -> None:
        self._root = root
        self.found: set[int] = set()

    def look_at(self, schema: dict[str, Json]) -> None:
        parts = _parts(schema)
        own = any(name in schema for name in ("properties", "patternProperties", "required"))
        if len(parts) + own > 1:
            self._add(schema)

    def _add(self, schema: Json) -> None:
        if not isinstance(schema, dict) or id(schema) in self.found:
            return
        self.found.add(id(schema))
        for part in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
            self._add(part)
        if "$ref" in schema:
            self._add(resolve(self._root, unquote(schema["$ref"])))


def _parts(schema: dict[str, Json]) -> list[dict[str, Json]]:
    """Returns the subschemas that apply to the same document as the schema, except plain rules for
    strings."""
    parts = [part for part in schema.get("allOf", ()) if isinstance(part, dict)]
    parts = [part for part in parts if not part.keys() <= {"pattern", "maxLength"}]
    parts += [{name: schema[name]} for name in ("$ref", "anyOf") if name in schema]
    return parts
