"""`/v1/embeddings` and `/pooling`: any model's hidden states as vectors."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import msgspec
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.pooling_params import Pooling, PoolingParams
from quire.server.apis.openai.convert import prompts_of
from quire.server.apis.openai.tokenize import (
    ConversationFields,
    Messages,
    refuse_without_messages,
    rendered_only,
)
from quire.server.apis.scoring.vectors import (
    MAX_INPUTS,
    Encoding,
    PromptNameFields,
    VectorUsage,
    encoded,
    model_of,
    read_fields,
    usage_of,
    vectors_of,
)
from quire.server.chat.prompt import render_prompt
from quire.server.errors import ApiError
from quire.server.http.sse import json_response
from quire.server.http.strict_model import INT32_MAX, TextsOrIds
from quire.server.state import new_id, state_of

if TYPE_CHECKING:
    from quire.arrays import Float32
    from quire.engine.loop.embedding import Embedding

_MANY_NUMBERS = 50_000
"""Numbers above which the answer is written off the event loop."""


class EmbeddingRequest(PromptNameFields, ConversationFields):
    """Body of `/v1/embeddings`. `input`: a string, token ids, or a list of either. `prompt_name`:
    the model's prompt to put before each text.

    vLLM's `messages` may replace `input`. The chat template makes one text of the conversation, by
    default without the beginning of an answer, and the answer has one vector for that text.
    """

    input: TextsOrIds = None
    messages: Messages | None = None
    encoding_format: Encoding | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.messages is None:
            refuse_without_messages(self)
        if self.input is None and self.messages is None:
            raise RequestError(
                "Missing required parameter: 'input'.",
                param="input",
                code="missing_required_parameter",
            )
        if self.input is not None and self.messages is not None:
            raise RequestError("'input' and 'messages' exclude each other.", param="messages")
        return self


class PoolingRequest(EmbeddingRequest):
    """Body of `/pooling`, as that of embeddings.

    `pooling` and `normalize` say how a vector is made.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None


class EmbeddingObject(msgspec.Struct):
    """One embedding: numbers, or the base64 text of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    data: list[EmbeddingObject]
    model: str
    usage: VectorUsage
    object: str = "list"


class PoolingObject(msgspec.Struct):
    """One vector, as in `EmbeddingObject`, or a list with a vector for each token."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PoolingList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PoolingObject]
    usage: VectorUsage
    object: str = "list"


async def embeddings(request: Request) -> Response:
    _, body = await read_fields(request, EmbeddingRequest)
    check_pooled(request)
    found = await _vectors(
        request, body, PoolingParams(dimensions=body.dimensions, prompt_name=body.prompt_name)
    )

    def answer() -> EmbeddingList:
        data = [
            EmbeddingObject(index, encoded(each.values, body.encoding_format))
            for index, each in enumerate(found)
        ]
        return EmbeddingList(data, model_of(request), usage_of(found))

    return await _written(found, answer)


async def pooling(request: Request) -> Response:
    _, body = await read_fields(request, PoolingRequest)
    params = PoolingParams(
        pooling=body.pooling,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
    )
    found = await _vectors(request, body, params)

    def answer() -> PoolingList:
        data = [
            PoolingObject(index, _encoded_rows(each.values, body.encoding_format))
            for index, each in enumerate(found)
        ]
        name, now = new_id("pool"), int(time.time())
        return PoolingList(name, now, model_of(request), data, usage_of(found))

    return await _written(found, answer)


def check_pooled(request: Request) -> None:
    """Refuses embeddings of a model that has a vector for each token."""
    if state_of(request).client.config.task == "tokens":
        raise ApiError(
            400,
            "This model has a vector for each token: /pooling returns them, and /score and /rerank "
            "compare texts by them.",
            code="model_gives_no_vectors",
        )


def _encoded_rows(values: Float32, encoding: Encoding | None) -> list[float | list[float]] | str:
    """Returns a vector as `encoded` does, or the vector of each token."""
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    listed: list[float | list[float]] = values.tolist()
    return listed


async def _vectors(
    request: Request, body: EmbeddingRequest, params: PoolingParams
) -> list[Embedding]:
    if body.messages is None:
        inputs = prompts_of(body.input, "input", MAX_INPUTS)
        return (await vectors_of(request, body, {"input": inputs}, params))["input"]
    state = state_of(request)
    tokenizer = state.tokenizer("messages")
    dialogue = rendered_only(state, body, body.messages)
    dialogue.add_generation_prompt = body.add_generation_prompt is True
    for part in dialogue.parts:
        raise ApiError(
            400,
            f"Invalid value for '{part.param}': embeddings of images are not supported.",
            param=part.param,
            code="unsupported_parameter",
        )
    prompt = (await state.count(lambda: render_prompt(tokenizer, dialogue))).token_ids
    return (await vectors_of(request, body, {"messages": [prompt]}, params))["messages"]


async def _written(found: list[Embedding], answer: Callable[[], Any]) -> Response:
    def write() -> Response:
        return json_response(answer())

    if sum(each.values.size for each in found) > _MANY_NUMBERS:
        return await asyncio.to_thread(write)
    return write()
