"""`quire route`."""

from __future__ import annotations

import logging
import math
import sys

import typer

from quire.cli.route_options import RouteOptions
from quire.errors import ConfigError
from quire.router.choice import route_policy
from quire.router.client_keys import ClientKeys
from quire.router.fleet import FleetSettings
from quire.router.replica import Role
from quire.router.replica_hosts import ReplicaHosts
from quire.router.server import RouterArgs, run_router
from quire.server.args import ServerArgs, check_body_memory, check_endpoint, check_secret
from quire.server.http.hosts import HostCheck
from quire.server.process.listen import reachable_urls


def route(options: RouteOptions) -> None:
    """Runs a router; once it listens, prints its address.

    Raises:
        ConfigError: a setting is wrong, or there is no replica and no way for one to join.
    """
    args = _router_args(options)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")

    def on_ready(url: str) -> None:
        typer.echo(f"Routing at {url}. Its replicas: {url}/fleet. Ctrl-C stops it.")
        for address in reachable_urls(url, options.host):
            typer.echo(f"Other machines may reach it at {address}.")

    run_router(args, on_ready)
    typer.echo("Stopped. Goodbye.", err=True)


def _router_args(options: RouteOptions) -> RouterArgs:
    """Returns a router's settings. Raises ConfigError."""
    _check(options)
    limits = options.api_key_file, options.requests_per_minute, options.tokens_per_minute
    return RouterArgs(
        replicas=_members(options),
        fleet=FleetSettings(
            policy=route_policy(options.policy),
            key=options.api_key,
            replica_hosts=tuple(options.replica_hosts or ()),
            check_seconds=options.check_seconds,
            check_timeout=options.check_timeout,
            connect_timeout=options.connect_timeout,
            answer_timeout=options.answer_timeout,
            drain_timeout=options.leave_timeout,
        ),
        host=options.host,
        port=options.port,
        admin_key=options.admin_api_key,
        keys=None if limits == (None, None, None) else ClientKeys(*limits),
        hosts=HostCheck(
            ServerArgs(
                host=options.host,
                api_key_file=options.api_key_file,
                allowed_hosts=tuple(options.allowed_hosts or ()),
                cors_origins=tuple(options.cors_origins or ()),
            )
        ),
        public_metrics=options.public_metrics,
        max_body_mb=options.max_body_mb,
        max_body_memory_mb=options.max_body_memory_mb,
        drain_timeout=options.drain_timeout,
        otlp_endpoint=options.otlp_endpoint,
    )


def _check(options: RouteOptions) -> None:
    for name in ("api_key", "admin_api_key"):
        secret = getattr(options, name)
        if secret is not None and not check_secret(secret):
            raise ConfigError(f"{name} must be printable ASCII without spaces", name)
    if not all(math.isfinite(n) for n in vars(options).values() if isinstance(n, float)):
        raise ConfigError("times and sizes must be finite numbers")
    if options.prefill and not options.decode and options.admin_api_key is None:
        raise ConfigError("servers of --prefill compute prompts for those of --decode", "decode")
    if not (options.replicas or options.decode) and options.admin_api_key is None:
        raise ConfigError(
            "name the servers, as in `quire route http://10.0.0.1:8000 http://10.0.0.2:8000`, or "
            "let them join with --admin-api-key and --replica-hosts",
            "replicas",
        )
    if not (options.replicas or options.prefill or options.decode or options.replica_hosts):
        raise ConfigError(
            "replica_hosts names nobody, and neither is a server named: none could ever join",
            "replica_hosts",
        )
    ReplicaHosts(options.replica_hosts or ())
    check_body_memory(options.max_body_mb, options.max_body_memory_mb)
    if options.otlp_endpoint is not None:
        check_endpoint(options.otlp_endpoint)


def _members(options: RouteOptions) -> list[tuple[str, Role]]:
    """Returns the addresses of the replicas with their roles. Raises ConfigError."""
    roles: dict[Role, list[str] | None] = {
        "both": options.replicas,
        "prefill": options.prefill,
        "decode": options.decode,
    }
    members = [(url, role) for role, urls in roles.items() for url in urls or ()]
    if len({url for url, _ in members}) < len(members):
        raise ConfigError("a server has one role, and is named once", "replicas")
    return members
