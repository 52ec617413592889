"""The routes for those who run the server, and for load balancers."""

from __future__ import annotations

from quire.server.apis.admin import management, probes
from quire.server.apis.admin.live import live
from quire.server.apis.route import EVENTS, Route, Schema, check_admin

_LIVE_QUERY = {
    "rate": {"type": "integer", "minimum": 1, "maximum": 10},
    "frames": {"type": "integer", "minimum": 0},
}
_TAG: Schema = {"type": "string", "enum": ["weights", "kv"]}
_TAGS: dict[str, Schema] = {"tags": {"type": "array", "items": _TAG}}
_SLEEP: dict[str, Schema] = {
    "level": {"type": "integer", "minimum": 1, "maximum": 2},
    "mode": {"type": "string", "enum": ["abort", "wait", "keep", "retract"]},
    **_TAGS,
}

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
          answer=management.SleepState, query=_SLEEP, check=check_admin),
    Route("post", "/wake_up", management.wake_up, "Wake the engine, or start it again, for admins",
          answer=management.SleepState, query=_TAGS, check=check_admin),
    Route("get", "/is_sleeping", management.is_sleeping, "Whether the engine sleeps",
          answer=management.SleepState),
    Route("get", "/engine/live", live, "What the engine is at, while somebody looks",
          answer=EVENTS, query=_LIVE_QUERY, playground=True),
    Route("get", "/", None, "The playground: a page for people",
          answer="text/html", public=True, playground=True),
)  # fmt: skip
