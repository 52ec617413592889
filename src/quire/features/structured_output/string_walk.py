"""Finds where a document's strings are bounded by their length, and by nothing else.

Within such a string the schema allows the same whatever the text is, until its length is reached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from quire.arrays import Int32
from quire.features.structured_output.mask_memory import GrammarUse, MaskMemory
from quire.features.structured_output.pattern_tails import PatternTail, pattern_tail
from quire.features.structured_output.string_tables import StringTables, whole_characters
from quire.grammar.bounded import resolve, types_of
from quire.grammar.grammar import MOST_INDENT

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
_MOST_BYTES = 256
"""No token has so many bytes."""
_MOST_TEXT = 64
"""Bytes of text behind a state, from which on it gets a number."""
_OPEN: dict[str, Json] = {}
UNKNOWN: Nodes = (_ANY,)


Slot = str | tuple[int, int, int]
"""The last name in an object; the items, at most those of the prefix, and how many must and may
follow in an array."""

UNBOUNDED = 2**62
"""The most characters of a string without a limit."""


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
        self._tails: dict[Nodes, PatternTail | None] = {}
        self._slots: dict[tuple[Nodes, str | int], Slot | None] = {}
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
            most = schema.get("maxLength", UNBOUNDED)
            found.add(Length(schema.get("minLength", 0), most))
        return found.pop() if len(found) == 1 else None

    def tail(self, nodes: Nodes) -> PatternTail | None:
        """Returns the end of a string's pattern, if the pattern is the only rule for it."""
        if nodes not in self._tails:
            self._tails[nodes] = self._tail(nodes)
        return self._tails[nodes]

    def _tail(self, nodes: Nodes) -> PatternTail | None:
        schemas = list(self._taking(nodes, "string"))
        schema = schemas[0] if len(schemas) == 1 else None
        if schema is None or schema.keys() - _LABELS != {"type", "pattern"}:
            return None
        return pattern_tail(schema["pattern"])

    def slot(self, parents: Nodes, place: str | int) -> Slot | None:
        """Returns what an object or array allows behind a value, whatever the value is.

        Places with the same slot allow the same. None: the value's text may decide what comes.

        Args:
            place: The value's name or its index.
        """
        key = parents, place
        if key not in self._slots:
            if len(self._slots) >= _MOST_KEPT:
                self._slots.clear()
            self._slots[key] = self._slot(parents, place)
        return self._slots[key]

    def _slot(self, parents: Nodes, place: str | int) -> Slot | None:
        schemas = list(self._taking(parents, "array" if isinstance(place, int) else "object"))
        schema = schemas[0] if len(schemas) == 1 else None
        if schema is None or not _understood(schema) or _values(schema) is not None:
            return None
        if isinstance(place, int):
            count, prefix = place + 1, len(schema.get("prefixItems", ()))
            lacking = schema.get("minItems", 0) - count
            room = schema.get("maxItems", count + _MOST_BYTES) - count
            # A token cannot reach as many items as it has bytes.
            return (min(count, prefix), min(max(lacking, 0), _MOST_BYTES), min(room, _MOST_BYTES))
        # Names come in the schema's order, so the last one tells which may follow.
        known = place in schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        counted = "minProperties" in schema or "maxProperties" in schema
        return place if known and closed and not counted else None

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


def string_places(schema: dict[str, Json]) -> StringPlaces:
    """Returns the places of a schema."""
    names, prefix = set[str](), 0
    for each in _within(schema):
        if isinstance(listed := each.get("properties"), dict):
            names.update(listed)
        if isinstance(items := each.get("prefixItems"), list):
            prefix = max(prefix, len(items))
    return StringPlaces(schema, frozenset(names), prefix)


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


# Follows where a request stands in its JSON document, as far as strings are concerned.

_NEXT = re.compile(rb'[{}\[\],"]')
_WITHIN = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


class _Frame:
    """An open object or array. nodes: its schemas. name: of the property whose value comes or is
    there, None before a name. index: of the item that comes or is there; -1: an object. state: the
    memory's behind its brace."""

    __slots__ = ("index", "name", "nodes", "state")

    def __init__(self, nodes: Nodes, index: int, state: int) -> None:
        self.nodes = nodes
        self.index = index
        self.state = state
        self.name: str | None = None


class StringWalk:
    """Follows a document that its grammar allows, token by token.

    It is up to date where that matters: in a string that is bounded by its length alone or has a
    `PatternTail`, and where the former may come next. Elsewhere it reads tokens when there is time
    (`settle`), unless masks are remembered. Where a token leads into such a string from elsewhere,
    that is seen a token late. Belongs to one thread.

    With a memory it also knows its place: a state, and the text behind that. The place leaves out
    what decides nothing: the text of strings that only their length bounds, values that are
    complete (`StringPlaces.slot`), white space that is complete, and tabs for blanks.

    Args:
        memory: Masks of documents; None: none are remembered.
        use: The grammar's, in the memory.

    Attributes:
        left: Characters left in the string at the text's end, if only its length bounds it, or in
            the tail of its pattern. -1: elsewhere, within a character, or before the string's least
            length.
        base: Tokens allowed there with as many characters left, or with more, once known.
    """

    def __init__(
        self,
        places: StringPlaces,
        tables: StringTables,
        memory: MaskMemory | None = None,
        use: GrammarUse | None = None,
    ) -> None:
        self._memory, self._use = memory, use or GrammarUse(-1)
        self._state, self._text, self._last = self._use.root, b"", -1
        self._blanks = b""
        self.left = -1
        self.base: Int32 | None = None
        self.tables = tables
        self._places = places
        self._frames: list[_Frame] = []
        self._in_string = self._in_name = False
        self._length: Length | None = None
        self._pattern: PatternTail | None = None
        self._content = b""
        self._opened = self._state
        self._count = 0
        self._name = self._tail = b""
        self._near = places.length(places.root) is not None
        self._unread: list[int] = []

    @property
    def short(self) -> bool:
        """Whether the text ends in a string whose mask can be put together from tables."""
        # A pattern that is full forces the string's end.
        return (self._pattern is not None) <= self.left <= self.tables.limit

    @property
    def patterned(self) -> bool:
        """Whether the text ends in a string with a `PatternTail`."""
        return self._pattern is not None

    def take(self, tokens: Sequence[int]) -> None:
        """Takes tokens that have come."""
        if self._near or self._memory is not None:
            self._advance(tokens)
        else:
            self._unread.extend(tokens)

    def recall(self, into: Int32) -> bool:
        """Writes the mask of the text's end, int32 [words], if it is known."""
        if self.short:
            if self.base is None and self._memory is not None:
                self.base = self._memory.base(self._opened, self.left)
            if self.base is None:
                return False
            self.tables.mask(self.base, self.left, into)
            return True
        if self._memory is None or not self._placed:
            return False
        text, left = self._place()
        known = self._memory.recall(self._use, self._state, text, self._last, left, into)
        if known and left:
            self.tables.indent(left, into)
        return known

    def remember(self, mask: Int32, *, forced: bool) -> None:
        """Keeps the mask of the text's end, int32 [words].

        Args:
            forced: Whether the grammar forces the text that comes.
        """
        if self._memory is not None and self._placed:
            text, left = self._place()
            last = self._last if forced else None
            # The text of a string with a pattern hardly comes again.
            dense = not self._in_string or self._in_name
            self._memory.keep(self._state, text, last, left, mask, dense=dense)

    @property
    def _placed(self) -> bool:
        """Whether the state and the text behind it say all about the text's end."""
        return self._length is None and self.left < 0

    def _place(self) -> tuple[bytes, int]:
        """Returns the text behind the state, and how many more blanks may come in its last line.

        Such lines differ in nothing else, so they have the same text. 0: the text has all blanks.
        """
        blanks = self._blanks
        left = 1 + MOST_INDENT - len(blanks) if blanks[:1] == b"\n" else 0
        return self._text + (b"\n" if left else blanks), left

    def begin_string(self, base: Int32 | None) -> None:
        """Takes the tokens allowed in the string at the text's end, int32 [words]."""
        self.base = base
        if base is not None and self._memory is not None:
            self._memory.keep_base(self._opened, self.left, base)

    def settle(self) -> None:
        """Reads all tokens that were taken, which costs some microseconds."""
        if self._unread:
            self._advance(self._unread)
            self._unread.clear()

    def _advance(self, tokens: Sequence[int]) -> None:
        characters, quiet, free = self.tables.characters, self.tables.quiet, self._free
        for token in tokens:
            self._last = token
            if token >= len(quiet):
                continue
            if self.left >= 0:
                if (count := characters[token]) >= 0:
                    self.left -= count
                    self._count += count
                    continue
            elif quiet[token] and free():
                if self._memory is not None:
                    self._keep(self.tables.text(token), inside=self._in_string)
                continue
            self._read(self.tables.text(token))

    def _free(self) -> bool:
        """Whether what stands here does not matter to strings."""
        followed = self._length is not None or self._pattern is not None
        return not (followed or self._in_name or self._tail)

    def _read(self, text: bytes) -> None:
        """Reads a token."""
        at, old = 0, len(self._tail)
        text, self._tail = self._tail + text, b""
        while at < len(text):
            start = max(at, old)
            if self._in_string:
                free, named = self._length is not None, self._in_name
                at = self._read_string(text, at)
                if not free or not self._in_string:
                    self._keep(text[at - 1 if free else start : at], inside=True)
                if not self._in_string and not named:
                    self._end_value(_VALUE)
                continue
            found = _NEXT.search(text, at)
            at = len(text) if found is None else found.end()
            self._keep(text[start:at], inside=False)
            if found is not None:
                self._structure(text[at - 1])
        self._near = not (self._length is None and self._pattern is None) or self._before_length()

    def _keep(self, text: bytes, *, inside: bool) -> None:
        """Adds text to the place. inside: whether it is of a string, with the quote at its end."""
        if self._memory is None:
            return
        if inside:
            self._text += text
        else:
            solid = text.rstrip(_BLANKS)
            blanks = text[len(solid) :] if solid else self._blanks + text
            self._blanks = blanks.replace(b"\t", b" ").replace(b"\r\n", b"\n")
            self._text += solid.translate(None, _BLANKS)
        if len(self._text) > _MOST_TEXT:
            self._number()

    def _number(self) -> None:
        """Makes the place a state."""
        if self._memory is not None and self._text:
            self._state, self._text = self._memory.step(self._state, self._text), b""

    def _end_value(self, kind: int) -> None:
        """Forgets the text of a value that is complete, if it decides nothing.

        Args:
            kind: Whether it ends here, or behind the comma.
        """
        frame = self._frames[-1] if self._frames else None
        if frame is None or self._memory is None:
            return
        place = frame.name if frame.index < 0 else frame.index
        slot = None if place is None else self._places.slot(frame.nodes, place)
        if slot is not None:
            self._state, self._text = self._memory.step(frame.state, (kind, slot)), b""

    def _before_length(self) -> bool:
        """Tells whether a string that is bounded by its length alone may come next."""
        if self._in_string:
            return False
        frame = self._frames[-1] if self._frames else None
        named = frame is None or frame.index >= 0 or frame.name is not None
        return named and self._places.length(self._nodes()) is not None

    def _structure(self, char: int) -> None:
        frames = self._frames
        if char == _QUOTE:
            frame = frames[-1] if frames else None
            self._in_string = True
            self._in_name = frame is not None and frame.index < 0 and frame.name is None
            self._length = None if self._in_name else self._places.length(self._nodes())
            self._name, self._count = b"", 0
            if not self._in_name and self._length is None:
                self._pattern, self._content = self._places.tail(self._nodes()), b""
            if self._length is not None or self._pattern is not None:
                self._number()
                self._opened = self._state
            if self._length is not None and not self._length.least:
                self.left = self._length.most
        elif char in b"{[":
            self._number()
            frames.append(_Frame(self._nodes(), -1 if char == _BRACE else 0, self._state))
        elif char in b"}]":
            del frames[-1:]
            self._end_value(_VALUE)
        else:
            self._end_value(_COMMA)
            if frames and frames[-1].index < 0:
                frames[-1].name = None
            elif frames:
                frames[-1].index += 1

    def _nodes(self) -> Nodes:
        """Returns the schemas of the value that comes."""
        if not self._frames:
            return self._places.root
        frame = self._frames[-1]
        if frame.index < 0:
            return self._places.value(frame.nodes, frame.name or "")
        return self._places.item(frame.nodes, frame.index)

    def _read_string(self, text: bytes, at: int) -> int:
        """Reads a string's content and its end, and returns where to go on."""
        found = _WITHIN.match(text, at)
        end = at if found is None else found.end()
        content, self._tail = text[at:end], text[end:]
        ended = self._tail[:1] == b'"'
        if self._in_name:
            self._name += content
        elif self._length is not None:
            self._count_characters(content, self._length)
        elif self._pattern is not None and not ended:
            self._content += content
            self.left = self._pattern.left(self._content)
        if not ended:
            return len(text)
        if self._in_name:
            self._end_name(self._frames[-1])
        self._in_string = self._in_name = False
        self._length = self._pattern = self.base = None
        self.left, self._tail = -1, b""
        return end + 1

    def _count_characters(self, content: bytes, length: Length) -> None:
        found = whole_characters(content)
        if found is None:
            self._length, self.left, self._memory = None, -1, None
            return
        count, cut = found
        self._count += count
        if cut:
            self._tail = content[len(content) - cut :] + self._tail
        clear = not self._tail and self._count >= length.least
        self.left = length.most - self._count if clear else -1

    def _end_name(self, frame: _Frame) -> None:
        try:
            frame.name = json.loads(b'"' + self._name + b'"')
        except ValueError:
            frame.name, frame.nodes = "", UNKNOWN


_QUOTE, _BRACE = b'"{'
_BLANKS = b" \t\r\n"
_VALUE, _COMMA = range(2)
"""The places at which the text of a value is forgotten."""
