"""The request field for embeddings."""

from __future__ import annotations

from quire.features.call import RequestField

POOLING: RequestField[str] = RequestField("pooling.kind", str, option="pooling")
"""How the prompt becomes a vector: a `Pooling`."""
FIELDS = (POOLING,)
