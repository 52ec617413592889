"""The options of `quire route`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


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
        float, typer.Option(min=0.01, help="From one look at a replica to the next.")
    ] = 1.0
    check_timeout: Annotated[
        float, typer.Option(min=0.1, help="A replica that answers later is taken for lost.")
    ] = 5.0
    connect_timeout: Annotated[
        float, typer.Option(min=0.01, help="Longest wait for a connection to a replica.")
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
        float, typer.Option(min=0.0, help="Time that requests have when the router stops.")
    ] = 30.0
    leave_timeout: Annotated[
        float, typer.Option(min=0.0, help="Time that requests have when a replica leaves.")
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
