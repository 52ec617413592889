"""The statistics of adapters."""

from __future__ import annotations

AdapterStats = dict[str, float]
"""Counts by name; see `AdapterFeature.stats`."""
