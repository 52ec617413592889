"""Ollama's routes. A server has them with `--ollama-api`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.pooling_params import PoolingParams
from quire.server.apis.ollama.answer import LINES, AnswerWriter, OllamaAnswer, loaded
from quire.server.apis.ollama.convert import (
    NAMES,
    chat_dialogue,
    generate_dialogue,
    model_name,
    params_of,
)
from quire.server.apis.ollama.models import (
    RunningList,
    ShownModel,
    TagList,
    VersionAnswer,
    loaded_models,
    show,
    tags,
    version,
)
from quire.server.apis.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from quire.server.apis.openai.completions import charge
from quire.server.apis.openai.fim import infill
from quire.server.apis.route import Handler, Route
from quire.server.apis.scoring.embeddings import check_pooled
from quire.server.apis.scoring.vectors import VectorFields, usage_of, vectors_of
from quire.server.chat.choice_parser import plain_events
from quire.server.chat.dialogue import ChatEvent
from quire.server.chat.generation import ChatGeneration, prepare
from quire.server.chat.text import CompletionUsage, Prompt, TextGeneration
from quire.server.context.request_context import context_of
from quire.server.errors import ApiError, blame_field, rename_fields
from quire.server.http.bodies import Model, read_any_body
from quire.server.http.sse import EventStream, json_response, start_stream, unless_disconnected
from quire.server.state import ServerState, new_id, state_of

_TRUNCATED: dict[str, Any] = {"truncate_prompt_tokens": -1, "truncation_side": "right"}
"""Fields of a request whose texts are cut at their end, as Ollama cuts them."""


class EmbedAnswer(msgspec.Struct):
    """Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


class PullAnswer(msgspec.Struct):
    status: str = "success"


async def chat(request: Request) -> Response:
    began = time.perf_counter_ns()
    state, body, model = await _read(request, OllamaChatRequest)
    if not body.messages:
        return json_response(loaded(model, chat=True))
    tokenizer = state.tokenizer("messages")
    with rename_fields(NAMES):
        dialogue = await asyncio.to_thread(chat_dialogue, state, body)
        reply = await prepare(state, dialogue, context_of(request))
    writer = AnswerWriter(
        model,
        reply,
        tokenizer,
        chat=True,
        began=began,
        top_logprobs=dialogue.params.logprobs,
    )
    with rename_fields(NAMES), blame_field("messages"):
        return await _answer(request, state, reply, writer, body.stream is not False)


async def generate(request: Request) -> Response:
    began = time.perf_counter_ns()
    state, body, model = await _read(request, OllamaGenerateRequest)
    if not body.prompt and not body.suffix:
        return json_response(loaded(model, chat=False))
    tokenizer = state.tokenizer("prompt")
    reply: ChatGeneration | PlainGeneration
    prompt_ids = None
    with rename_fields(NAMES):
        if body.raw or body.suffix:
            reply = await _plain(request, state, body)
            params = reply.params
        else:
            dialogue = await asyncio.to_thread(generate_dialogue, state, body)
            reply = await prepare(state, dialogue, context_of(request), body.context or ())
            params = dialogue.params
            # A context has no images, so tokens that stand for one would mean nothing.
            prompt_ids = None if dialogue.parts else reply.prompt_token_ids
    writer = AnswerWriter(
        model,
        reply,
        tokenizer,
        chat=False,
        began=began,
        prompt_ids=prompt_ids,
        top_logprobs=params.logprobs,
    )
    with rename_fields(NAMES):
        return await _answer(request, state, reply, writer, body.stream is not False)


class PlainGeneration:
    """A generation from a prompt without a chat template, as a source of chat events."""

    def __init__(self, generation: TextGeneration) -> None:
        self.params = generation.params
        self.start = generation.start
        self.ready = generation.ready
        self.close = generation.close
        self._generation = generation

    @property
    def usage(self) -> CompletionUsage:
        return self._generation.usage

    async def batches(self) -> AsyncIterator[list[ChatEvent]]:
        async for pieces in self._generation.batches():
            yield [event for piece in pieces for event in plain_events(piece, False)]


async def _plain(
    request: Request, state: ServerState, body: OllamaGenerateRequest
) -> PlainGeneration:
    """Returns the generation of a raw prompt, or of the text before a suffix."""
    params, context, prompt = params_of(state, body), context_of(request), body.prompt
    inputs: list[Prompt] = [prompt]
    if body.suffix:
        suffix, tokenizer = body.suffix, state.tokenizer("suffix")
        inputs = [await asyncio.to_thread(infill, tokenizer, prompt, suffix)]
    charge(state, context, inputs, params, 1)
    return PlainGeneration(
        TextGeneration(state, context, inputs, params, request_id=new_id("ollama"))
    )


async def _answer(
    request: Request,
    state: ServerState,
    reply: ChatGeneration | PlainGeneration,
    writer: AnswerWriter,
    stream: bool,
) -> Response:
    if not stream:
        return json_response(await unless_disconnected(request.receive, _whole(reply, writer)))
    await start_stream(request, reply)
    return EventStream(
        reply,
        writer.write,
        writer.finish,
        fail=writer.fail,
        metrics=state.metrics,
        media_type=LINES,
    )


async def _whole(reply: ChatGeneration | PlainGeneration, writer: AnswerWriter) -> OllamaAnswer:
    reply.start()
    events: list[ChatEvent] = []
    try:
        async for batch in reply.batches():
            writer.note_first()
            events += batch
    finally:
        await reply.close()
    return writer.whole(events)


async def embed(request: Request) -> Response:
    began = time.perf_counter_ns()
    _, body, model = await _read(request, OllamaEmbedRequest)
    check_pooled(request)
    texts: list[Prompt] = [body.input] if isinstance(body.input, str) else [*body.input]
    params = PoolingParams(dimensions=body.dimensions or None)
    fields = VectorFields(**({} if body.truncate is False else _TRUNCATED))
    found = (await vectors_of(request, fields, {"input": texts}, params))["input"] if texts else []
    answer = EmbedAnswer(
        model,
        [each.values.tolist() for each in found],
        time.perf_counter_ns() - began,
        0,
        usage_of(found).prompt_tokens,
    )
    return json_response(answer)


async def embeddings(request: Request) -> Response:
    _, body, _ = await _read(request, OllamaEmbeddingsRequest)
    check_pooled(request)
    if not body.prompt:
        return json_response(EmbeddingsAnswer([]))
    fields = VectorFields(**_TRUNCATED)
    found = await vectors_of(request, fields, {"prompt": [body.prompt]}, PoolingParams())
    return json_response(EmbeddingsAnswer(found["prompt"][0].values.tolist()))


async def _read(request: Request, model: type[Model]) -> tuple[ServerState, Model, str]:
    """Returns the state, the validated body, and the name of its model in the answer.

    Raises:
        ApiError: the body is invalid, or there is no such model.
    """
    state = state_of(request)
    body = await read_any_body(request, model, state.args.max_body_bytes)
    state.check_alive()
    name: str = body.model  # type: ignore[attr-defined]
    state.check_model(model_name(name, state), context_of(request))
    return state, body, name


async def pull(request: Request) -> Response:
    """Answers that a served model is there. There is no other to pull."""
    state = state_of(request)
    body = await read_any_body(request, OllamaPullRequest, state.args.max_body_bytes)
    try:
        state.check_model(model_name(body.named, state), context_of(request))
    except ApiError:
        raise _refuse("pull models", 404) from None
    answer = msgspec.json.encode(PullAnswer())
    if body.stream is False:
        return Response(answer, media_type="application/json")
    return Response(answer + b"\n", media_type=LINES)


def _refuse(what: str, status: int = 501) -> ApiError:
    return ApiError(
        status,
        f"This server cannot {what}: `quire serve MODEL` chooses the model at the start.",
        code="unsupported_route",
        retry=False,
    )


def _refusal(what: str) -> Handler:
    """Returns a handler that refuses a route which manages Ollama's models."""

    async def refuse(request: Request) -> Response:
        raise _refuse(what)

    return refuse


_REFUSED: dict[str, tuple[str, str]] = {
    "/api/push": ("post", "push models"),
    "/api/create": ("post", "create models"),
    "/api/copy": ("post", "copy models"),
    "/api/delete": ("delete", "delete models"),
    "/api/blobs/{digest}": ("post", "store blobs"),
}


def _route(
    method: str, path: str, handler: Callable[[Request], Awaitable[Response]], summary: str,
    **more: Any,
) -> Route:  # fmt: skip
    return Route(method, path, handler, summary, setting="ollama_api", **more)


ROUTES = (
    _route("post", "/api/chat", chat, "Answer a conversation, as Ollama's API does",
           body=OllamaChatRequest, answer=OllamaAnswer, stream=LINES, counted=True),
    _route("post", "/api/generate", generate, "Answer a prompt, as Ollama's API does",
           body=OllamaGenerateRequest, answer=OllamaAnswer, stream=LINES, counted=True),
    _route("post", "/api/embed", embed, "Embed texts, as Ollama's API does",
           body=OllamaEmbedRequest, answer=EmbedAnswer, counted=True),
    _route("post", "/api/embeddings", embeddings, "Embed a text, as Ollama's older API does",
           body=OllamaEmbeddingsRequest, answer=EmbeddingsAnswer, counted=True),
    _route("get", "/api/tags", tags, "The served model and its adapters, for Ollama's clients",
           answer=TagList),
    _route("post", "/api/show", show, "What is known of a model, for Ollama's clients",
           body=OllamaShowRequest, answer=ShownModel),
    _route("post", "/api/pull", pull, "Tells Ollama's clients that a served model is there",
           body=OllamaPullRequest, answer=PullAnswer, stream=LINES),
    _route("get", "/api/ps", loaded_models, "The loaded models, for Ollama's clients",
           answer=RunningList),
    _route("get", "/api/version", version, "The version of Ollama's API that these routes follow",
           answer=VersionAnswer, answers_head=True),
    *(_route(method, path, _refusal(what), "") for path, (method, what) in _REFUSED.items()),
)  # fmt: skip
