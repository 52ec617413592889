"""Tables of what a vocabulary's tokens are within a JSON string."""

from __future__ import annotations

import codecs
import re
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire.arrays import Int32, int32
from quire.grammar.grammar import MOST_INDENT

_MOST_FILLED = 64
"""Characters, the rest of a string, up to which a matcher is moved to the string's end."""
_MOST_COUNTED = 256
"""Characters of a token up to which tokens are told apart by their length."""
_NEVER = _MOST_COUNTED + 1
_CONTENT = re.compile(rb'(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*')
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SPACE = rb"[ \t\r\n]*"
_END = re.compile(
    rb'"%s(?:[\]}]%s)*(?:[,:]%s(?:"%s(?:".*|\\)?|[{\[0-9tfn-].*)?)?'
    % (_SPACE, _SPACE, _SPACE, _CONTENT.pattern),
    re.DOTALL,
)
"""Matches all that may stand at the end of a string in JSON and after it, and more."""
_STRUCTURE = b'"\\{}[],'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte not in b'"\\')


class _Ending(NamedTuple):
    """Tokens that end a string with the same bytes, which are not a token by themselves.

    Attributes:
        after: Index of an ending that is a token and that these bytes begin with.
        shortest: The token with the fewest characters before the end.
        before: Number of these characters.
        tokens: Mask of all the tokens.
    """

    after: int
    shortest: int
    before: int
    tokens: Int32


class StringTables:
    """Tables of a vocabulary for strings that are bounded by their length alone.

    At a whole character in such a string, a token is allowed on two conditions. First, it has at
    most as many characters as are left; if it ends the string, those before the end count. Second,
    the grammar allows the bytes after the string's end. These bytes are the same at every place in
    the string, so masks are put together from tables: 4 MB of them for 152,000 tokens.

    Attributes:
        usable: Whether the tokenizer can write a string at all.
        limit: Most characters left for which there are masks.
        words: Number of 32-bit words of a mask.
        characters: int16 by token, of one that goes from a whole character in a string to another;
            -1: other tokens.
        quiet: By token, 1 if it has no part in a document's structure.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        size = tokenizer.vocab_size
        texts: list[bytes] = [tokenizer.decode_bytes([token]) for token in range(size)]
        self._tokenizer, self._size = tokenizer, size
        self.words = -(-size // 32)
        self.characters = array("h", [-1]) * size
        self.quiet = bytes(not text.translate(None, _OTHERS) for text in texts)
        self._all_counted = True
        counts, inner = [_NEVER] * size, list[int]()
        endings: dict[bytes, list[int]] = {}
        for token, text in enumerate(texts):
            if not text or tokenizer.is_special_token(token):
                continue
            content, cut, end = _read(text)
            if content is None or (end and (cut or not _END.fullmatch(end))):
                continue
            counts[token] = min(content + cut, _NEVER)
            self._all_counted &= counts[token] < _NEVER
            if end:
                endings.setdefault(end, []).append(token)
                continue
            inner.append(token)
            if not cut:
                self.characters[token] = content
        self._inner = self._mask(inner)
        fits = np.array(counts)
        longest = int(fits[fits < _NEVER].max(initial=0))
        self._upto = [self._packed(fits <= left) for left in range(longest + 1)]
        # Where all tokens fit, their lengths no longer matter.
        self.limit = sys.maxsize if self._all_counted else longest
        blanks = np.array([len(text) - len(text.lstrip(b" \t")) for text in texts])
        self._indents = [self._packed(blanks <= left) for left in range(MOST_INDENT + 1)]
        self._sort(endings, counts, texts)
        self._fillers = [tokenizer.tokenize_bytes(b"a" * left) for left in range(_MOST_FILLED + 1)]
        self.usable = b'"' in endings and all(
            tokenizer.decode_bytes(filler) == b"a" * left
            for left, filler in enumerate(self._fillers)
        )

    def _sort(
        self, endings: dict[bytes, list[int]], counts: Sequence[int], texts: list[bytes]
    ) -> None:
        """Keeps the ways in which a string can end: those that are tokens, and others."""
        own = {texts[token]: token for tokens in endings.values() for token in tokens}
        ways = [end for end in endings if end in own]
        self._tokens = int32([own[end] for end in ways])
        self._ending = [self._mask(endings[end]) for end in ways]
        self._ends = self._mask([t for end in ways for t in endings[end] if texts[t] == end])
        self._others = list[_Ending]()
        for end in endings.keys() - own.keys():
            begun = [i for i, way in enumerate(ways) if end.startswith(way)]
            if begun:
                after = max(begun, key=lambda i: len(ways[i]))
                shortest = min(endings[end], key=counts.__getitem__)
                tokens = self._mask(endings[end])
                self._others.append(_Ending(after, shortest, counts[shortest], tokens))

    def _mask(self, tokens: Sequence[int]) -> Int32:
        allowed = np.zeros(self._size, dtype=bool)
        allowed[tokens] = True
        return self._packed(allowed)

    def _packed(self, allowed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int32:
        bits = np.packbits(allowed, bitorder="little")
        return np.pad(bits, (0, 4 * self.words - len(bits))).view(np.int32)

    def text(self, token: int) -> bytes:
        """Returns a token's bytes."""
        text: bytes = self._tokenizer.decode_bytes([token])
        return text

    def at_end(self, matcher: LLMatcher, left: int) -> LLMatcher | None:
        """Returns a copy of a matcher, at which the string's `left` characters are used up.

        Returns None where that fails, or where many characters are left. Costs some microseconds.
        """
        if left > _MOST_FILLED:
            return None
        copy = matcher.deep_copy()
        return copy if not left or copy.consume_tokens(self._fillers[left]) else None

    def base(self, end: Int32, matcher: LLMatcher, left: int) -> Int32 | None:
        """Returns the tokens allowed in the string for any number of characters left.

        Args:
            end: The mask of `at_end`, int32 [at least words]; where that returned None, the mask of
                `matcher`.
            matcher: Stands in the string, with `left` characters left.
            left: Characters left. Later calls of `mask` never have more.

        Returns:
            A mask, int32 [words]. None: the grammar does not allow what the tables say.
        """
        far = left > _MOST_FILLED
        if not far and (end[: self.words] & ~self._ends).any():
            return None
        fits = end[self._tokens >> 5] >> (self._tokens & 31) & 1
        base = self._inner.copy()
        for way in np.flatnonzero(fits):
            base |= self._ending[way]
        for other in self._others:
            near = fits[other.after] and other.before <= left
            if near and matcher.validate_tokens([other.shortest]):
                base |= other.tokens
        if far:
            same = (base & self._upto[min(left, len(self._upto) - 1)]) == end[: self.words]
            return base if same.all() else None
        return base

    def mask(self, base: Int32, left: int, into: Int32) -> None:
        """Writes the mask of a place with `left` characters left. into: int32 [at least words]."""
        left = min(left, len(self._upto) - 1)
        np.bitwise_and(base, self._upto[left], out=into[: self.words])
        into[self.words :] = 0

    def indent(self, left: int, mask: Int32) -> None:
        """Removes tokens that begin with more than `left` blanks. mask: int32 [at least words]."""
        mask[: self.words] &= self._indents[left]


def _read(text: bytes) -> tuple[int | None, bool, bytes]:
    """Splits a token's bytes into a string's content and the rest.

    Returns:
        The number of whole characters, or None if the token cannot begin at a character. Whether
        it begins another character, which the next token must end. The bytes after the string's
        content.
    """
    if not text.translate(None, _PLAIN):
        return len(text), False, b""
    content = _CONTENT.match(text)
    end = 0 if content is None else content.end()
    found = whole_characters(text[:end])
    if found is None:
        return None, False, b""
    count, cut = found
    if text[end:] == b"\\":
        return (None if cut else count), True, b""
    return count, cut > 0, text[end:]


def whole_characters(content: bytes) -> tuple[int, int] | None:
    """Returns how many characters a string's content has, an escape being one, and how many bytes
    of another at its end; None if it is no UTF-8."""
    try:
        text, used = codecs.utf_8_decode(content, "strict", False)
    except UnicodeDecodeError:
        return None
    escapes = len(_ESCAPE.findall(text)) if b"\\" in content else 0
    return len(text) - escapes, len(content) - used
