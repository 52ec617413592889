"""Follows where a request stands in its JSON document, as far as strings are concerned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.arrays import Int32
from quire.structured.string_places import UNKNOWN, Length, Nodes, StringPlaces
from quire.structured.string_tables import MOST, StringTables, whole_characters

_NEXT = re.compile(rb'[{}\[\],"]')
_WITHIN = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


class _Frame:
    """An open object or array. nodes: its schemas. name: of the property whose value comes or is
    there, None before a name. index: of the item that comes or is there; -1: an object."""

    __slots__ = ("index", "name", "nodes")

    def __init__(self, nodes: Nodes, index: int) -> None:
        self.nodes = nodes
        self.index = index
        self.name: str | None = None


class StringWalk:
    """Follows a document that its grammar allows, token by token.

    It is up to date where that matters: in a string that is bounded by its length alone, and where
    one may come next. Elsewhere it reads tokens when there is time (`settle`). Where a token leads
    into such a string from elsewhere, that is seen a token late. Belongs to one thread.

    left: characters that the string in which the text ends may have from there on, its length being
        the only rule for it; -1 elsewhere, within a character, and before its least length.
    base: what may come in that string (`StringTables.base`), once it is known.
    """

    def __init__(self, places: StringPlaces, tables: StringTables) -> None:
        self.left = -1
        self.base: Int32 | None = None
        self.tables = tables
        self._places = places
        self._frames: list[_Frame] = []
        self._in_string = self._in_name = False
        self._length: Length | None = None
        self._count = 0
        self._name = self._tail = b""
        self._near = places.length(places.root) is not None
        self._unread: list[int] = []

    @property
    def short(self) -> bool:
        """Whether the text ends in a string whose mask can be put together from tables."""
        return 0 <= self.left <= MOST

    def take(self, tokens: Sequence[int]) -> None:
        """Takes tokens that have come."""
        if self._near:
            self._advance(tokens)
        else:
            self._unread.extend(tokens)

    def settle(self) -> None:
        """Reads all tokens that were taken, which costs some microseconds."""
        if self._unread:
            self._advance(self._unread)
            self._unread.clear()

    def _advance(self, tokens: Sequence[int]) -> None:
        characters, quiet = self.tables.characters, self.tables.quiet
        for token in tokens:
            if token >= len(quiet):
                continue
            if self.left >= 0:
                if (count := characters[token]) >= 0:
                    self.left -= count
                    self._count += count
                    continue
            elif quiet[token] and self._length is None and not self._in_name and not self._tail:
                continue
            self._read(self.tables.text(token))

    def _read(self, text: bytes) -> None:
        text, self._tail = self._tail + text, b""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._read_string(text, at)
                continue
            found = _NEXT.search(text, at)
            if found is None:
                break
            at = found.end()
            self._structure(text[at - 1])
        self._near = self._length is not None or self._before_length()

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
            if self._length is not None and not self._length.least:
                self.left = self._length.most
        elif char in b"{[":
            frames.append(_Frame(self._nodes(), -1 if char == _BRACE else 0))
        elif char in b"}]":
            del frames[-1:]
        elif frames and frames[-1].index < 0:
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
        if not ended:
            return len(text)
        if self._in_name:
            self._end_name(self._frames[-1])
        self._in_string = self._in_name = False
        self._length = self.base = None
        self.left, self._tail = -1, b""
        return end + 1

    def _count_characters(self, content: bytes, length: Length) -> None:
        found = whole_characters(content)
        if found is None:
            self._length, self.left = None, -1
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
