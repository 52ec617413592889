"""`quire route`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import cast, get_args

import typer

from quire.errors import ConfigError
from quire.routing.choice import Policy
from quire.routing.client_keys import ClientKeys
from quire.routing.fleet import FleetSettings
from quire.routing.replica_state import Role
from quire.routing.server import RouterArgs, run_router
from quire.server.args import ServerArgs, check_endpoint, check_secret
from quire.server.middleware.hosts import HostCheck


def route(
    replicas: Sequence[str],
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    policy: str,
    host: str,
    port: int,
    key: str | None,
    admin_key: str | None,
    key_file: str | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    allowed_hosts: Sequence[str],
    cors_origins: Sequence[str],
    check_seconds: float,
    check_timeout: float,
    connect_timeout: float,
    drain_timeout: float,
    leave_timeout: float,
    max_body_mb: float,
    otlp_endpoint: str | None,
) -> None:
    """Runs a router; once it listens, prints its address. prefill: servers that compute prompts for
    those in decode.

    Raises:
        ConfigError: a setting is wrong, or there is no replica and no way for one to join.
    """
    if policy not in get_args(Policy):
        raise ConfigError(
            f"policy must be one of {', '.join(get_args(Policy))}, got {policy!r}", "policy"
        )
    for name, secret in (("api_key", key), ("admin_api_key", admin_key)):
        if secret is not None and not check_secret(secret):
            raise ConfigError(f"{name} must be printable ASCII without spaces", name)
    numbers = (check_seconds, check_timeout, connect_timeout, drain_timeout, leave_timeout)
    if not all(map(math.isfinite, (*numbers, max_body_mb))):
        raise ConfigError("times and sizes must be finite numbers")
    if prefill and not decode and admin_key is None:
        raise ConfigError("servers of --prefill compute prompts for those of --decode", "decode")
    if not (*replicas, *decode) and admin_key is None:
        raise ConfigError(
            "name the servers, as in `quire route http://10.0.0.1:8000 http://10.0.0.2:8000`, or "
            "let them join with --admin-api-key",
            "replicas",
        )
    if otlp_endpoint is not None:
        check_endpoint(otlp_endpoint)
    keys = None
    if (key_file, requests_per_minute, tokens_per_minute) != (None, None, None):
        keys = ClientKeys(key_file, requests_per_minute, tokens_per_minute)
    hosts = HostCheck(
        ServerArgs(
            host=host, api_key_file=key_file, allowed_hosts=tuple(allowed_hosts),
            cors_origins=tuple(cors_origins),
        )
    )  # fmt: skip
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    fleet = FleetSettings(
        policy=cast(Policy, policy), key=key, check_seconds=check_seconds,
        check_timeout=check_timeout, connect_timeout=connect_timeout, drain_timeout=leave_timeout,
    )  # fmt: skip
    roles: list[tuple[Role, Sequence[str]]] = [
        ("both", replicas), ("prefill", prefill), ("decode", decode)
    ]  # fmt: skip
    members = [(url, role) for role, urls in roles for url in urls]
    if len({url for url, _ in members}) < len(members):
        raise ConfigError("a server has one role, and is named once", "replicas")
    args = RouterArgs(
        replicas=members, fleet=fleet, host=host, port=port, admin_key=admin_key,
        keys=keys, hosts=hosts, max_body_mb=max_body_mb, drain_timeout=drain_timeout,
        otlp_endpoint=otlp_endpoint,
    )  # fmt: skip

    def on_ready(url: str) -> None:
        typer.echo(f"Routing at {url}. Its replicas: {url}/fleet. Ctrl-C stops it.")

    run_router(args, on_ready)
    typer.echo("Stopped. Goodbye.", err=True)
