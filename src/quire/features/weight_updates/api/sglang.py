"""Routes for trainers by SGLang's names, for admins. Fields with pickled objects are refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.features.weight_updates import control
from quire.features.weight_updates.api.weight_routes import (
    MOST_PATH,
    MOST_TENSORS,
    STATE_ROUTE,
    AbortAnswer,
    TensorBody,
    TrainerGroup,
    UpdateBody,
    abort_all,
    described,
    pause_as,
    read,
    resume,
    source_of,
)
from quire.features.weight_updates.calls import (
    LEAVE,
    SLEEP,
    STATE,
    WAKE_UP,
    Mode,
    Sleep,
    UpdateWeights,
    WakeUp,
    WeightsState,
    known_tags,
)
from quire.features.weight_updates.payloads import (
    FolderSource,
    GroupSource,
    Source,
)
from quire.server.apis.route import Route, check_admin
from quire.server.errors import ApiError
from quire.server.http.query import Query
from quire.server.http.sse import json_response
from quire.server.http.strict_model import Name, StrictModel
from quire.server.state import state_of

_PICKLED = {
    "serialized_named_tensors": "pickled tensors",
    "named_tensors": "pickled tensors",
    "zmq_handles": "sockets with pickled handles",
    "ipc_handles_pickled": "pickled handles",
}
"""Fields of other servers that hold pickled objects."""


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

    model_path: str = Field(max_length=MOST_PATH)
    load_format: Literal["auto", "safetensors"] | None = None


class FromTensorBody(_SGLangBody):
    """Body of `/update_weights_from_tensor`. Tensors lie in shared memory or in GPU memory."""

    shared_memory: Name | None = None
    cuda_ipc: list[str] | None = Field(default=None, max_length=65536)
    tensors: list[TensorBody] = Field(default=[], max_length=MOST_TENSORS)


class FromGroupBody(_SGLangBody):
    """Body of `/update_weights_from_distributed`."""

    names: list[Name] = Field(max_length=MOST_TENSORS)
    dtypes: list[str] = Field(max_length=MOST_TENSORS)
    shapes: list[list[int]] = Field(max_length=MOST_TENSORS)
    group_name: Name = "weight_update_group"
    load_format: Literal["auto"] | None = None


class InitGroupBody(TrainerGroup):
    """Body of `/init_weights_update_group`."""

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
    return await _update(request, source_of(whole), body)


async def update_from_group(request: Request) -> Response:
    body = await read(request, FromGroupBody)
    tensors = described(body.names, body.dtypes, body.shapes)
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
    asked = body.member(body.group_name, body.backend)
    await control.join(state_of(request).client, asked)
    return json_response(Success(True, "Succeeded to initialize custom process group."))


async def end_group(request: Request) -> Response:
    body = await read(request, EndGroupBody)
    await control.call_all(state_of(request).client, LEAVE, body.group_name)
    return json_response(Success(True, "Succeeded to destroy custom process group."))


async def pause_generation(request: Request) -> Response:
    body = await read(request, PauseGenerationBody)
    return await pause_as(request, "keep" if body.mode == "in_place" else body.mode)


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


_SUCCESS: dict[str, Any] = {"answer": Success, "check": check_admin}

ROUTES: tuple[Route, ...] = (
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
          "Plan no more steps (SGLang's name), for admins", PauseGenerationBody, **STATE_ROUTE),
    Route("post", "/continue_generation", resume,
          "Plan steps again (SGLang's name), for admins", **STATE_ROUTE),
    Route("get", "/flush_cache", flush_cache, "Forget cached prefixes (SGLang's name), for admins",
          answer="text/plain", check=check_admin),
    Route("post", "/flush_cache", flush_cache, "The same", answer="text/plain", check=check_admin),
    Route("post", "/release_memory_occupation", release_memory,
          "Give memory up (SGLang's name), for admins", TagsBody, **STATE_ROUTE),
    Route("post", "/resume_memory_occupation", resume_memory,
          "Take memory again (SGLang's name), for admins", TagsBody, **STATE_ROUTE),
    Route("get", "/get_weight_version", weight_version,
          "The version of the weights (SGLang's name)", answer=WeightVersion),
    Route("post", "/abort_request", abort_request, "End all requests (SGLang's name), for admins",
          AbortRequestBody, answer=AbortAnswer, check=check_admin),
)  # fmt: skip
