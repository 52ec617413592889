"""The request field for embeddings."""

from __future__ import annotations

from quire.features.call import RequestField

POOLING: RequestField[str] = RequestField("pooling.kind", str, option="pooling")
"""The pooling of the request's prompt: a `Pooling`."""
FIELDS = (POOLING,)
