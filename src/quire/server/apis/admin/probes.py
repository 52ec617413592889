"""`/health`, `/ready` and `/metrics`: what orchestrators, routers and Prometheus ask."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError
from quire.server.http.replica_proofs import CHALLENGE_HEADER, PROOF_HEADER, prove
from quire.server.http.sse import json_response
from quire.server.state import state_of
from quire.server.telemetry.engine_metrics import EngineMetrics

_SCRAPE_TIMEOUT = 5.0


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
