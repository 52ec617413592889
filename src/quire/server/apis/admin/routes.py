"""The routes for those who run the server, for load balancers and for other engines."""

from __future__ import annotations

from quire.features.disaggregation.messages import Grant, Welcome
from quire.server.apis.admin import kv_events, management, peers, probes
from quire.server.apis.admin.adapters import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    check_adapters_key,
    load_adapter,
    unload_adapter,
)
from quire.server.apis.admin.live import live
from quire.server.apis.route import EVENTS, Route, check_admin

_LIVE_QUERY = {
    "rate": {"type": "integer", "minimum": 1, "maximum": 10},
    "frames": {"type": "integer", "minimum": 0},
}
_LEVEL = {"level": {"type": "integer", "minimum": 1, "maximum": 2}}

ROUTES = (
    Route("get", "/health", probes.health, "Whether the engine lives",
          answer=dict[str, str], public=True, answers_head=True),
    Route("get", "/ready", probes.ready, "Whether requests are taken now",
          answer=dict[str, str], public=True, answers_head=True),
    Route("get", "/ping", management.ping, "Whether the engine lives, for load balancers",
          answer="text/plain", public=True),
    Route("post", "/ping", management.ping, "The same", answer="text/plain", public=True),
    Route("get", "/metrics", probes.metrics, "Prometheus metrics", answer="text/plain"),
    Route("get", "/version", management.version, "The server's version",
          answer=management.ServerVersion),
    Route("get", "/load", management.load, "Requests that run and wait", answer=management.Load),
    Route("get", "/server_info", management.server_info, "The engine's settings, for admins",
          answer=management.ServerInfo, check=check_admin),
    Route("post", "/reset_prefix_cache", management.reset_prefix_cache,
          "Forget cached prefixes, for admins",
          answer=management.CacheResetAnswer, check=check_admin),
    Route("post", "/sleep", management.sleep, "Free the engine's devices, for admins",
          answer=management.SleepState, query=_LEVEL, check=check_admin),
    Route("post", "/wake_up", management.wake_up, "Start the engine again, for admins",
          answer=management.SleepState, check=check_admin),
    Route("get", "/is_sleeping", management.is_sleeping, "Whether the engine sleeps",
          answer=management.SleepState),
    Route("post", "/v1/load_lora_adapter", load_adapter, "Give a name to a LoRA adapter",
          LoadAdapterRequest, "text/plain", check=check_adapters_key),
    Route("post", "/v1/unload_lora_adapter", unload_adapter, "Forget a LoRA adapter",
          UnloadAdapterRequest, "text/plain", check=check_adapters_key),
    Route("post", "/kv/handshake", peers.handshake,
          "Compare engines, before one reads blocks of the other", peers.HandshakeBody, Welcome),
    Route("post", "/kv/prefill", peers.prefill, "Compute a prompt for another engine",
          peers.PrefillBody, Grant),
    Route("get", "/kv/events", kv_events.events,
          "What the caches hold, and their changes, for admins",
          answer=kv_events.NDJSON, check=check_admin),
    Route("put", "/kv/peers", kv_events.peers,
          "Say who computes prompts for this server, for admins",
          kv_events.PeersBody, kv_events.PeersAnswer, check=check_admin),
    Route("get", "/engine/live", live, "What the engine is at, while somebody looks",
          answer=EVENTS, query=_LIVE_QUERY, playground=True),
    Route("get", "/", None, "The playground: a page for people",
          answer="text/html", public=True, playground=True),
)  # fmt: skip
