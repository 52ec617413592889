"""All routes of the server but `/openapi.json`, and the paths that authentication treats apart."""

from __future__ import annotations

from quire.server import playground
from quire.server.apis import models
from quire.server.apis.admin import routes as admin
from quire.server.apis.anthropic import routes as anthropic
from quire.server.apis.batch import routes as batch
from quire.server.apis.ollama import routes as ollama
from quire.server.apis.openai import routes as openai
from quire.server.apis.responses import routes as responses
from quire.server.apis.scoring import routes as scoring
from quire.server.args import ServerArgs

ROUTES = (
    *openai.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *scoring.ROUTES,
    *batch.ROUTES,
    *models.ROUTES,
    *admin.ROUTES,
    *ollama.ROUTES,
)

PUBLIC_PATHS = frozenset(r.path for r in ROUTES if r.public).union(playground.FILES)
"""Paths whose requests need no key."""
COUNTED_PATHS = frozenset(route.path for route in ROUTES if route.counted)
"""Paths whose POST requests count against their key's limits."""
UNQUEUED_PATHS = frozenset(r.path for r in ROUTES if r.counted and not r.queued)
"""Counted paths that do not use the engine."""


SETTINGS = frozenset(route.setting for route in ROUTES if route.setting)
"""Settings that some routes need."""


def active_settings(args: ServerArgs) -> frozenset[str]:
    """Returns those of `SETTINGS` that a server with these settings has."""
    return frozenset(name for name in SETTINGS if getattr(args, name) is not None)


def public_paths(args: ServerArgs) -> frozenset[str]:
    """Returns the paths whose requests to a server with these settings need no key."""
    return PUBLIC_PATHS | {"/metrics"} if args.public_metrics else PUBLIC_PATHS
