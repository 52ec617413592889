"""Routes for trainers by the names of vLLM and TRL, for admins."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.features.weight_updates import control
from quire.features.weight_updates.api.weight_routes import (
    MOST_TENSORS,
    STATE_ROUTE,
    TrainerGroup,
    described,
    pause_as,
    read,
    resume,
)
from quire.features.weight_updates.calls import (
    LEAVE,
    STATE,
    UpdateWeights,
)
from quire.features.weight_updates.payloads import (
    GroupSource,
    JoinGroup,
)
from quire.server.apis.route import Route, check_admin
from quire.server.http.query import Query
from quire.server.http.sse import json_response
from quire.server.http.strict_model import Name, StrictModel
from quire.server.state import state_of


class CommunicatorBody(StrictModel):
    """Body of `/init_communicator`. The trainer is the last rank of the group.

    client_device_uuid has no effect. backend: "gloo" on a CPU.
    """

    host: Name
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    client_device_uuid: str | None = Field(default=None, max_length=256)
    backend: Literal["gloo", "nccl"] | None = None


class NamedParamBody(StrictModel):
    """Body of `/update_named_param`: one tensor, which the trainer broadcasts next."""

    name: Name
    dtype: str = Field(max_length=32)
    shape: list[int] = Field(max_length=8)


class InitInfo(TrainerGroup):
    """Part of the body of `/init_weight_transfer_engine`. packed: vLLM's packed broadcasts are not
    supported."""

    backend: Literal["gloo", "nccl"] | None = None
    packed: Literal[False] | None = None


class InitEngineBody(StrictModel):
    """Body of `/init_weight_transfer_engine`. The trainer is the first rank of the group."""

    init_info: InitInfo


class UpdateInfo(StrictModel):
    """Part of the body of `/update_weights`: tensors in the order of the trainer's broadcasts."""

    names: list[Name] = Field(max_length=MOST_TENSORS)
    dtype_names: list[str] = Field(max_length=MOST_TENSORS)
    shapes: list[list[int]] = Field(max_length=MOST_TENSORS)
    packed: Literal[False] | None = None


class UpdateWeightsBody(StrictModel):
    """Body of `/update_weights`."""

    update_info: UpdateInfo


class StartUpdateBody(StrictModel):
    """Body of `/start_weight_update` and `/finish_weight_update`."""


class WorldSize(msgspec.Struct):
    """world_size: ranks of all engines."""

    world_size: int


class TrainerAnswer(msgspec.Struct):
    message: str


class PauseState(msgspec.Struct):
    is_paused: bool


_COMMUNICATOR = "communicator"
_TRANSFER = "weight_transfer"


async def init_transfer(request: Request) -> Response:
    """Joins a trainer's group, and answers when all members have joined."""
    info = (await read(request, InitEngineBody)).init_info
    client = state_of(request).client
    backend = info.backend or ("gloo" if client.config.device == "cpu" else "nccl")
    group = info.member(_TRANSFER, backend)
    await control.join(client, group)
    return json_response(TrainerAnswer("Weight transfer initialized"))


async def start_update(request: Request) -> Response:
    """Lets requests stand still, so that they see several updates as one."""
    await read(request, StartUpdateBody)
    return await pause_as(request, "keep")


async def finish_update(request: Request) -> Response:
    await read(request, StartUpdateBody)
    return await resume(request)


async def update_from_transfer(request: Request) -> Response:
    info = (await read(request, UpdateWeightsBody)).update_info
    tensors = described(info.names, info.dtype_names, info.shapes)
    asked = UpdateWeights(GroupSource(_TRANSFER, tensors), "keep")
    await control.update(state_of(request).client, asked)
    return json_response(TrainerAnswer("Weights updated"))


async def init_communicator(request: Request) -> Response:
    body = await read(request, CommunicatorBody)
    client = state_of(request).client
    backend = body.backend or ("gloo" if client.config.device == "cpu" else "nccl")
    asked = JoinGroup(body.host, body.port, 0, body.world_size, _COMMUNICATOR, backend)
    # TRL starts its own side only after this answer.
    control.join_later(client, asked)
    return json_response(TrainerAnswer("Request received, initializing communicator"))


async def update_named_param(request: Request) -> Response:
    body = await read(request, NamedParamBody)
    tensors = described([body.name], [body.dtype], [body.shape])
    client = state_of(request).client
    source = GroupSource(_COMMUNICATOR, tensors, control.world_size(client))
    control.update_later(client, UpdateWeights(source, "keep"))
    return json_response(TrainerAnswer("Request received, updating named parameter"))


async def close_communicator(request: Request) -> Response:
    await control.call_all(state_of(request).client, LEAVE, _COMMUNICATOR)
    return json_response(TrainerAnswer("Request received, closing communicator"))


async def get_world_size(request: Request) -> Response:
    Query(request)
    return json_response(WorldSize(control.world_size(state_of(request).client)))


async def pause_by_query(request: Request) -> Response:
    mode = Query(request, "mode").choice("mode", ("abort", "wait", "keep", "retract"))
    return await pause_as(request, mode)  # type: ignore[arg-type]


async def is_paused(request: Request) -> Response:
    Query(request)
    state = await control.call_all(state_of(request).client, STATE, None)
    return json_response(PauseState(state.paused))


_MESSAGE: dict[str, Any] = {"answer": TrainerAnswer, "check": check_admin}
_MODES: dict[str, Any] = {"mode": {"type": "string", "enum": ["abort", "wait", "keep", "retract"]}}

ROUTES: tuple[Route, ...] = (
    Route("post", "/init_communicator", init_communicator,
          "Join a trainer's group (TRL's name), for admins", CommunicatorBody, **_MESSAGE),
    Route("post", "/update_named_param", update_named_param,
          "Write one tensor from the group (TRL's name), for admins", NamedParamBody, **_MESSAGE),
    Route("post", "/close_communicator", close_communicator,
          "Leave a trainer's group (TRL's name), for admins", **_MESSAGE),
    Route("get", "/get_world_size", get_world_size, "Ranks of all engines (TRL's name)",
          answer=WorldSize),
    Route("post", "/init_weight_transfer_engine", init_transfer,
          "Join a trainer's group (vLLM's name), for admins", InitEngineBody, **_MESSAGE),
    Route("post", "/start_weight_update", start_update,
          "Plan no steps during updates (vLLM's name), for admins", StartUpdateBody, **STATE_ROUTE),
    Route("post", "/update_weights", update_from_transfer,
          "Write weights from the group (vLLM's name), for admins", UpdateWeightsBody, **_MESSAGE),
    Route("post", "/finish_weight_update", finish_update,
          "Plan steps again (vLLM's name), for admins", StartUpdateBody, **STATE_ROUTE),
    Route("post", "/pause", pause_by_query, "Plan no more steps (vLLM's name), for admins",
          query=_MODES, **STATE_ROUTE),
    Route("post", "/resume", resume, "Plan steps again (vLLM's name), for admins", **STATE_ROUTE),
    Route("get", "/is_paused", is_paused, "Whether the engine is paused (vLLM's name)",
          answer=PauseState),
)  # fmt: skip
