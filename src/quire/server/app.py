"""The FastAPI application: its routes, middleware and error handlers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from quire import __version__
from quire.errors import QuireError
from quire.server.apis.admin.live import LiveSnapshots
from quire.server.apis.batch.service import BatchService
from quire.server.apis.batch.store import BatchStore
from quire.server.apis.openai.convert import model_defaults
from quire.server.apis.openai.stored_chats import ChatStore
from quire.server.apis.responses.socket import responses_socket
from quire.server.apis.responses.store import ResponseStore
from quire.server.args import ServerArgs
from quire.server.context.rate_limits import RateLimiter
from quire.server.http.auth import AuthMiddleware
from quire.server.http.context_middleware import EXPOSED_HEADERS, RequestContextMiddleware
from quire.server.http.error_handler import handle_error
from quire.server.http.sse import ClientDisconnectedError
from quire.server.openapi import ROUTES
from quire.server.playground import add_playground, add_root
from quire.server.routes import COUNTED_PATHS, UNQUEUED_PATHS, active_settings, public_paths
from quire.server.state import ServerState
from quire.server.telemetry.engine_metrics import EngineMetrics
from quire.server.telemetry.gpu_metrics import GpuMetrics

if TYPE_CHECKING:
    from quire.engine.process.client import EngineClient


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
        state.file_path = batch_store.path
    _add_routes(app, active_settings(args), playground=args.playground)
    if args.playground:
        app.state.live_snapshots = LiveSnapshots(client, args.live_prompts)
        add_playground(app)
    else:
        add_root(app)
    for kind in (QuireError, HTTPException, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_exception_handler(ClientDisconnectedError, _client_disconnected)
    app.add_middleware(
        AuthMiddleware,
        state=state,
        public=public_paths(args),
        counted=COUNTED_PATHS,
        unqueued=UNQUEUED_PATHS,
    )
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


def _add_routes(app: FastAPI, settings: frozenset[str], *, playground: bool) -> None:
    for route in ROUTES:
        if route.setting and route.setting not in settings:
            continue
        if route.handler is not None and (playground or not route.playground):
            checks = [] if route.check is None else [Depends(route.check)]
            app.add_api_route(route.path, route.handler, methods=route.methods, dependencies=checks)
    app.router.routes.append(WebSocketRoute("/v1/responses", responses_socket))


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
