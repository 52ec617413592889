"""Metrics of grammars and their masks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from quire.features.metric_families import counters
from quire.features.structured_output.stats import GrammarStats

_COUNTERS = {
    "compiles": ("grammar_compiles", "Grammars compiled, by each builder that needs them."),
    "compile_seconds": (
        "grammar_compile_seconds",
        "Seconds that threads spent on compiling grammars.",
    ),
    "compile_late_rows": (
        "compile_late_rows",
        "Rows that sat a step out because their grammars were being compiled.",
    ),
    "mask_lookups": ("mask_lookups", "Masks looked up in the memory of masks."),
    "mask_hits": ("mask_hits", "Masks found in the memory of masks."),
}


def collect(stats: GrammarStats) -> Iterator[Metric]:
    """Yields the families of the statistics."""
    yield from counters(stats, _COUNTERS)
