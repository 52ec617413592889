"""All routes of the server but `/openapi.json`, and the paths that authentication treats apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.features.registry import clash_error, installed_features
from quire.features.spec import FeatureSpec, resolve
from quire.server import playground
from quire.server.apis import models
from quire.server.apis.admin import routes as admin
from quire.server.apis.anthropic import routes as anthropic
from quire.server.apis.batch import routes as batch
from quire.server.apis.ollama import routes as ollama
from quire.server.apis.openai import routes as openai
from quire.server.apis.responses import routes as responses
from quire.server.apis.route import Route
from quire.server.apis.scoring import routes as scoring
from quire.server.args import ServerArgs

_OWN = (
    *openai.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *scoring.ROUTES,
    *batch.ROUTES,
    *models.ROUTES,
    *admin.ROUTES,
    *ollama.ROUTES,
)


def with_features(own: tuple[Route, ...], features: Iterable[FeatureSpec]) -> Iterator[Route]:
    """Yields the server's own routes, then those that features declare.

    Raises:
        ConfigError: a feature declares a route that there is already.
    """
    owners = dict.fromkeys(((route.method, route.described_path) for route in own), "the server")
    yield from own
    for spec in features:
        for route in resolve(spec.routes) if spec.routes else ():
            key = route.method, route.described_path
            if key in owners:
                raise clash_error("route", " ".join(key), owners[key], spec.origin)
            owners[key] = spec.origin
            yield route


ROUTES = tuple(with_features(_OWN, installed_features()))
"""The routes of every installed feature are there whether or not the engine has the feature."""

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
