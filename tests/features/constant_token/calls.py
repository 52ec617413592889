"""The calls and the request fields: a default for all requests, and a token for one."""

from __future__ import annotations

from quire.features.call import CallType, RequestField

NONE = -1
"""Stands for no token: the model chooses."""

SET_DEFAULT: CallType[int, int] = CallType("constant_token.set_default", int, int)
"""Sets the token of requests to come that carry none; answers the token until now."""
CALLS = (SET_DEFAULT,)

TOKEN: RequestField[int] = RequestField("constant_token.token", int)
"""The token that the request's completions repeat."""
FIELDS = (TOKEN,)
