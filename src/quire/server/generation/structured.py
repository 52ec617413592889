"""Checks of structured outputs before a request runs."""

from __future__ import annotations

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.server.errors import ApiError
from quire.server.state import ServerState


async def check_structured(
    state: ServerState, params: SamplingParams, field: str = "structured_outputs"
) -> None:
    """Compiles the grammar that `params` ask for, off the event loop.

    A grammar that cannot be enforced is refused so before anything is generated.

    Raises:
        ApiError: 400, naming `field`.
    """
    if params.structured_outputs is None:
        return
    try:
        await state.client.check_grammar(params.structured_outputs)
    except RequestError as error:
        raise ApiError(
            400, f"Invalid value for '{field}': {error}", param=field, code=error.code
        ) from None
