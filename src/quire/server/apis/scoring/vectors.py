"""Runs prompts to vectors: what embeddings, pooling, scores and reranking share."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec
from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request

from quire.engine.loop.embedding import Embedding, finish, pooling_of
from quire.errors import OverloadedError, RequestError
from quire.features.pooling.fields import POOLING
from quire.pooling_params import PoolingParams
from quire.server.apis.openai.convert import estimate_tokens, prompt_text, tokenized
from quire.server.apis.openai.vocabulary import prompt_room, prompt_tokens
from quire.server.chat.text import Prompt
from quire.server.context.request_context import RequestContext, context_of, timeout_error
from quire.server.context.request_trace import PromptPhases
from quire.server.errors import blame_field
from quire.server.http.bodies import Model, read_body
from quire.server.http.sse import unless_disconnected
from quire.server.http.strict_model import INT32_MAX, Name, StrictModel, TruncationSide, check_side
from quire.server.state import ServerState, new_id, state_of

if TYPE_CHECKING:
    from quire.arrays import Float32

MAX_INPUTS = 2048
"""Most prompts of one request."""

Encoding = Literal["float", "base64"]


def _not_zero(count: int) -> int:
    if count == 0:
        raise RequestError("it must be -1 or at least 1.")
    return count


class VectorFields(StrictModel):
    """Fields that all these routes share. `user` is an identifier: accepted, not used."""

    model: Name | None = None
    user: Name | None = None
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(_not_zero)] | None
    ) = None
    truncation_side: TruncationSide | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: Name | None = None

    @model_validator(mode="after")
    def _sided(self) -> Self:
        check_side(self.truncation_side, self.truncate_prompt_tokens)
        return self


class VectorUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


async def read_fields(request: Request, model: type[Model]) -> tuple[ServerState, Model]:
    """Returns the state and the validated body, whose model the request's key may use."""
    state = state_of(request)
    body = await read_body(request, model, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(getattr(body, "model", None), context_of(request))
    return state, body


async def vectors_of(
    request: Request,
    body: VectorFields,
    groups: Mapping[str, list[Prompt]],
    params: PoolingParams,
) -> dict[str, list[Embedding]]:
    """Returns the vectors of all prompts.

    Args:
        groups: prompts by the field that they come from, which errors name.

    Raises:
        ApiError, RequestError: a prompt is wrong, or the time is over. The other prompts end then.
    """
    state, context = state_of(request), context_of(request)
    inputs = []
    for field, prompts in groups.items():
        if any(isinstance(prompt, str) for prompt in prompts):
            state.tokenizer(field)
        with blame_field(field):
            found = await _tokenized(state, body, prompts)
        inputs += [(field, prompt) for prompt in found]
    if state.args.log_prompts:
        context.prompts += [prompt_text(state.client.tokenizer, prompt) for _, prompt in inputs]
    context.take_tokens(sum(estimate_tokens(prompt) for _, prompt in inputs), 0)
    vectors = await unless_disconnected(
        request.receive, _run_all(state, context, body, inputs, params)
    )
    answer: dict[str, list[Embedding]] = {field: [] for field in groups}
    for (field, _), vector in zip(inputs, vectors, strict=True):
        answer[field].append(vector)
    return answer


def model_of(request: Request) -> str:
    """Returns the model's name in the answer."""
    return context_of(request).model or state_of(request).model_name


def usage_of(vectors: list[Embedding]) -> VectorUsage:
    count = sum(len(each.prompt_token_ids) for each in vectors)
    return VectorUsage(count, count)


def encoded(values: Float32, encoding: Encoding | None) -> list[float] | str:
    """Returns numbers, or the base64 text of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    listed: list[float] = values.tolist()
    return listed


async def _tokenized(state: ServerState, body: VectorFields, prompts: list[Prompt]) -> list[Prompt]:
    most, keep = state.client.config.scheduler.max_model_len, body.truncate_prompt_tokens
    if keep is None:
        return await tokenized(state.client.tokenizer, prompts, most)
    room = prompt_room(keep, most, None)
    return await prompt_tokens(
        state.client.tokenizer,
        prompts,
        special=True,
        most=room,
        side=body.truncation_side,
        longest=most,
    )


async def _run_all(
    state: ServerState,
    context: RequestContext,
    body: VectorFields,
    inputs: list[tuple[str, Prompt]],
    params: PoolingParams,
) -> list[Embedding]:
    """Runs all prompts; one that fails ends the others."""
    name = new_id("embd")
    tasks = [
        asyncio.create_task(_run(state, context, body, each, params, f"{name}-{index}"))
        for index, each in enumerate(inputs)
    ]
    try:
        async with asyncio.timeout(context.remaining):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        context.end = "timeout"
        raise timeout_error() from None
    except OverloadedError:
        state.note_full(context.tenant)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    state: ServerState,
    context: RequestContext,
    body: VectorFields,
    named: tuple[str, Prompt],
    params: PoolingParams,
    name: str,
) -> Embedding:
    metrics, start = state.metrics, time.perf_counter()
    metrics.open.inc()
    metrics.started.inc()
    reason = "abort"
    try:
        with blame_field(named[0]):
            pooling = pooling_of(params, state.client.config)
            vector = await state.client.vector(
                named[1],
                request_id=name,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                tenant=context.tenant,
                share=context.share,
                fields={**context.fields, POOLING: pooling},
            )
            found = Embedding(
                finish(vector.values, params),
                vector.prompt_token_ids,
                vector.num_cached_tokens,
                vector.queued,
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
