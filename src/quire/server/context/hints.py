"""Hints: fields whose meaning is a provider's, which a request can do without.

They are declined aloud: the answer names them in `Quire-Ignored`, a metric counts them, and the log
has each one once. With `--strict-fields` they are refused, as every other field that is not
implemented.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field

logger = logging.getLogger("quire.server")

HEADER = b"quire-ignored"
_MOST_SHOWN = 32
"""Most hints that the header names."""

_logged: set[str] = set()


@dataclass(slots=True)
class Hints:
    """The hints that one request's answer ignores.

    Attributes:
        strict: refuse them.
        ignored: maps the hint's name in the table of docs/api.md to what the header says.
    """

    strict: bool
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def header(self) -> bytes:
        return ", ".join(list(self.ignored.values())[:_MOST_SHOWN]).encode("ascii", "replace")


_hints: ContextVar[Hints | None] = ContextVar("hints", default=None)


def collect_hints(strict: bool) -> Hints:
    """Returns the collection for the request that this task answers."""
    hints = Hints(strict)
    _hints.set(hints)
    return hints


def refuses_hints() -> bool:
    """Tells whether the request that this task answers must do without hints."""
    hints = _hints.get()
    return hints is None or hints.strict


def decline(name: str, shown: str = "") -> None:
    """Notes that a hint is ignored, unless `refuses_hints`.

    Args:
        name: the field's path without places in lists.
        shown: the header's text, by default the name.
    """
    hints = _hints.get()
    if hints is not None:
        hints.ignored.setdefault(name, shown or name)
    if name not in _logged:
        _logged.add(name)
        logger.info("the hint '%s' is ignored; --strict-fields refuses it", name)
