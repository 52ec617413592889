"""Patterns of strings that end with a bounded repeat of a class, such as `^https?://[a-z/]{3,99}$`.

After the least number of repeats, two places differ only in the number of characters that may
follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST = 10**6
"""Repeats of `+` and `*`."""
_PART = re.compile(
    r"(?P<set>\[\[(?P<members>[^\]\[^][^\]\[]*)\]&&\[\^[^\]\[]*\]\]|\[(?P<bare>[^\]\[^][^\]\[]*)\])"
    r"|\\u\{(?P<code>[0-9A-F]+)\}|(?P<char>[A-Za-z0-9])"
)
_RANGE = re.compile(
    r"\\u\{([0-9A-F]+)\}(?:-\\u\{([0-9A-F]+)\})?|([A-Za-z0-9_])(?:-([A-Za-z0-9_]))?"
)
_COUNT = re.compile(r"[?+*]|\{([0-9]+)(,?)([0-9]*)\}")
_PLAIN = frozenset(range(0x20, 0x7F)) - set(b'"\\')
"""Characters that JSON writes as they are."""


class _Part(NamedTuple):
    """A character of a set, repeated."""

    chars: frozenset[int]
    least: int
    most: int

    def regex(self) -> str:
        chars = "".join(re.escape(chr(char)) for char in sorted(self.chars))
        return f"[{chars}]{{{self.least},{self.most}}}"


class PatternTail(NamedTuple):
    """The bounded repeat at a pattern's end.

    Attributes:
        before: Matches a text that has come to the repeat, and the repeat's first characters, as
            many as must come.
        rest: Matches the characters that may follow.
        most: Most characters that may follow.
    """

    before: re.Pattern[bytes]
    rest: re.Pattern[bytes]
    most: int

    def left(self, content: bytes) -> int:
        """Returns how many characters may follow a text; -1: it has not come so far."""
        begun = self.before.match(content)
        if begun is None or not self.rest.fullmatch(content, begun.end()):
            return -1
        return self.most - (len(content) - begun.end())


def pattern_tail(pattern: str) -> PatternTail | None:
    """Returns the repeat at the end of a pattern, as `patterns.translate` has written it.

    Returns None for patterns of another form, and where a character could belong to two parts.
    """
    parts = list(_parts(pattern))
    if not parts or None in parts:
        return None
    known = [part for part in parts if part is not None]
    last = known[-1]
    if _may_go_on(known[:-1]):
        # Until the repeat's first character, the parts before it decide what may follow.
        last = last._replace(least=max(last.least, 1))
    if last.most == _MOST or last.most - last.least < 1 or not _unambiguous(known):
        return None
    begin = "".join(part.regex() for part in known[:-1])
    begin += last._replace(most=last.least).regex()
    rest = last._replace(least=0, most=last.most - last.least)
    return PatternTail(
        re.compile(begin.encode()), re.compile(rest.regex().encode()), last.most - last.least
    )


def _may_go_on(parts: Sequence[_Part]) -> bool:
    """Whether a text that has come to the end of these parts may have more characters of them."""
    final = next((part for part in reversed(parts) if part.most), None)
    return final is not None and final.least < final.most


def _unambiguous(parts: Sequence[_Part]) -> bool:
    """Whether each character says which part it belongs to."""
    for place, part in enumerate(parts):
        if part.least == part.most:
            continue
        for later in parts[place + 1 :]:
            if part.chars & later.chars:
                return False
            if later.least:
                break
    return True


def _parts(pattern: str) -> Iterator[_Part | None]:
    """Yields the parts of a pattern; None: it has another form."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        yield None
        return
    at, end = 1, len(pattern) - 1
    while at < end:
        found = _PART.match(pattern, at, end)
        chars = None if found is None else _chars(found)
        if found is None or chars is None or not chars <= _PLAIN:
            yield None
            return
        at = found.end()
        count = _COUNT.match(pattern, at, end)
        if count is not None:
            at = count.end()
        yield _Part(chars, *_bounds(count))


def _chars(found: re.Match[str]) -> frozenset[int] | None:
    if found["char"]:
        return frozenset(found["char"].encode())
    if found["code"]:
        return frozenset((int(found["code"], 16),))
    members, chars, at = found["members"] or found["bare"], set[int](), 0
    while at < len(members):
        each = _RANGE.match(members, at)
        if each is None:
            return None
        first, last, low, high = each.groups()
        begin = int(first, 16) if first else ord(low)
        end = int(last, 16) if last else ord(high) if high else begin
        if end > max(_PLAIN):
            return None
        chars.update(range(begin, end + 1))
        at = each.end()
    return frozenset(chars)


def _bounds(count: re.Match[str] | None) -> tuple[int, int]:
    if count is None:
        return 1, 1
    if count[1] is None:
        return {"?": (0, 1), "+": (1, _MOST), "*": (0, _MOST)}[count[0]]
    least = int(count[1])
    return least, int(count[3]) if count[3] else _MOST if count[2] else least
