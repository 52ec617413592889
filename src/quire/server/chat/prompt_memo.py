"""Keeps the tokens of a conversation, so that a turn tokenizes only what is new in it."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class PromptMemo:
    """The text and the token ids of a conversation so far.

    An added token, such as a mark of a turn, always ends the tokens before it. So up to the last
    one in the common beginning, the new prompt has the same ids. They include those that the model
    generated, which its own text tokenized again need not give.

    Attributes:
        tokenized: number of characters of the last prompt that were tokenized.
    """

    def __init__(self) -> None:
        self.tokenized = 0
        self._text = ""
        self._ids: list[int] = []
        self._starts: list[int] = []
        """Places in the text where added tokens begin, in ascending order."""
        self._places: list[int] = []
        """Places of the same tokens in the ids."""
        self._marks: re.Pattern[str] | None = None
        self._added: frozenset[int] = frozenset()

    def encode(self, tokenizer: Tokenizer, text: str, most: int | None = None) -> list[int]:
        """Returns the ids of a prompt, and remembers them.

        Args:
            most: most tokens. New text that is too long for them is refused.

        Raises:
            RequestError: the text is too long, or cannot be tokenized.
        """
        self._find_marks(tokenizer)
        count = bisect.bisect_left(self._starts, _common_length(self._text, text))
        count = self._last_whole(text, count)
        at, place = (0, 0) if count == 0 else (self._starts[count - 1], self._places[count - 1])
        new = tokenizer.encode(text[at:], add_special_tokens=False, most=most).tolist()
        self.tokenized = len(text) - at
        del self._starts[max(0, count - 1) :], self._places[max(0, count - 1) :]
        self._text, self._ids = text, [*self._ids[:place], *new]
        self._add_marks(at, place, new)
        return list(self._ids)

    def extend(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        """Appends what the model has generated."""
        at, place = len(self._text), len(self._ids)
        self._text += tokenizer.decode(token_ids, skip_special_tokens=False)
        self._ids += token_ids
        self._add_marks(at, place, token_ids)

    def _find_marks(self, tokenizer: Tokenizer) -> None:
        if self._marks is None and tokenizer.added_tokens:
            names = sorted(map(re.escape, tokenizer.added_tokens), key=len, reverse=True)
            self._marks = re.compile("|".join(names))
            self._added = frozenset(tokenizer.added_tokens.values())

    def _last_whole(self, text: str, count: int) -> int:
        """Returns how many of the first `count` marks there are up to the last whole one."""
        while count > 0 and self._marks is not None:
            start = self._starts[count - 1]
            old, new = self._marks.match(self._text, start), self._marks.match(text, start)
            if old is not None and new is not None and old.group() == new.group():
                return count
            count -= 1
        return count

    def _add_marks(self, at: int, place: int, ids: Sequence[int]) -> None:
        """Notes the added tokens of new text, which begins at these places.

        A model may write a mark in ordinary tokens. Then the new text has no place to start from.
        """
        if self._marks is None:
            return
        starts = [found.start() for found in self._marks.finditer(self._text, at)]
        places = [place + index for index, id in enumerate(ids) if id in self._added]
        if len(starts) == len(places):
            self._starts += starts
            self._places += places


def _common_length(first: str, second: str) -> int:
    """Returns the length of the longest text with which both begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if second.startswith(first[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
