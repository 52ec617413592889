"""Headers of answers that tell of a key's limits, by the names of each API."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from quire.server.middleware.rate_limits import LimitStatus
from quire.server.middleware.request_context import duration


def limit_headers(what: str, left: LimitStatus, anthropic: bool) -> Iterator[tuple[str, str]]:
    """Yields names and values. what: requests or tokens."""
    remaining = str(max(0, math.floor(left.remaining)))
    if anthropic:
        reset = datetime.now(UTC) + timedelta(seconds=left.refill)
        name = f"anthropic-ratelimit-{what}"
        yield f"{name}-limit", str(left.limit)
        yield f"{name}-remaining", remaining
        yield f"{name}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    else:
        yield f"x-ratelimit-limit-{what}", str(left.limit)
        yield f"x-ratelimit-remaining-{what}", remaining
        yield f"x-ratelimit-reset-{what}", duration(left.refill)
