"""`quire route`."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from quire.cli.help import with_options
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


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """A router's replicas, and how it listens, watches them and checks its clients."""

    replicas: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...", help="Servers of one model, as in http://10.0.0.1:8000."
        ),
    ] = None
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Server that computes prompts for those of --decode (may be repeated).",
        ),
    ] = None
    decode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Server that answers, and has long prompts computed by those of --prefill (may be "
            "repeated).",
        ),
    ] = None
    policy: Annotated[
        str,
        typer.Option(
            help="Who takes a request. prefix: the replica with least to compute, by what it holds "
            "and has to do. Else least-loaded, or round-robin."
        ),
    ] = "prefix"
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="QUIRE_REPLICA_KEY",
            help="Key of the replicas, an admin's, for their health, load and events.",
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="QUIRE_ADMIN_API_KEY",
            help="Key for POST and DELETE of /replicas. Default: the fleet cannot be changed.",
        ),
    ] = None
    replica_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Whose servers may join by POST /replicas (may be repeated): a host, *.NAME, a "
            "network as in 10.0.0.0/8, or * for any; they must prove that they have --api-key. "
            "HOST:PORT is trusted with it. Default: servers that are named here."
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        typer.Option(
            help="TOML file of clients' keys, as of `quire serve`, with limits for the whole "
            "fleet; read again on SIGHUP. Default: keys are the servers' affair."
        ),
    ] = None
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="Answer /metrics without a key.")
    ] = False
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that each key may make in a minute at the whole fleet."),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of prompts and answers that each key may use in a minute at the whole "
            "fleet.",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            envvar="QUIRE_ALLOWED_HOSTS",
            help="Name under which clients reach the router (may be repeated; * is any): requests "
            "for other names are refused. Default: on a loopback address without --api-key-file "
            "localhost, else any. Addresses are always allowed.",
        ),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        typer.Option(
            envvar="QUIRE_CORS_ORIGINS",
            help="Origin of pages that may ask where names are checked (may be repeated; * is "
            "any); what browsers are told of it is the servers' affair.",
        ),
    ] = None
    check_seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds between two health checks of a replica.")
    ] = 1.0
    check_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a silent replica counts as lost.")
    ] = 5.0
    connect_timeout: Annotated[
        float, typer.Option(min=0.01, help="Most seconds to connect to a replica.")
    ] = 2.0
    answer_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Longest time in which nothing of an answer comes from a replica; then the "
            "request ends with 504.",
        ),
    ] = 600.0
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that requests have when the router stops.")
    ] = 30.0
    leave_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that requests have when a replica leaves.")
    ] = 120.0
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request body.")] = 16.0
    max_body_memory_mb: Annotated[
        float,
        typer.Option(
            help="Memory that the bodies of all requests may take together until their answers "
            "begin; beyond it requests get 503."
        ),
    ] = 256.0
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Collector for OpenTelemetry traces, as in http://localhost:4318 (needs the extra "
            "otel)."
        ),
    ] = None


@with_options(RouteOptions)
def route(*, options: RouteOptions) -> None:
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
