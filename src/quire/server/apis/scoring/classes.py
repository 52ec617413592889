"""`/classify`: the classes of texts, of models with a classification head."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.loop.scoring import class_values
from quire.errors import RequestError
from quire.server.apis.openai.convert import prompts_of
from quire.server.apis.scoring.vectors import (
    MAX_INPUTS,
    VectorFields,
    VectorUsage,
    inputs_of,
    model_of,
    read_fields,
    run_inputs,
    usage_of,
)
from quire.server.errors import ApiError
from quire.server.http.sse import json_response
from quire.server.http.strict_model import TextsOrIds
from quire.server.state import new_id, state_of


class ClassifyRequest(VectorFields):
    """Body of `/classify`. `input`: a string, token ids, or a list of either.

    `use_activation`: false answers the logits instead of probabilities.
    """

    input: TextsOrIds = None
    use_activation: bool | None = None


class ClassObject(msgspec.Struct):
    """The classes of one input.

    Attributes:
        label: name of the likeliest class.
        probs: the value of each class.
    """

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassObject]
    usage: VectorUsage
    object: str = "list"


async def classify(request: Request) -> Response:
    config = state_of(request).client.config
    if config.task != "classify":
        raise ApiError(
            404,
            "This server has no /classify: it serves no checkpoint with a classification head "
            "(...ForSequenceClassification). /v1/embeddings and /score take texts.",
            code="not_found",
        )
    _, body = await read_fields(request, ClassifyRequest)
    if body.input is None:
        raise RequestError(
            "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
        )
    inputs = await inputs_of(request, body, "input", prompts_of(body.input, "input", MAX_INPUTS))
    activate = body.use_activation is not False
    found = await run_inputs(
        request, body, inputs, "classes", lambda raw: class_values(raw, config, activate=activate)
    )
    data = [
        ClassObject(index, config.labels[int(each.values.argmax())], each.values.tolist(),
                    len(each.values))
        for index, each in enumerate(found)
    ]  # fmt: skip
    now = int(time.time())
    answer = ClassList(new_id("classify"), now, model_of(request), data, usage_of(found))
    return json_response(answer)
