"""`/v1/embeddings`: any model's hidden states as vectors."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import TYPE_CHECKING, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import OverloadedError
from quire.pooling_params import PoolingParams
from quire.server.errors import blame_field
from quire.server.generation.text import Prompt
from quire.server.middleware.request_context import RequestContext, context_of, timed_out
from quire.server.openai.convert import estimate_tokens, prompt_text, prompts_of, tokenized
from quire.server.request_body import read_body
from quire.server.sse import json_response, unless_disconnected
from quire.server.state import ServerState, new_id, state_of
from quire.server.strict_model import INT32_MAX, Name, StrictModel, TextsOrIds
from quire.server.telemetry.request_trace import PromptPhases

if TYPE_CHECKING:
    from quire.engine.embedding import Embedding

MAX_INPUTS = 2048

_MANY_NUMBERS = 50_000
"""Numbers above which the answer is written off the event loop."""


class EmbeddingRequest(StrictModel):
    """Body of `/v1/embeddings`. `input`: a string, token ids, or a list of either."""

    input: TextsOrIds
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    user: Name | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: Name | None = None


class EmbeddingObject(msgspec.Struct):
    """One embedding: numbers, or the base64 text of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


async def embeddings(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, EmbeddingRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    inputs = prompts_of(body.input, "input", MAX_INPUTS)
    if any(isinstance(text, str) for text in inputs):
        state.tokenizer("input")
    most = state.client.config.scheduler.max_model_len
    with blame_field("input"):
        inputs = await tokenized(state.client.tokenizer, inputs, most)
    context = context_of(request)
    if state.args.log_prompts:
        context.prompts += [prompt_text(state.client.tokenizer, text) for text in inputs]
    context.take_tokens(sum(map(estimate_tokens, inputs)), 0)
    found = await unless_disconnected(request.receive, _embed_all(state, context, body, inputs))
    model = context.adapter or state.model_name
    if sum(each.values.size for each in found) > _MANY_NUMBERS:
        return await asyncio.to_thread(_answer, model, body, found)
    return _answer(model, body, found)


def _answer(model: str, body: EmbeddingRequest, found: list[Embedding]) -> Response:
    count = sum(len(each.prompt_token_ids) for each in found)
    data = [
        EmbeddingObject(index, _encoded(each, body.encoding_format))
        for index, each in enumerate(found)
    ]
    return json_response(EmbeddingList(data, model, EmbeddingUsage(count, count)))


def _encoded(found: Embedding, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(found.values.astype("<f4").tobytes()).decode()
    values: list[float] = found.values.tolist()
    return values


async def _embed_all(
    state: ServerState, context: RequestContext, body: EmbeddingRequest, inputs: list[Prompt]
) -> list[Embedding]:
    """Embeds all inputs; one that fails ends the others."""
    name = new_id("embd")
    params = PoolingParams(dimensions=body.dimensions)
    tasks = [
        asyncio.create_task(_embed(state, context, body, text, params, f"{name}-{index}"))
        for index, text in enumerate(inputs)
    ]
    try:
        with blame_field("input"):
            async with asyncio.timeout(context.remaining):
                return await asyncio.gather(*tasks)
    except TimeoutError:
        context.end = "timeout"
        raise timed_out() from None
    except OverloadedError:
        state.note_full(context.key.name)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed(
    state: ServerState,
    context: RequestContext,
    body: EmbeddingRequest,
    text: Prompt,
    params: PoolingParams,
    name: str,
) -> Embedding:
    metrics, start = state.metrics, time.perf_counter()
    metrics.open.inc()
    metrics.started.inc()
    reason = "abort"
    try:
        found = await state.client.embed(
            text,
            params,
            request_id=name,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            tenant=context.key.name,
            share=context.key.share,
            adapter=context.adapter,
        )
        reason = "stop"
    except Exception:
        reason = "error"
        raise
    except asyncio.CancelledError:
        if context.remaining == 0.0:
            reason = "timeout"
        raise
    finally:
        metrics.open.dec()
        metrics.finished.labels(reason).inc()
    context.count_prompt(len(found.prompt_token_ids), found.num_cached_tokens)
    context.end = "stop"
    metrics.count_prompt(len(found.prompt_token_ids), found.num_cached_tokens, found.queued)
    now = time.perf_counter()
    metrics.e2e.observe(now - start)
    if context.trace is not None:
        prompt, cached = len(found.prompt_token_ids), found.num_cached_tokens
        context.trace.prompts.append(PromptPhases(start, now, found.queued, None, prompt, cached))
    return found
