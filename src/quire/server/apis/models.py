"""`/v1/models`: the served model and its adapters, in OpenAI's and in Anthropic's shape."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.features.images.args import ImageArgs
from quire.server.apis.anthropic.routes import list_models as anthropic_models
from quire.server.apis.openai.objects import AcceptedImages, ModelCard, ModelList
from quire.server.apis.route import Route
from quire.server.context.api_keys import ApiKey
from quire.server.context.request_context import context_of
from quire.server.http.sse import json_response
from quire.server.state import ServerState, state_of

_BODY_REST = 64 << 10
"""Bytes of a body that are set aside for everything but an image."""


async def list_models(request: Request) -> Response:
    state = state_of(request)
    names = [*state.model_names, *state.further_models]
    key = context_of(request).key
    shown = [name for name in names if _shown(state, key, name)]
    if "anthropic-version" in request.headers:
        return anthropic_models(request, shown, state.created)
    return json_response(ModelList([_card(state, name) for name in shown]))


async def show_model(request: Request) -> Response:
    state = state_of(request)
    state.check_model(request.path_params["model"], context_of(request))
    return json_response(_card(state, request.path_params["model"]))


def _card(state: ServerState, name: str) -> ModelCard:
    longest = state.client.config.scheduler.max_model_len
    parent = None if state.is_served(name) else state.model_name
    card = ModelCard(name, state.created, longest, state.defaults, root=name, parent=parent)
    card.images = _accepted_images(state)
    return card


def _accepted_images(state: ServerState) -> AcceptedImages | UnsetType:
    config = state.client.config
    if not config.images:
        return UNSET
    settings = ImageArgs.of(config.args)
    # Base64 makes four bytes of three. The rest of the body needs some room as well.
    fitting = (state.args.max_body_bytes - _BODY_REST) * 3 // 4
    return AcceptedImages(
        settings.max_images,
        max(0, min(settings.max_image_bytes, fitting)),
        settings.max_image_pixels,
    )


def _shown(state: ServerState, key: ApiKey, name: str) -> bool:
    """Whether a key may use a model. The served model's names are one model's."""
    return key.may_use(state.model_name if state.is_served(name) else name)


ROUTES = (
    Route("get", "/v1/models", list_models, "The served model and its adapters", answer=ModelList),
    Route(
        "get",
        "/v1/models/{model:path}",
        show_model,
        "The served model, or an adapter",
        answer=ModelCard,
    ),
)
