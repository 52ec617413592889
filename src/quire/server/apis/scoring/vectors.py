"""Runs prompts to vectors: what embeddings, pooling, scores and reranking share."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request

from quire.engine.loop.embedding import Embedding, finish, pooling_of, with_prompt
from quire.errors import OverloadedError, RequestError
from quire.features.call import RequestField
from quire.features.pooling.fields import POOLING, SECOND_TEXT
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
from quire.text.pairs import cut_text, encode_pair

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


class PromptNameFields(VectorFields):
    """Fields of routes that may put one of the model's prompts before each text."""

    prompt_name: Name | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt to run.

    Attributes:
        field: the field of the request that it comes from, which errors name.
        prompt: a text or token ids.
        second: where the second text of a pair begins, or None.
    """

    field: str
    prompt: Prompt
    second: int | None = None


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
    config = state_of(request).client.config
    kind = pooling_of(params, config)
    inputs = []
    for field, prompts in groups.items():
        with blame_field(field):
            prompted = [with_prompt(prompt, params, config) for prompt in prompts]
        inputs += await inputs_of(request, body, field, prompted)
    vectors = await run_inputs(request, body, inputs, kind, lambda raw: finish(raw, params))
    answer: dict[str, list[Embedding]] = {field: [] for field in groups}
    for each, vector in zip(inputs, vectors, strict=True):
        answer[each.field].append(vector)
    return answer


async def inputs_of(
    request: Request, body: VectorFields, field: str, prompts: list[Prompt]
) -> list[Input]:
    """Returns prompts as inputs. Many or long texts are tokenized off the event loop.

    Args:
        field: the field that they come from, which errors name.
    """
    state = state_of(request)
    if any(isinstance(prompt, str) for prompt in prompts):
        state.tokenizer(field)
    with blame_field(field):
        return [Input(field, prompt) for prompt in await _tokenized(state, body, prompts)]


async def run_inputs(
    request: Request,
    body: VectorFields,
    inputs: list[Input],
    kind: str,
    finish: Callable[[Float32], Float32],
) -> list[Embedding]:
    """Returns what the engine makes of all inputs, in their order.

    Args:
        kind: the value of the request field `POOLING`.
        finish: turns what the engine returns into an embedding's values.

    Raises:
        ApiError, RequestError: as `vectors_of`.
    """
    state, context = state_of(request), context_of(request)
    if state.args.log_prompts:
        context.prompts += [prompt_text(state.client.tokenizer, each.prompt) for each in inputs]
    context.take_tokens(sum(estimate_tokens(each.prompt) for each in inputs), 0)
    return await unless_disconnected(
        request.receive, _run_all(state, context, body, inputs, kind, finish)
    )


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


async def pairs_of(
    request: Request, body: VectorFields, field: str, pairs: list[tuple[str, str]]
) -> list[Input]:
    """Returns pairs of texts as inputs, tokenized off the event loop.

    Args:
        field: the field of the second texts, which errors name.
    """
    state = state_of(request)
    tokenizer, config = state.tokenizer(field), state.client.config
    most = _most_kept(state, body)

    def tokenized() -> list[Input]:
        found = []
        for first, second in pairs:
            ids, start = encode_pair(
                tokenizer, first, second, most=most, longest=config.longest_prompt,
                side=body.truncation_side,
            )  # fmt: skip
            found.append(Input(field, ids.tolist(), start))
        return found

    with blame_field(field):
        return await asyncio.to_thread(tokenized)


def _most_kept(state: ServerState, body: VectorFields) -> int | None:
    """Returns the tokens to which an encoder's text is cut, or None."""
    keep, longest = body.truncate_prompt_tokens, state.client.config.longest_prompt
    return longest if keep == -1 else keep


async def _tokenized(state: ServerState, body: VectorFields, prompts: list[Prompt]) -> list[Prompt]:
    most, keep = state.client.config.scheduler.max_model_len, body.truncate_prompt_tokens
    if keep is not None and state.client.config.encoder:
        return await _cut_texts(state, body, prompts)
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


async def _cut_texts(state: ServerState, body: VectorFields, prompts: list[Prompt]) -> list[Prompt]:
    """Returns an encoder's prompts as token ids. Texts keep their special tokens."""
    tokenizer, most = state.client.tokenizer, _most_kept(state, body)
    assert most is not None

    def cut(prompt: Prompt) -> Prompt:
        if isinstance(prompt, str) and tokenizer is not None:
            return cut_text(tokenizer, prompt, most, body.truncation_side).tolist()  # type: ignore[no-any-return]
        assert not isinstance(prompt, str)  # the route has refused it
        return prompt[-most:] if body.truncation_side == "left" else prompt[:most]

    return await asyncio.to_thread(lambda: [cut(prompt) for prompt in prompts])


async def _run_all(
    state: ServerState,
    context: RequestContext,
    body: VectorFields,
    inputs: list[Input],
    kind: str,
    finish: Callable[[Float32], Float32],
) -> list[Embedding]:
    """Runs all prompts; one that fails ends the others."""
    name = new_id("embd")
    tasks = [
        asyncio.create_task(_run(state, context, body, each, kind, finish, f"{name}-{index}"))
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
    each: Input,
    kind: str,
    finish: Callable[[Float32], Float32],
    name: str,
) -> Embedding:
    metrics, start = state.metrics, time.perf_counter()
    metrics.open.inc()
    metrics.started.inc()
    reason = "abort"
    try:
        with blame_field(each.field):
            fields: dict[RequestField[Any], Any] = {**context.fields, POOLING: kind}
            if each.second is not None:
                fields[SECOND_TEXT] = each.second
            vector = await state.client.vector(
                each.prompt,
                request_id=name,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                tenant=context.tenant,
                share=context.share,
                fields=fields,
            )
            found = Embedding(
                finish(vector.values),
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
