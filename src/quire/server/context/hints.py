"""Hints: fields that control a provider's own service. An answer that ignores them is still right.

A declined hint is reported. The answer names it in the header `Quire-Ignored`, a metric counts it,
and the log has it once. With `--strict-fields` hints are refused, as is every other field that is
not implemented.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field

logger = logging.getLogger("quire.server")

HEADER = b"quire-ignored"
_MOST_SHOWN = 32
"""Most hints in the header."""

_logged: set[str] = set()


@dataclass(slots=True)
class Hints:
    """The hints that one request's answer ignores.

    Attributes:
        strict: hints are refused.
        ignored: maps each ignored hint's name in docs/api.md to its text in the header.
    """

    strict: bool
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def header(self) -> bytes:
        return ", ".join(list(self.ignored.values())[:_MOST_SHOWN]).encode("ascii", "replace")


_hints: ContextVar[Hints | None] = ContextVar("hints", default=None)


def collect_hints(strict: bool) -> Hints:
    """Returns an empty collection, and makes it the one of the current task's request."""
    hints = Hints(strict)
    _hints.set(hints)
    return hints


def refuses_hints() -> bool:
    """Tells whether the current task's request must not have hints."""
    hints = _hints.get()
    return hints is None or hints.strict


def decline(name: str, shown: str = "") -> None:
    """Records that a hint is ignored. Callers check `refuses_hints` first.

    Args:
        name: the field's path without indices of lists.
        shown: the text in the header, by default the name.
    """
    hints = _hints.get()
    if hints is not None:
        hints.ignored.setdefault(name, shown or name)
    if name not in _logged:
        _logged.add(name)
        logger.info("the hint '%s' is ignored; --strict-fields refuses it", name)
