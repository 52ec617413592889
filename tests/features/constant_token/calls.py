"""The calls and the request fields: a default for all requests, and a token for one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quire.features.call import CallType, RequestField
from quire.sampling_params import ANTHROPIC, OPENAI, RESPONSES

SET_DEFAULT: CallType[int, int] = CallType("constant_token.set_default", int, int)
"""Sets the token of requests to come that carry none; answers the token until now."""
CALLS = (SET_DEFAULT,)

TOKEN: RequestField[int] = RequestField(
    "constant_token.token",
    int,
    key="constant_token",
    apis=(OPENAI, RESPONSES, ANTHROPIC),
    body=Annotated[int, Field(ge=0, le=2**31 - 1)],
)
"""The token that the request's completions repeat: `constant_token` in bodies."""
FIELDS = (TOKEN,)
