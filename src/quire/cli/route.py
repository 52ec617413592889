"""`quire route`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import cast, get_args

import typer

from quire.errors import ConfigError
from quire.routing.fleet import FleetSettings, Policy
from quire.routing.server import RouterArgs, run_router
from quire.server.args import check_secret


def route(
    replicas: Sequence[str],
    *,
    policy: str,
    host: str,
    port: int,
    key: str | None,
    admin_key: str | None,
    check_seconds: float,
    check_timeout: float,
    connect_timeout: float,
    drain_timeout: float,
    leave_timeout: float,
    max_body_mb: float,
) -> None:
    """Runs a router; once it listens, prints its address.

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
    if not replicas and admin_key is None:
        raise ConfigError(
            "name the servers, as in `quire route http://10.0.0.1:8000 http://10.0.0.2:8000`, or "
            "let them join with --admin-api-key",
            "replicas",
        )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    fleet = FleetSettings(
        policy=cast(Policy, policy), key=key, check_seconds=check_seconds,
        check_timeout=check_timeout, connect_timeout=connect_timeout, drain_timeout=leave_timeout,
    )  # fmt: skip
    args = RouterArgs(
        replicas=replicas, fleet=fleet, host=host, port=port, admin_key=admin_key,
        max_body_mb=max_body_mb, drain_timeout=drain_timeout,
    )  # fmt: skip

    def on_ready(url: str) -> None:
        typer.echo(f"Routing at {url}. Its replicas: {url}/fleet. Ctrl-C stops it.")

    run_router(args, on_ready)
    typer.echo("Stopped. Goodbye.", err=True)
