"""The FastAPI application: its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire import __version__
from quire.errors import QuireError
from quire.server.apis.admin import kv_events, management, peers
from quire.server.apis.admin.adapters import load_adapter, unload_adapter
from quire.server.apis.admin.live import LiveSnapshots, live
from quire.server.apis.anthropic.routes import count_tokens, create_message
from quire.server.apis.anthropic.routes import list_models as anthropic_models
from quire.server.apis.batch.batches import cancel_batch, create_batch, list_batches, show_batch
from quire.server.apis.batch.files import (
    delete_file,
    file_content,
    list_files,
    show_file,
    upload_file,
)
from quire.server.apis.batch.service import BatchService
from quire.server.apis.batch.store import BatchStore
from quire.server.apis.openai.chat import chat_completions
from quire.server.apis.openai.completions import completions, generate
from quire.server.apis.openai.convert import model_defaults
from quire.server.apis.openai.objects import ModelCard, ModelList
from quire.server.apis.openai.stored_chats import (
    ChatStore,
    delete_chat,
    list_chats,
    list_messages,
    show_chat,
    update_chat,
)
from quire.server.apis.openai.tokenize import apply_template, detokenize, tokenize, tokenizer_info
from quire.server.apis.responses.routes import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from quire.server.apis.responses.store import ResponseStore
from quire.server.apis.scoring.embeddings import classify, embeddings, pooling
from quire.server.apis.scoring.scores import RERANK_PATHS, SCORE_PATHS, rerank, score
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKey
from quire.server.context.rate_limits import RateLimiter
from quire.server.context.request_context import context_of
from quire.server.http.auth import AuthMiddleware
from quire.server.http.context_middleware import EXPOSED_HEADERS, RequestContextMiddleware
from quire.server.http.error_handler import handle_error
from quire.server.http.replica_proofs import CHALLENGE_HEADER, PROOF_HEADER, prove
from quire.server.http.sse import ClientDisconnectedError, json_response
from quire.server.openapi import openapi
from quire.server.playground import add_playground, add_root
from quire.server.state import ServerState, state_of
from quire.server.telemetry.engine_metrics import EngineMetrics
from quire.server.telemetry.gpu_metrics import GpuMetrics

if TYPE_CHECKING:
    from quire.engine.process.client import EngineClient

_SCRAPE_TIMEOUT = 5.0


def build_app(
    client: EngineClient,
    args: ServerArgs,
    limits_file: Path | None = None,
    batch_store: BatchStore | None = None,
) -> FastAPI:
    """Returns an application that serves a launched engine, whose life it does not own.

    Args:
        limits_file: shared by processes that serve together, for their keys' limits.
        batch_store: where files and batches are kept, which whoever serves the application starts
            and stops (`app.state.batches`); None: nowhere.
    """
    # Bodies are read by `read_body`, FastAPI cannot describe them: `openapi.py` does.
    app = _App(title="Quire", version=__version__, redirect_slashes=False, openapi_url=None)
    defaults = model_defaults(client.config.model_path) if args.generation_config == "auto" else {}
    state = ServerState(client, args, defaults, rate_limiter=RateLimiter(limits_file))
    app.state.server = state
    app.state.metrics = state.metrics
    if args.vllm_metrics:
        state.metrics.vllm_model = state.model_name
    app.state.engine_metrics = EngineMetrics(
        state.metrics, state.model_name, client.config.dtype, client.config.kv_cache_dtype
    )
    app.state.gpu_metrics = GpuMetrics(state.metrics, client.config.device)
    limits = (
        args.response_store_size,
        round(args.response_store_mb * 1e6),
        args.response_store_hours * 3600.0,
    )
    app.state.response_store = ResponseStore(*limits)
    app.state.chat_store = ChatStore(*limits)
    app.state.batches = None
    if batch_store is not None:
        app.state.batches = BatchService(app, state, batch_store)
    _add_routes(app)
    if args.playground:
        app.state.live_snapshots = LiveSnapshots(client, args.live_prompts)
        app.add_api_route("/engine/live", live, methods=["GET"])
        add_playground(app)
    else:
        add_root(app)
    for kind in (QuireError, HTTPException, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_exception_handler(ClientDisconnectedError, _client_disconnected)
    app.add_middleware(AuthMiddleware, state=state)
    _add_cors(app, args)
    return app


class _App(FastAPI):
    """An application with the request context around all, unexpected errors included."""

    def build_middleware_stack(self) -> ASGIApp:
        return RequestContextMiddleware(super().build_middleware_stack(), self.state.server)


def _add_cors(app: FastAPI, args: ServerArgs) -> None:
    """Adds CORS around authentication: browsers ask for permission without a key."""
    if args.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.cors_origins,
            allow_methods=args.cors_methods,
            allow_headers=args.cors_headers,
            allow_credentials=args.cors_credentials,
            expose_headers=EXPOSED_HEADERS,
        )


def _add_routes(app: FastAPI) -> None:
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    one = "/v1/chat/completions/{completion_id}"
    app.add_api_route("/v1/chat/completions", list_chats, methods=["GET"])
    app.add_api_route(one, show_chat, methods=["GET"])
    app.add_api_route(one, update_chat, methods=["POST"])
    app.add_api_route(one, delete_chat, methods=["DELETE"])
    app.add_api_route(f"{one}/messages", list_messages, methods=["GET"])
    app.add_api_route("/v1/responses", create_response, methods=["POST"])
    app.add_api_route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"])
    one = "/v1/responses/{response_id}"
    app.add_api_route(one, get_response, methods=["GET"])
    app.add_api_route(one, delete_response, methods=["DELETE"])
    app.add_api_route(f"{one}/cancel", cancel_response, methods=["POST"])
    app.add_api_route(f"{one}/input_items", list_input_items, methods=["GET"])
    app.add_api_route("/v1/messages", create_message, methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"])
    app.add_api_route("/pooling", pooling, methods=["POST"])
    app.add_api_route("/classify", classify, methods=["POST"])
    for path in SCORE_PATHS:
        app.add_api_route(path, score, methods=["POST"])
    for path in RERANK_PATHS:
        app.add_api_route(path, rerank, methods=["POST"])
    app.add_api_route("/v1/files", upload_file, methods=["POST"])
    app.add_api_route("/v1/files", list_files, methods=["GET"])
    app.add_api_route("/v1/files/{file_id}", show_file, methods=["GET"])
    app.add_api_route("/v1/files/{file_id}", delete_file, methods=["DELETE"])
    app.add_api_route("/v1/files/{file_id}/content", file_content, methods=["GET"])
    app.add_api_route("/v1/batches", create_batch, methods=["POST"])
    app.add_api_route("/v1/batches", list_batches, methods=["GET"])
    app.add_api_route("/v1/batches/{batch_id}", show_batch, methods=["GET"])
    app.add_api_route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
    app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"])
    app.add_api_route("/apply-template", apply_template, methods=["POST"])
    app.add_api_route("/generate", generate, methods=["POST"])
    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", show_model, methods=["GET"])
    app.add_api_route("/v1/load_lora_adapter", load_adapter, methods=["POST"])
    app.add_api_route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"])
    app.add_api_route("/openapi.json", openapi, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", ready, methods=["GET", "HEAD"])
    app.add_api_route("/ping", management.ping, methods=["GET", "POST"])
    app.add_api_route("/version", management.version, methods=["GET"])
    app.add_api_route("/load", management.load, methods=["GET"])
    app.add_api_route("/server_info", management.server_info, methods=["GET"])
    app.add_api_route("/reset_prefix_cache", management.reset_prefix_cache, methods=["POST"])
    app.add_api_route("/kv/handshake", peers.handshake, methods=["POST"])
    app.add_api_route("/kv/prefill", peers.prefill, methods=["POST"])
    app.add_api_route("/kv/events", kv_events.events, methods=["GET"])
    app.add_api_route("/kv/peers", kv_events.peers, methods=["PUT"])
    app.add_api_route("/sleep", management.sleep, methods=["POST"])
    app.add_api_route("/wake_up", management.wake_up, methods=["POST"])
    app.add_api_route("/is_sleeping", management.is_sleeping, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])


async def list_models(request: Request) -> Response:
    state = state_of(request)
    names = [*state.model_names, *state.adapters]
    key = context_of(request).key
    shown = [name for name in names if _shown(state, key, name)]
    if "anthropic-version" in request.headers:
        return anthropic_models(request, shown, state.created)
    return json_response(ModelList([_card(state, name) for name in shown]))


async def show_model(request: Request) -> Response:
    state = state_of(request)
    state.check_model(request.path_params["model"], context_of(request))
    return json_response(_card(state, request.path_params["model"]))


def _card(state: ServerState, name: str) -> ModelCard:
    longest = state.client.config.scheduler.max_model_len
    parent = None if state.is_served(name) else state.model_name
    return ModelCard(name, state.created, longest, state.defaults, root=name, parent=parent)


def _shown(state: ServerState, key: ApiKey, name: str) -> bool:
    """Whether a key may use a model. The served model's names are one model's."""
    return key.may_use(state.model_name if state.is_served(name) else name)


async def health(request: Request) -> Response:
    """Answers 200 while the engine lives or sleeps, else 503."""
    state_of(request).check_health()
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Answers 200 while requests are taken.

    Answers 503 when the engine is gone, its loop has not turned for `stuck_timeout`, or the server
    is stopping. A queue, however long, is no reason. A router that asks for it gets a proof that
    this server has the replicas' key (`key_proof`).
    """
    state = state_of(request)
    state.check_ready()
    response = json_response({"status": "ready"})
    challenge = request.headers.get(CHALLENGE_HEADER.decode())
    if challenge is not None:
        digests, address = state.keys.admin_digests(), request.scope.get("server")
        proof = prove(challenge.encode("latin-1"), digests, address)
        if proof is not None:
            response.headers[PROOF_HEADER.decode()] = proof.decode()
    return response


async def metrics(request: Request) -> Response:
    """Answers with metrics as Prometheus text. A dead or stuck engine leaves its gauges
    unchanged."""
    state = state_of(request)
    engine: EngineMetrics = request.app.state.engine_metrics
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT):
            stats = await state.client.stats()
            engine.update(stats, replicas=[replica.alive for replica in state.client.replicas])
    except (QuireError, TimeoutError):
        engine.up = False
    await asyncio.to_thread(request.app.state.gpu_metrics.update)
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
