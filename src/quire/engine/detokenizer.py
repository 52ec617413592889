"""Incremental detokenization, and stop strings in its text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from quire.engine.tokenizer import Tokenizer

_CONTEXT = 6
"""Prompt tokens that the decoder sees first, as some decoders treat the first token specially
(dropping a leading space)."""

_LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character, and so tokens that may be needed to complete one."""


_BROKEN = "\ufffd"
"""Replacement of bytes that are no character."""


class Detokenizer:
    """Detokenizes one completion token by token, in O(1) each.

    Text of incomplete characters is held back until they are complete.
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

        Args:
        keep: special tokens whose text is not skipped.
        """
        self._hub = tokenizer.hub
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens and not keep
        self._skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._pending: list[int] = []
        self._context = [int(id) for id in prompt[-_CONTEXT:]]
        self._stream = self._fresh(self._context)

    def _fresh(self, context: list[int]) -> DecodeStream:
        if not context:
            return DecodeStream(skip_special_tokens=self._skip)
        return DecodeStream(context, self._skip)

    def step(self, token: int) -> str:
        """Returns the text that one more token completes."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        try:
            text: str | None = self._stream.step(self._hub, token)
        except Exception:  # the library's word for bytes it cannot place after its context
            return self._give_up()
        if text is not None:
            self._context = self._pending
            self._pending = []
            return text
        if len(self._pending) > _LONGEST_CHARACTER:
            # No character is so long: these bytes are not UTF-8, and waiting would never end.
            return self._give_up()
        return ""

    def finish(self) -> str:
        """Returns the remaining text: U+FFFD for an incomplete character."""
        return self._give_up()

    def whole(self, tokens: Sequence[int]) -> str:
        """Returns the text of a whole completion, with no state kept."""
        tokens = [token for token in tokens if token not in self._skipped]
        before = self._tokenizer.decode(self._context, self._skip)
        text = self._tokenizer.decode([*self._context, *tokens], self._skip)
        if text.startswith(before) and not before.endswith(_BROKEN):
            return text[len(before) :]
        return "".join(map(self.step, tokens)) + self.finish()

    def _give_up(self) -> str:
        """Returns the pending tokens' text as it is, and goes on after the last whole character."""
        text = self._tokenizer.decode(self._pending, self._skip) if self._pending else ""
        self._pending = []
        self._stream = self._fresh(self._context)
        return text


class StopMatcher:
    """Finds the first stop string in growing text.

    Only text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns (text to show now, the stop string found). No text follows a stop string."""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first; of those, the one that began first.
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
    """Returns the length of the longest end of `text` that begins `stop` (not all of it)."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
