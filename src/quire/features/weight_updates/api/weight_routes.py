"""Quire's own HTTP routes for trainers, and parts of those by other servers' names. For admins."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.features.weight_updates import control
from quire.features.weight_updates.calls import (
    ABORT_ALL,
    LEAVE,
    PAUSE,
    RESUME,
    STATE,
    Mode,
    Pause,
    PauseMode,
    UpdateWeights,
    WeightsState,
)
from quire.features.weight_updates.payloads import (
    CudaIpcSource,
    FolderSource,
    GroupSource,
    JoinGroup,
    SharedMemorySource,
    Source,
    TensorEntry,
)
from quire.server.apis.route import Route, check_admin
from quire.server.errors import ApiError
from quire.server.http.bodies import read_body
from quire.server.http.query import Query
from quire.server.http.sse import json_response
from quire.server.http.strict_model import Name, StrictModel
from quire.server.state import state_of

Body = TypeVar("Body", bound=StrictModel)

MOST_TENSORS = 1 << 20
MOST_PATH = 4096
_NAMES = {
    "float64": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files, by PyTorch's."""


class TensorBody(StrictModel):
    """A tensor of an update; see `TensorEntry`."""

    name: Name
    dtype: str = Field(max_length=16)
    shape: list[int] = Field(max_length=8)
    offset: int = Field(default=0, ge=0)
    memory: int = Field(default=0, ge=0)


class UpdateBody(StrictModel):
    """Body of `/weights/update`. Exactly one of the four sources is given.

    folder: safetensors files. shared_memory: the name of a segment. cuda_ipc: handles of
    allocations, in hexadecimal. group: the name of a process group that the engine has joined.
    tensors: what the memory holds, or the group broadcasts.
    """

    folder: str | None = Field(default=None, max_length=MOST_PATH)
    shared_memory: Name | None = None
    cuda_ipc: list[str] | None = Field(default=None, max_length=65536)
    group: Name | None = None
    src: int = Field(default=0, ge=0)
    tensors: list[TensorBody] = Field(default=[], max_length=MOST_TENSORS)
    mode: Mode = "wait"
    label: str = Field(default="", max_length=256)
    id: str = Field(default="", max_length=32)
    whole: bool = False


class GroupBody(StrictModel):
    """Body of `/weights/join_group`; see `JoinGroup`."""

    address: Name
    port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=2)
    group: Name = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: float = Field(default=300.0, gt=0, le=86400)


class PauseBody(StrictModel):
    """Body of `/weights/pause`. mode: what happens to running requests."""

    mode: PauseMode = "keep"


async def weights(request: Request) -> Response:
    Query(request)
    return json_response(await control.call_all(state_of(request).client, STATE, None))


async def update(request: Request) -> Response:
    """Updates the weights, and answers when they are written."""
    body = await read(request, UpdateBody)
    asked = UpdateWeights(source_of(body), body.mode, body.label, body.id, body.whole)
    return json_response(await control.update(state_of(request).client, asked))


def source_of(body: UpdateBody) -> Source:
    tensors = tuple(
        TensorEntry(each.name, each.dtype, tuple(each.shape), each.offset, each.memory)
        for each in body.tensors
    )
    sources: dict[str, Source] = {}
    if body.folder is not None:
        sources["folder"] = FolderSource(body.folder)
    if body.shared_memory is not None:
        sources["shared_memory"] = SharedMemorySource(body.shared_memory, tensors)
    if body.cuda_ipc is not None:
        sources["cuda_ipc"] = CudaIpcSource(tuple(body.cuda_ipc), tensors)
    if body.group is not None:
        sources["group"] = GroupSource(body.group, tensors, body.src)
    if len(sources) != 1:
        raise ApiError(
            400,
            "An update has one source: 'folder', 'shared_memory', 'cuda_ipc' or 'group'; this one "
            f"has {len(sources)}.",
            param="folder",
        )
    return next(iter(sources.values()))


async def join_group(request: Request) -> Response:
    body = await read(request, GroupBody)
    await control.join(state_of(request).client, JoinGroup(**body.model_dump()))
    return json_response(await control.call_all(state_of(request).client, STATE, None))


class GroupNameBody(StrictModel):
    """Body of `/weights/leave_group`."""

    group: Name = "weight_update_group"


async def leave_group(request: Request) -> Response:
    body = await read(request, GroupNameBody)
    await control.call_all(state_of(request).client, LEAVE, body.group)
    return json_response(await control.call_all(state_of(request).client, STATE, None))


async def pause(request: Request) -> Response:
    body = await read(request, PauseBody)
    return await pause_as(request, body.mode)


async def pause_as(request: Request, mode: PauseMode) -> Response:
    return json_response(await control.call_all(state_of(request).client, PAUSE, Pause(mode)))


async def resume(request: Request) -> Response:
    return json_response(await control.call_all(state_of(request).client, RESUME, None))


class AbortAnswer(msgspec.Struct):
    """aborted: number of completions that were ended."""

    aborted: int


async def abort_all(request: Request) -> Response:
    """Ends all requests. Their answers end with the finish reason "abort"."""
    return json_response(
        AbortAnswer(await control.call_all(state_of(request).client, ABORT_ALL, None))
    )


# What the routes by other names use, too.


async def read(request: Request, model: type[Body]) -> Body:
    return await read_body(request, model, state_of(request).args.max_body_bytes)


def described(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> tuple[TensorEntry, ...]:
    """Returns descriptions of tensors whose dtypes have PyTorch's names or those of safetensors."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ApiError(
            400,
            f"There are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: each "
            "tensor has one of each.",
            param="names",
        )
    kinds = [dtype.removeprefix("torch.") for dtype in dtypes]
    return tuple(
        TensorEntry(name, _NAMES.get(kind, kind), tuple(shape))
        for name, kind, shape in zip(names, kinds, shapes, strict=True)
    )


class TrainerGroup(StrictModel):
    """A trainer's process group, by the names that SGLang and vLLM share."""

    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=2)

    def member(self, group: str, backend: str) -> JoinGroup:
        """Returns this engine's part in the group."""
        return JoinGroup(
            self.master_address,
            self.master_port,
            self.rank_offset,
            self.world_size,
            group,
            backend,
        )


STATE_ROUTE: dict[str, Any] = {"answer": WeightsState, "check": check_admin}
"""Settings of a route for admins that answers with the state of the weights."""

ROUTES: tuple[Route, ...] = (
    Route("get", "/weights", weights, "The version of the weights, for admins", **STATE_ROUTE),
    Route("post", "/weights/update", update, "Write new weights, for admins", UpdateBody,
          **STATE_ROUTE),
    Route("post", "/weights/join_group", join_group, "Join a trainer's group, for admins",
          GroupBody, **STATE_ROUTE),
    Route("post", "/weights/leave_group", leave_group, "Leave a trainer's group, for admins",
          GroupNameBody, **STATE_ROUTE),
    Route("post", "/weights/pause", pause, "Plan no more steps, for admins", PauseBody,
          **STATE_ROUTE),
    Route("post", "/weights/resume", resume, "Plan steps again, for admins", **STATE_ROUTE),
    Route("post", "/weights/abort_requests", abort_all, "End all requests, for admins",
          answer=AbortAnswer, check=check_admin),
)  # fmt: skip
