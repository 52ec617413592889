"""The route that changes the default."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.route import Route, check_admin
from quire.server.http.bodies import read_body
from quire.server.http.sse import json_response
from quire.server.http.strict_model import StrictModel
from quire.server.state import state_of
from tests.features.constant_token.calls import SET_DEFAULT


class DefaultBody(StrictModel):
    """Body of `PUT /constant_token`."""

    token: int


class DefaultAnswer(msgspec.Struct):
    """The default before."""

    before: int


async def set_default(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, DefaultBody, state.args.max_body_bytes)
    state.check_alive()
    return json_response(DefaultAnswer(await state.client.call(SET_DEFAULT, body.token)))


ROUTES = (
    Route("put", "/constant_token", set_default, "Set the token of requests without one",
          DefaultBody, DefaultAnswer, check=check_admin),
)  # fmt: skip
