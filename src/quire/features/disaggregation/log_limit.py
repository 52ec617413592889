"""A limit on the log lines that unknown clients can cause."""

from __future__ import annotations

import logging
import threading
import time

_MOST_LINES = 5
_SECONDS = 60.0


class LogLimit(logging.Filter):
    """Logs at most five lines of each message per minute. The next line tells how many were left
    out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}
        """Maps message formats to the start of their minute and the number of lines since then."""

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
