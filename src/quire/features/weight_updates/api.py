"""The HTTP routes for trainers: Quire's own, and thin ones by the names of SGLang, vLLM and TRL.

All of them are for admins. Payloads are JSON. Fields that hold pickled objects are refused by name.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.features.weight_updates import control
from quire.features.weight_updates.calls import (
    ABORT_ALL,
    LEAVE,
    PAUSE,
    RESUME,
    SLEEP,
    STATE,
    WAKE_UP,
    Mode,
    Pause,
    PauseMode,
    Sleep,
    UpdateWeights,
    WakeUp,
    WeightsState,
    known_tags,
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

_MOST_TENSORS = 1 << 20
_MOST_PATH = 4096
_PICKLED = {
    "serialized_named_tensors": "pickled tensors",
    "named_tensors": "pickled tensors",
    "zmq_handles": "sockets with pickled handles",
    "ipc_handles_pickled": "pickled handles",
}
"""Fields of other servers that hold pickled objects."""
_NAMES = {
    "float64": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files, by PyTorch's."""


# Quire's own routes.


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

    folder: str | None = Field(default=None, max_length=_MOST_PATH)
    shared_memory: Name | None = None
    cuda_ipc: list[str] | None = Field(default=None, max_length=65536)
    group: Name | None = None
    src: int = Field(default=0, ge=0)
    tensors: list[TensorBody] = Field(default=[], max_length=_MOST_TENSORS)
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
    asked = UpdateWeights(_source(body), body.mode, body.label, body.id, body.whole)
    return json_response(await control.update(state_of(request).client, asked))


def _source(body: UpdateBody) -> Source:
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
    return await _pause(request, body.mode)


async def _pause(request: Request, mode: PauseMode) -> Response:
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


# SGLang's names.


class Success(msgspec.Struct):
    """SGLang's answer. weight_version: the label of the version, or its number."""

    success: bool
    message: str
    weight_version: str = ""
    num_paused_requests: int = 0


class _SGLangBody(StrictModel):
    """Fields that SGLang's updates have in common.

    flush_cache has no effect, because KV of other weights is never reused. abort_all_requests ends
    running requests; otherwise they go on with their KV.
    """

    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = Field(default=None, max_length=256)
    torch_empty_cache: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_pickles(cls, data: Any) -> Any:
        for name, what in _PICKLED.items():
            if isinstance(data, dict) and name in data:
                raise RequestError(
                    f"'{name}' holds {what}, which this server never reads: name the tensors in "
                    "'tensors', and their memory in 'shared_memory' or 'cuda_ipc'.",
                    name,
                    "pickled_payload",
                )
        return data

    @property
    def mode(self) -> Mode:
        return "abort" if self.abort_all_requests else "keep"


class FromDiskBody(_SGLangBody):
    """Body of `/update_weights_from_disk`."""

    model_path: str = Field(max_length=_MOST_PATH)
    load_format: Literal["auto", "safetensors"] | None = None


class FromTensorBody(_SGLangBody):
    """Body of `/update_weights_from_tensor`. Tensors lie in shared memory or in GPU memory."""

    shared_memory: Name | None = None
    cuda_ipc: list[str] | None = Field(default=None, max_length=65536)
    tensors: list[TensorBody] = Field(default=[], max_length=_MOST_TENSORS)


class FromGroupBody(_SGLangBody):
    """Body of `/update_weights_from_distributed`."""

    names: list[Name] = Field(max_length=_MOST_TENSORS)
    dtypes: list[str] = Field(max_length=_MOST_TENSORS)
    shapes: list[list[int]] = Field(max_length=_MOST_TENSORS)
    group_name: Name = "weight_update_group"
    load_format: Literal["auto"] | None = None


class InitGroupBody(StrictModel):
    """Body of `/init_weights_update_group`."""

    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=2)
    group_name: Name = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"


class EndGroupBody(StrictModel):
    """Body of `/destroy_weights_update_group`."""

    group_name: Name = "weight_update_group"


class PauseGenerationBody(StrictModel):
    """Body of `/pause_generation`. in_place: requests stand still, and hold their KV."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class TagsBody(StrictModel):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[str] | None = Field(default=None, max_length=8)


class AbortRequestBody(StrictModel):
    """Body of `/abort_request`."""

    abort_all: Literal[True]
    rid: Literal[""] | None = None


async def update_from_disk(request: Request) -> Response:
    body = await read(request, FromDiskBody)
    return await _update(request, FolderSource(body.model_path), body)


async def update_from_tensor(request: Request) -> Response:
    body = await read(request, FromTensorBody)
    whole = UpdateBody(
        shared_memory=body.shared_memory, cuda_ipc=body.cuda_ipc, tensors=body.tensors
    )
    return await _update(request, _source(whole), body)


async def update_from_group(request: Request) -> Response:
    body = await read(request, FromGroupBody)
    tensors = _described(body.names, body.dtypes, body.shapes)
    return await _update(request, GroupSource(body.group_name, tensors), body)


async def _update(request: Request, source: Source, body: _SGLangBody) -> Response:
    asked = UpdateWeights(source, body.mode, body.weight_version or "")
    state = await control.update(state_of(request).client, asked)
    return json_response(Success(True, "Succeeded to update model weights.", version_name(state)))


def version_name(state: WeightsState) -> str:
    """Returns the label of the present version, or its number if it has none."""
    return state.label or str(state.version)


async def init_group(request: Request) -> Response:
    body = await read(request, InitGroupBody)
    asked = JoinGroup(
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.group_name,
        body.backend,
    )
    await control.join(state_of(request).client, asked)
    return json_response(Success(True, "Succeeded to initialize custom process group."))


async def end_group(request: Request) -> Response:
    body = await read(request, EndGroupBody)
    await control.call_all(state_of(request).client, LEAVE, body.group_name)
    return json_response(Success(True, "Succeeded to destroy custom process group."))


async def pause_generation(request: Request) -> Response:
    body = await read(request, PauseGenerationBody)
    return await _pause(request, "keep" if body.mode == "in_place" else body.mode)


async def flush_cache(request: Request) -> Response:
    """Forgets all prefixes. Answers 400 if running requests use some, as SGLang does."""
    state = state_of(request)
    if await state.client.reset_prefix_cache():
        return Response("Cache flushed.\n", media_type="text/plain")
    return Response("Cache not flushed: running requests use it.\n", 400, media_type="text/plain")


async def release_memory(request: Request) -> Response:
    body = await read(request, TagsBody)
    tags = known_tags(body.tags)
    client = state_of(request).client
    return json_response(await control.call_all(client, SLEEP, Sleep(1, tags, "retract")))


async def resume_memory(request: Request) -> Response:
    body = await read(request, TagsBody)
    asked = WakeUp(() if body.tags is None else known_tags(body.tags))
    return json_response(await control.call_all(state_of(request).client, WAKE_UP, asked))


class WeightVersion(msgspec.Struct):
    weight_version: str


async def weight_version(request: Request) -> Response:
    Query(request)
    state = await control.call_all(state_of(request).client, STATE, None)
    return json_response(WeightVersion(version_name(state)))


async def abort_request(request: Request) -> Response:
    await read(request, AbortRequestBody)
    return await abort_all(request)


async def update_from_ipc(request: Request) -> Response:
    """Refuses SGLang's handles, which are pickled."""
    raise ApiError(
        400,
        "/update_weights_from_ipc takes pickled handles, which this server never reads. Send plain "
        "CUDA IPC handles to /update_weights_from_tensor ('cuda_ipc').",
        code="pickled_payload",
    )


# vLLM's and TRL's names.


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


class InitInfo(StrictModel):
    """Part of the body of `/init_weight_transfer_engine`. packed: vLLM's packed broadcasts are not
    supported."""

    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=2)
    backend: Literal["gloo", "nccl"] | None = None
    packed: Literal[False] | None = None


class InitEngineBody(StrictModel):
    """Body of `/init_weight_transfer_engine`. The trainer is the first rank of the group."""

    init_info: InitInfo


class UpdateInfo(StrictModel):
    """Part of the body of `/update_weights`: tensors in the order of the trainer's broadcasts."""

    names: list[Name] = Field(max_length=_MOST_TENSORS)
    dtype_names: list[str] = Field(max_length=_MOST_TENSORS)
    shapes: list[list[int]] = Field(max_length=_MOST_TENSORS)
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
    group = JoinGroup(
        info.master_address,
        info.master_port,
        info.rank_offset,
        info.world_size,
        _TRANSFER,
        backend,
    )
    await control.join(client, group)
    return json_response(TrainerAnswer("Weight transfer initialized"))


async def start_update(request: Request) -> Response:
    """Lets requests stand still, so that they see several updates as one."""
    await read(request, StartUpdateBody)
    return await _pause(request, "keep")


async def finish_update(request: Request) -> Response:
    await read(request, StartUpdateBody)
    return await resume(request)


async def update_from_transfer(request: Request) -> Response:
    info = (await read(request, UpdateWeightsBody)).update_info
    tensors = _described(info.names, info.dtype_names, info.shapes)
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
    tensors = _described([body.name], [body.dtype], [body.shape])
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
    return await _pause(request, mode)  # type: ignore[arg-type]


async def is_paused(request: Request) -> Response:
    Query(request)
    state = await control.call_all(state_of(request).client, STATE, None)
    return json_response(PauseState(state.paused))


# Common parts.


async def read(request: Request, model: type[Body]) -> Body:
    return await read_body(request, model, state_of(request).args.max_body_bytes)


def _described(
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


_STATE: dict[str, Any] = {"answer": WeightsState, "check": check_admin}
_SUCCESS: dict[str, Any] = {"answer": Success, "check": check_admin}
_MESSAGE: dict[str, Any] = {"answer": TrainerAnswer, "check": check_admin}
_MODES: dict[str, Any] = {"mode": {"type": "string", "enum": ["abort", "wait", "keep", "retract"]}}

ROUTES: tuple[Route, ...] = (
    Route("get", "/weights", weights, "The version of the weights, for admins", **_STATE),
    Route("post", "/weights/update", update, "Write new weights, for admins", UpdateBody, **_STATE),
    Route("post", "/weights/join_group", join_group, "Join a trainer's group, for admins",
          GroupBody, **_STATE),
    Route("post", "/weights/leave_group", leave_group, "Leave a trainer's group, for admins",
          GroupNameBody, **_STATE),
    Route("post", "/weights/pause", pause, "Plan no more steps, for admins", PauseBody, **_STATE),
    Route("post", "/weights/resume", resume, "Plan steps again, for admins", **_STATE),
    Route("post", "/weights/abort_requests", abort_all, "End all requests, for admins",
          answer=AbortAnswer, check=check_admin),
    Route("post", "/update_weights_from_disk", update_from_disk,
          "Write weights from a folder (SGLang's name), for admins", FromDiskBody, **_SUCCESS),
    Route("post", "/update_weights_from_tensor", update_from_tensor,
          "Write weights from memory (SGLang's name), for admins", FromTensorBody, **_SUCCESS),
    Route("post", "/update_weights_from_distributed", update_from_group,
          "Write weights from a group (SGLang's name), for admins", FromGroupBody, **_SUCCESS),
    Route("post", "/update_weights_from_ipc", update_from_ipc,
          "Refused: its handles are pickled", answer=Success, check=check_admin),
    Route("post", "/init_weights_update_group", init_group,
          "Join a trainer's group (SGLang's name), for admins", InitGroupBody, **_SUCCESS),
    Route("post", "/destroy_weights_update_group", end_group,
          "Leave a trainer's group (SGLang's name), for admins", EndGroupBody, **_SUCCESS),
    Route("post", "/pause_generation", pause_generation,
          "Plan no more steps (SGLang's name), for admins", PauseGenerationBody, **_STATE),
    Route("post", "/continue_generation", resume,
          "Plan steps again (SGLang's name), for admins", **_STATE),
    Route("get", "/flush_cache", flush_cache, "Forget cached prefixes (SGLang's name), for admins",
          answer="text/plain", check=check_admin),
    Route("post", "/flush_cache", flush_cache, "The same", answer="text/plain", check=check_admin),
    Route("post", "/release_memory_occupation", release_memory,
          "Give memory up (SGLang's name), for admins", TagsBody, **_STATE),
    Route("post", "/resume_memory_occupation", resume_memory,
          "Take memory again (SGLang's name), for admins", TagsBody, **_STATE),
    Route("get", "/get_weight_version", weight_version,
          "The version of the weights (SGLang's name)", answer=WeightVersion),
    Route("post", "/abort_request", abort_request, "End all requests (SGLang's name), for admins",
          AbortRequestBody, answer=AbortAnswer, check=check_admin),
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
          "Plan no steps during updates (vLLM's name), for admins", StartUpdateBody, **_STATE),
    Route("post", "/update_weights", update_from_transfer,
          "Write weights from the group (vLLM's name), for admins", UpdateWeightsBody, **_MESSAGE),
    Route("post", "/finish_weight_update", finish_update,
          "Plan steps again (vLLM's name), for admins", StartUpdateBody, **_STATE),
    Route("post", "/pause", pause_by_query, "Plan no more steps (vLLM's name), for admins",
          query=_MODES, **_STATE),
    Route("post", "/resume", resume, "Plan steps again (vLLM's name), for admins", **_STATE),
    Route("get", "/is_paused", is_paused, "Whether the engine is paused (vLLM's name)",
          answer=PauseState),
)  # fmt: skip
