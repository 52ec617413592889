"""Incremental detokenization, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer

_CONTEXT = 6
"""Number of prompt tokens that are decoded together with the completion. Some decoders treat the
first token specially and drop its leading space."""

_LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character, which is also the most tokens that a character can have."""

_MOST_EMPTY = 64
"""Most tokens without text that are kept as context. A decoder may treat the first token with text
specially, so they are needed until text comes."""

_BROKEN = "\ufffd"
"""Unicode's replacement character, which decoders write for invalid bytes."""


class Detokenizer:
    """Detokenizes one completion, token by token, in constant time for each.

    Text is held back until its last character is complete. This is decided by the tokens' bytes and
    not by a U+FFFD in the text, because a model may write U+FFFD itself. Only tokens of whole
    characters are decoded, because byte fallback replaces a whole run of bytes if one character in
    it is incomplete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """Begins after the last tokens of `prompt`.

        If the prompt ends in an incomplete character and the completion's first tokens complete it,
        the character belongs to the completion.

        Args:
            keep: special tokens whose text is not skipped.
        """
        self._tokenizer = tokenizer
        self._hub = tokenizer.hub
        self._skip = skip_special_tokens and not keep
        self._skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._context, self._pending = self._begin(prompt)
        self._before = self._decode(self._context)
        self._borrowed = len(self._pending)
        """Number of pending tokens that belong to the prompt."""

    def step(self, token: int) -> str:
        """Returns the text that becomes complete with one more token."""
        if token in self._skipped:
            return ""
        given_up = ""
        if self._pending and not _may_follow(self._bytes(self._pending), self._bytes([token])):
            given_up = self._give_up()
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])
        if text.endswith(_BROKEN) and _incomplete(self._bytes(self._pending)):
            return given_up
        if not text.startswith(self._before):
            return given_up + self._give_up()
        return given_up + self._advance(text[len(self._before) :])

    def finish(self) -> str:
        """Returns the remaining text, with U+FFFD for an incomplete character."""
        return self._give_up()

    def whole(self, tokens: Sequence[int]) -> str:
        """Returns the text of a whole completion. `step` must not have been called."""
        if not self._pending:
            kept = [token for token in tokens if token not in self._skipped]
            text = self._decode([*self._context, *kept])
            sure = self._tokenizer.byte_level or _BROKEN not in text
            if sure and text.startswith(self._before):
                return text[len(self._before) :]
        return "".join(map(self.step, tokens)) + self.finish()

    def _begin(self, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns two lists from the end of a prompt: tokens of whole characters, then tokens of an
        incomplete character."""
        tail = [int(id) for id in prompt[-_CONTEXT - _LONGEST_CHARACTER + 1 :]]
        if _BROKEN not in self._decode(tail[-_CONTEXT:]):
            return tail[-_CONTEXT:], []
        pieces = [self._tokenizer.token_bytes(id) for id in tail]
        for start in range(len(tail)):
            data = b"".join(pieces[start:])
            open_bytes = _incomplete(data)
            if not _whole(data[: len(data) - open_bytes]):
                continue
            end = len(tail)
            while open_bytes > 0:
                end -= 1
                open_bytes -= len(pieces[end])
            if end > start or end == 0:
                return tail[start:end], tail[end:]
        return [id for id, piece in zip(tail, pieces, strict=True) if _whole(piece)], []

    def _advance(self, text: str) -> str:
        """Moves the pending tokens, whose text is `text`, to the context, and returns their
        text."""
        if not text:
            self._context = [*self._context, *self._pending][-_MOST_EMPTY:]
            self._before = self._decode(self._context)
        elif _BROKEN not in text or _whole(self._bytes(self._pending)):
            self._context = self._pending
            self._before = self._text_of_context()
        self._pending, self._borrowed = [], 0
        return text

    def _give_up(self) -> str:
        """Returns the text of pending tokens that do not form a character, and continues after the
        last whole character."""
        text = self._decode(self._pending[self._borrowed :])
        self._pending, self._borrowed = [], 0
        return text

    def _text_of_context(self) -> str:
        if len(self._context) == 1 and self._context[0] not in self._tokenizer.special_ids:
            return self._tokenizer.token_text(self._context[0])
        return self._decode(self._context)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._hub.decode(tokens, self._skip)) if tokens else ""

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, tokens))


def _whole(data: bytes) -> bool:
    """Returns whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _incomplete(data: bytes) -> int:
    """Returns the number of bytes at the end of `data` that begin an incomplete character."""
    for size in range(1, min(_LONGEST_CHARACTER, len(data) + 1)):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return size
    return 0


def _may_follow(begun: bytes, data: bytes) -> bool:
    """Returns whether `data` may continue the incomplete character at the end of `begun`."""
    size = _incomplete(begun) + 1
    character = (begun + data[:1])[-size:]
    return not data or _whole(character) or _incomplete(character) == size


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

    It holds back only text that may be the beginning of a stop string.

    Args:
        stops: the stop strings.
        include: whether the stop string itself is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, early: bool = False) -> tuple[str, str | None]:
        """Returns the text to show now, and the stop string if one was found.

        No text follows a stop string.

        Args:
            text: the next piece.
            early: ignore stop strings that this piece completes.
        """
        text = self._held + text
        stops = () if early else self._stops
        found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            # The stop string that ends first is chosen, or the longest of several that end there.
            at, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
