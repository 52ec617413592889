"""The time that a prompt from a peer costs beyond its computing, as a line over its tokens."""

from __future__ import annotations

_KEPT = 0.9
"""Weight of the measurements before, at each one."""


class HandoverTime:
    """Fits seconds = fixed + per_token * tokens by least squares, the newest measurements first.

    Neither number is negative. Both are 0 before there is a measurement.
    """

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Takes a measurement in."""
        x, y = float(tokens), max(0.0, seconds)
        self._count = self._count * _KEPT + 1.0
        self._x = self._x * _KEPT + x
        self._y = self._y * _KEPT + y
        self._xx = self._xx * _KEPT + x * x
        self._xy = self._xy * _KEPT + x * y

    @property
    def line(self) -> tuple[float, float]:
        """Returns (fixed, per_token), in seconds."""
        if not self._count:
            return 0.0, 0.0
        spread = self._count * self._xx - self._x**2
        # Measurements of equal lengths tell no slope.
        if spread <= 1e-9 * self._count * self._xx:
            return self._y / self._count, 0.0
        slope = (self._count * self._xy - self._x * self._y) / spread
        slope = min(max(slope, 0.0), self._xy / self._xx if self._xx else 0.0)
        return max(0.0, (self._y - slope * self._x) / self._count), slope
