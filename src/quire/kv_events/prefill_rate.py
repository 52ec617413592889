"""The rate at which an engine computes prompts, measured on its steps."""

from __future__ import annotations

from collections import deque

_LEAST_TOKENS = 64
"""Prompt tokens of a step below which it says more about decoding."""
_KEPT = 0.9
"""Weight of the steps before, at each step."""


class PrefillRate:
    """Measures prompt tokens per second of the steps that compute prompts.

    Where steps overlap, a step takes from the end of the one before to its own end.
    """

    def __init__(self) -> None:
        self._launched: deque[tuple[int, float]] = deque()
        self._tokens = self._seconds = self._last_end = 0.0

    @property
    def value(self) -> float:
        """Tokens per second, 0 until there was a step to measure."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def launched(self, prompt_tokens: int, now: float) -> None:
        """Takes note of a step that is launched at `now`, in seconds."""
        self._launched.append((prompt_tokens, now))

    def ended(self, now: float) -> None:
        """Takes note of the end of the oldest step."""
        if not self._launched:
            return
        tokens, begun = self._launched.popleft()
        seconds, self._last_end = now - max(begun, self._last_end), now
        if tokens >= _LEAST_TOKENS and seconds > 0.0:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + seconds
