"""The settings of structured output."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import COUNT, FeatureArgs, Limit, setting

_SUBJECT = "API"
_TIMEOUT = Limit(lambda seconds: 0.0 < seconds <= 3600.0, "in (0, 3600]")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputArgs(FeatureArgs):
    """The limits of the compilation of schemas and grammars."""

    structured_outputs_timeout: float = setting(
        5.0, "Seconds to compile a schema or grammar in.", limit=_TIMEOUT, subject=_SUBJECT
    )
    structured_outputs_wait_us: float = setting(
        30.0,
        "Microseconds that a step waits for late masks. Rows whose masks are later still sit the "
        "step out.",
        limit=Limit(lambda us: 0.0 <= us <= 1e6, "in [0, 1000000]"),
        subject=_SUBJECT,
    )
    structured_outputs_cache: int = setting(
        128, "Compiled schemas and grammars to keep.", limit=COUNT, subject=_SUBJECT
    )
