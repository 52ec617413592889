"""A bound on what strangers can have this server log."""

from __future__ import annotations

import logging
import threading
import time

_MOST_LINES = 5
_SECONDS = 60.0


class LogLimit(logging.Filter):
    """Lets five lines of each message through in a minute. The next one says how many were left
    out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}
        """By message, before its values are put in: when its minute began, and its lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            now = time.monotonic()
            begin, lines = self._seen.get(record.msg, (now, 0))
            left_out = 0
            if now - begin >= _SECONDS:
                left_out = max(0, lines - _MOST_LINES)
                begin, lines = now, 0
            self._seen[record.msg] = begin, lines + 1
        if left_out:
            record.msg += f" ({left_out} lines like this were left out)"
        return lines < _MOST_LINES
