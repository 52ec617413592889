"""The statistics of structured output."""

from __future__ import annotations

import msgspec


class GrammarStats(msgspec.Struct):
    """Counts since the start.

    Attributes:
        compiles: Grammars compiled, copies included.
        compile_seconds: Seconds that threads spent on compiling them.
        late_rows: Rows that sat a step out because their grammars were being compiled.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    late_rows: int = 0


LIVE_ROWS = {
    "compiles": "Grammars compiled",
    "compile_seconds": "Seconds of compiling grammars",
    "late_rows": "Rows that waited for a grammar",
}
"""The names of the statistics in the live view."""
