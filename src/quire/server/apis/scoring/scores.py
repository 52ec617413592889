"""`/score` and `/rerank`: how alike texts are, or how relevant documents are to a query.

A reranker reads both texts of a pair at once. Of other models each text becomes a vector, or a
vector for each token, and the score is the similarity of both.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.loop.scoring import check_scores, pair_value, similarities
from quire.errors import RequestError
from quire.pooling_params import PoolingParams
from quire.server.apis.scoring.vectors import (
    MAX_INPUTS,
    VectorFields,
    VectorUsage,
    model_of,
    pairs_of,
    read_fields,
    run_inputs,
    usage_of,
    vectors_of,
)
from quire.server.errors import ApiError
from quire.server.http.sse import json_response
from quire.server.http.strict_model import INT32_MAX, StrictModel
from quire.server.state import new_id, state_of

if TYPE_CHECKING:
    from quire.arrays import Float32

_UNIT = PoolingParams()
"""Vectors of length 1: the product of two of them is their cosine."""


def _one_text(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Document(StrictModel):
    """A document in Cohere's and Jina's other shape."""

    text: str


Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    BeforeValidator(_one_text, json_schema_input_type=list[str] | str),
]


_SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""vLLM's names for the two sides of `/score`."""


class ScoreRequest(VectorFields):
    """Body of `/score`: one text and one or many others, or as many of each.

    The two sides have one of the pairs of names in `_SIDES`.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _two_sides(self) -> ScoreRequest:
        given = [name for name in dict.fromkeys(sum(_SIDES, ())) if getattr(self, name) is not None]
        if tuple(given) in _SIDES:
            return self
        fits = [pair for pair in _SIDES if set(given) <= set(pair)]
        if not fits:
            known = ", ".join(f"{first!r} with {second!r}" for first, second in _SIDES)
            raise RequestError(
                f"{given[-1]!r} does not go with {given[0]!r}; the pairs are {known}.",
                param=given[-1],
                code="invalid_value",
            )
        missing = [next(name for name in pair if name not in given) for pair in fits]
        raise RequestError(
            f"Missing required parameter: {missing[0]!r}.",
            param=missing[0],
            code="missing_required_parameter",
        )

    @property
    def sides(self) -> dict[str, list[str]]:
        """The texts of the two sides, by the names that the request gave them."""
        texts = {name: getattr(self, name) for pair in _SIDES for name in pair}
        return {name: each for name, each in texts.items() if each is not None}


class RerankRequest(VectorFields):
    """Body of `/rerank`. top_n: 0 is all."""

    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)
    ]
    top_n: int | None = Field(None, ge=0, le=INT32_MAX)
    return_documents: bool | None = None


class ScoreObject(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreObject]
    usage: VectorUsage
    object: str = "list"


class RankedText(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """index: the document's place in the request."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(msgspec.Struct):
    """The documents, most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: VectorUsage


async def score(request: Request) -> Response:
    _, body = await read_fields(request, ScoreRequest)
    (one, first), (other, second) = body.sides.items()
    if len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"'{one}' has {len(first)} texts and '{other}' {len(second)}: one to all, or as many "
            "of each, can be scored.",
            param=one,
            code="invalid_value",
        )
    if len(first) + len(second) > MAX_INPUTS:
        raise ApiError(
            400,
            f"At most {MAX_INPUTS} texts of '{one}' and '{other}' together are allowed, got "
            f"{len(first) + len(second)}.",
            param=other,
            code="invalid_value",
        )
    scores, usage = await _scored(request, body, (one, first), (other, second))
    data = [ScoreObject(index, each) for index, each in enumerate(scores.tolist())]
    now = int(time.time())
    return json_response(ScoreList(new_id("score"), now, model_of(request), data, usage))


async def rerank(request: Request) -> Response:
    _, body = await read_fields(request, RerankRequest)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, usage = await _scored(request, body, ("query", [body.query]), ("documents", texts))
    order = np.argsort(-scores, kind="stable")[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        RankedDocument(place, float(scores[place]), RankedText(texts[place]) if shown else None)
        for place in order.tolist()
    ]
    return json_response(RerankAnswer(new_id("rerank"), model_of(request), results, usage))


async def _scored(
    request: Request,
    body: VectorFields,
    one: tuple[str, list[str]],
    other: tuple[str, list[str]],
) -> tuple[Float32, VectorUsage]:
    """Returns the scores of pairs, float32 [pairs], and the usage.

    Args:
        one: the field and the first texts, one for all pairs or one for each.
        other: the field and the second texts.
    """
    config = state_of(request).client.config
    check_scores(config)
    (first_field, first), (second_field, second) = one, other
    if config.task == "classify":
        queries = first * (len(second) // len(first))
        pairs = list(zip(queries, second, strict=True))
        inputs = await pairs_of(request, body, second_field, pairs)
        found = await run_inputs(
            request, body, inputs, "classes", lambda raw: pair_value(raw, config)
        )
        return np.concatenate([each.values for each in found]), usage_of(found)
    vectors = await vectors_of(
        request, body, {first_field: [*first], second_field: [*second]}, _UNIT
    )
    both = [[each.values for each in vectors[field]] for field in (first_field, second_field)]
    return similarities(*both), usage_of([*vectors[first_field], *vectors[second_field]])
