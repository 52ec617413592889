"""The HTTP routes for adapters, which are those of vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.features.lora import calls
from quire.server.apis.route import Route
from quire.server.context.request_context import context_of
from quire.server.errors import ApiError
from quire.server.http.bodies import read_body
from quire.server.http.strict_model import Name, StrictModel
from quire.server.state import state_of


class LoadAdapterRequest(StrictModel):
    """Body of `/v1/load_lora_adapter`. load_inplace: a known name may be given to this adapter."""

    lora_name: Name | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(StrictModel):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: Name | None = None


async def load_adapter(request: Request) -> Response:
    """Loads an adapter. The answer comes when requests may name it."""
    state = state_of(request)
    body = await read_body(request, LoadAdapterRequest, state.args.max_body_bytes)
    state.check_alive()
    if not body.lora_name or not body.lora_path:
        raise ApiError(
            400, "Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput"
        )
    name = body.lora_name
    if name in state.model_names:
        raise ApiError(400, f"'{name}' is the name of the served model.", param="lora_name")
    in_place = bool(body.load_inplace)
    await calls.load_adapter(state.client, name, body.lora_path, in_place=in_place)
    return _done(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Unloads an adapter, and answers at once. Running requests keep the adapter."""
    state = state_of(request)
    body = await read_body(request, UnloadAdapterRequest, state.args.max_body_bytes)
    state.check_alive()
    if not body.lora_name:
        raise ApiError(
            400,
            "'lora_name' needs to be provided to unload a LoRA adapter.",
            kind="InvalidUserInput",
        )
    await calls.unload_adapter(state.client, body.lora_name)
    return _done(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def check_adapters_key(request: Request) -> None:
    """Raises ApiError, 403, unless the request's key may change adapters."""
    if not context_of(request).key.admin:
        raise ApiError(403, "This key may not load or unload adapters.", code="not_an_admin")


def _done(text: str) -> Response:
    return Response(text, media_type="text/plain")


ROUTES = (
    Route("post", "/v1/load_lora_adapter", load_adapter, "Give a name to a LoRA adapter",
          LoadAdapterRequest, "text/plain", check=check_adapters_key),
    Route("post", "/v1/unload_lora_adapter", unload_adapter, "Forget a LoRA adapter",
          UnloadAdapterRequest, "text/plain", check=check_adapters_key),
)  # fmt: skip
