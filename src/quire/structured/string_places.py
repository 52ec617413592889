"""Finds where a document's strings are bounded by their length, and by nothing else.

Within such a string the schema allows the same whatever the text is, until its length is reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from quire.grammar.bounded import resolve, types_of

Json = Any
Nodes = tuple[int, ...]
"""The schemas that may hold at a place, by their numbers; `_ANY` among them: others may as well."""

_ANY = -1
_KNOWN = frozenset(
    {"type", "enum", "const", "properties", "required", "additionalProperties", "minProperties",
     "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
     "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)  # fmt: skip
"""Keywords of a schema whose places are understood."""
_LABELS = frozenset({"$defs", "definitions", "$schema", "$id", "id", "$anchor", "x-guidance"})
_MOST_FOLLOWED = 256
"""Schemas that are looked at for one place."""
_MOST_KEPT = 4096
"""Places whose schemas are kept."""
_OPEN: dict[str, Json] = {}
UNKNOWN: Nodes = (_ANY,)


class Length(NamedTuple):
    """A string's bounds, in characters, both inclusive."""

    least: int
    most: int


class StringPlaces:
    """The places of one schema, as `enforceable` has written it.

    What is not understood is `_ANY`: a place that may hold it has no `length`. `value` and `item`
    belong to one thread.

    names: of all properties that the schema lists. prefix: the most items that it lists.
    """

    def __init__(self, schema: dict[str, Json], names: frozenset[str], prefix: int) -> None:
        self._root = schema
        self._schemas: list[dict[str, Json]] = []
        self._numbers: dict[int, int] = {}
        self._names = names
        self._prefix = prefix
        self._children: dict[tuple[Nodes, str | int | None], Nodes] = {}
        self._lengths: dict[Nodes, Length | None] = {}
        self.root = self._nodes([schema])

    def value(self, parents: Nodes, name: str) -> Nodes:
        """Returns what may hold for an object's property."""
        known = name if name in self._names else None
        return self._child(parents, known)

    def item(self, parents: Nodes, index: int) -> Nodes:
        """Returns what may hold for an array's item."""
        return self._child(parents, min(index, self._prefix))

    def length(self, nodes: Nodes) -> Length | None:
        """Returns the bounds of a string, if they are the only rule for it."""
        if nodes not in self._lengths:
            self._lengths[nodes] = self._length(nodes)
        return self._lengths[nodes]

    def _length(self, nodes: Nodes) -> Length | None:
        found = set[Length | None]()
        for schema in self._taking(nodes, "string"):
            if schema is None or not _understood(schema):
                return None
            values = _values(schema)
            if values is not None:
                if any(isinstance(value, str) for value in values):
                    return None
                continue
            most = schema.get("maxLength")
            found.add(None if most is None else Length(schema.get("minLength", 0), most))
        return found.pop() if len(found) == 1 else None

    def _child(self, parents: Nodes, slot: str | int | None) -> Nodes:
        key = parents, slot
        if key not in self._children:
            if len(self._children) >= _MOST_KEPT:
                self._children.clear()
            self._children[key] = self._nodes(list(self._held(parents, slot)))
        return self._children[key]

    def _held(self, parents: Nodes, slot: str | int | None) -> Iterator[Json]:
        """Yields the schemas of a property (None: one that no schema names) or an item. None: not
        understood."""
        for schema in self._taking(parents, "array" if isinstance(slot, int) else "object"):
            if schema is None or not _understood(schema) or _values(schema) is not None:
                yield None
            elif isinstance(slot, int):
                prefix = schema.get("prefixItems", ())
                yield prefix[slot] if slot < len(prefix) else schema.get("items", True)
            else:
                listed = schema.get("properties", {})
                yield listed[slot] if slot in listed else schema.get("additionalProperties", True)

    def _taking(self, nodes: Nodes, kind: str) -> Iterator[dict[str, Json] | None]:
        """Yields the schemas that allow a kind of value. None: not understood."""
        for node in nodes:
            schema = None if node == _ANY else self._schemas[node]
            types = set() if schema is None else types_of(schema)
            if not types or kind in types:
                yield schema

    def _nodes(self, schemas: list[Json]) -> Nodes:
        """Follows references and options to the schemas that hold."""
        found, left = set[int](), _MOST_FOLLOWED
        while schemas:
            schema = schemas.pop()
            if schema is False:
                continue
            if schema is True:
                schema = _OPEN
            if not isinstance(schema, dict):
                found.add(_ANY)
                continue
            left -= 1
            rules = schema.keys() - _LABELS
            if left < 0:
                return UNKNOWN
            if rules == {"$ref"}:
                target = unquote(schema["$ref"])
                known = target == "#" or target.startswith("#/")
                schemas.append(resolve(self._root, target) if known else None)
            elif rules == {"anyOf"}:
                schemas.extend(schema["anyOf"])
            elif rules == {"allOf"} and len(schema["allOf"]) == 1:
                schemas.extend(schema["allOf"])
            else:
                found.add(self._number(schema))
        return tuple(sorted(found))

    def _number(self, schema: dict[str, Json]) -> int:
        number = self._numbers.setdefault(id(schema), len(self._schemas))
        if number == len(self._schemas):
            self._schemas.append(schema)
        return number


def string_places(schema: dict[str, Json]) -> StringPlaces | None:
    """Returns the places of a schema, or None where no string may be bounded by length."""
    bounded, names, prefix = False, set[str](), 0
    for each in _within(schema):
        bounded = bounded or ("maxLength" in each and "pattern" not in each)
        if isinstance(listed := each.get("properties"), dict):
            names.update(listed)
        if isinstance(items := each.get("prefixItems"), list):
            prefix = max(prefix, len(items))
    return StringPlaces(schema, frozenset(names), prefix) if bounded else None


def _within(value: Json) -> Iterator[dict[str, Json]]:
    """Yields every object of a document, itself included."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)


def _understood(schema: dict[str, Json]) -> bool:
    return schema.keys() <= _KNOWN | _LABELS


def _values(schema: dict[str, Json]) -> list[Json] | None:
    """Returns the only values that a schema allows; None: no such list."""
    if "const" in schema:
        return [schema["const"]]
    listed: list[Json] | None = schema.get("enum")
    return listed
