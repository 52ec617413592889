"""The request fields for vectors and classes."""

from __future__ import annotations

from quire.features.call import RequestField

POOLING: RequestField[str] = RequestField("pooling.kind", str, option="pooling")
"""Result of the request's prompt: a `Pooling`, "classes" or "tokens"."""
SECOND_TEXT: RequestField[int] = RequestField("pooling.second_text", int)
"""Position at which the second text of a pair begins, for models with token types."""
FIELDS = (POOLING, SECOND_TEXT)
