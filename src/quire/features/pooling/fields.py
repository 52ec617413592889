"""The field of a request for an embedding."""

from __future__ import annotations

from quire.features.call import RequestField

POOLING: RequestField[str] = RequestField("pooling.kind", str, option="pooling")
"""`Pooling`: how the prompt becomes a vector."""
FIELDS = (POOLING,)
