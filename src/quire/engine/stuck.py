"""When an engine whose loop does not turn counts as stuck."""

from __future__ import annotations

_SECONDS = 20.0
_SECONDS_CPU = 300.0
"""A step of many prompt tokens may take minutes on a CPU."""


def stuck_limit(given: float | None, device: str) -> float:
    """Returns the seconds of silence after which an engine counts as stuck.

    Args:
        given: `stuck_timeout` of the settings.
        device: of the engine.
    """
    if given is not None:
        return given
    return _SECONDS_CPU if device == "cpu" else _SECONDS
