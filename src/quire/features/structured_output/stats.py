"""The statistics of grammars and their masks."""

from __future__ import annotations

import msgspec


class GrammarStats(msgspec.Struct):
    """Counts since the start.

    Attributes:
        compiles: Grammars compiled, by each builder that needs them.
        compile_seconds: Seconds that threads spent on compiling them.
        compile_late_rows: Rows that sat a step out because their grammars were being compiled.
        mask_lookups: Masks looked up in the memory of masks.
        mask_hits: Masks found there.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    compile_late_rows: int = 0
    mask_lookups: int = 0
    mask_hits: int = 0


LIVE_ROWS = {
    "compiles": "Grammars compiled",
    "compile_seconds": "Time of compiling grammars",
    "compile_late_rows": "Rows that waited for a grammar",
    "mask_lookups": "Masks looked up",
    "mask_hits": "Masks found",
}
"""The names of the statistics in the live view."""
