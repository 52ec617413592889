"""The router's ASGI application. It answers a few routes itself and forwards all others."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from quire.errors import ConfigError
from quire.router.client_keys import ClientKeys
from quire.router.fleet import Fleet, OtherModelError, UnknownReplicaError
from quire.router.prompts import read_body
from quire.router.proxy import Proxy, Receive, Scope, Send, with_headers
from quire.router.replica import Role, RoutedReplica
from quire.router.replica_hosts import ReplicaNotAllowedError
from quire.router.sockets import SocketProxy
from quire.router.telemetry import RouterMetrics
from quire.router.upstream import ReplicaLostError
from quire.server.errors import ApiError
from quire.server.http.anthropic_errors import error_body
from quire.server.http.error_handler import is_anthropic
from quire.server.http.hosts import HostCheck
from quire.server.http.replica_proofs import TAG_HEADER, tag_in

_MOST_JOIN_BYTES = 1 << 16
_PAGE = Path(__file__).with_name("fleet.html")


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /replicas.

    Attributes:
        url: the server's address.
        role: what the server does for the fleet, see `Role`.
        swap: whether all other replicas leave the fleet.
    """

    url: str
    role: Role = "both"
    swap: bool = False


class ReplicaEntry(msgspec.Struct):
    """One replica in the answer to GET /replicas.

    Attributes:
        name: the replica's address without the scheme.
        url: the replica's address.
        role: the replica's task in the fleet, see `Role`.
        ready: whether the last health check passed.
        leaving: whether the replica gets no further requests.
        running: number of requests in flight from this router.
        reported: number of requests in flight from all clients, by the replica's last report.
        requests: number of requests that the replica has answered for this router.
        failures: number of health checks and requests during which the replica was lost.
        informed: whether the replica sends events about its blocks. Otherwise the router estimates
            them.
        prompt_tokens: number of prompt tokens that the replica has yet to compute.
        prefill_rate: prompt tokens that the replica computes per second; 0 if unknown.
        models: names of the models in the API.
    """

    name: str
    url: str
    role: Role
    ready: bool
    leaving: bool
    running: int
    reported: int
    requests: int
    failures: int
    informed: bool
    prompt_tokens: int
    prefill_rate: float
    models: list[str]


class FleetState(msgspec.Struct):
    """The answer to GET /replicas."""

    policy: str
    replicas: list[ReplicaEntry]


@dataclass(frozen=True)
class RouterApp:
    """The router as an ASGI application.

    Attributes:
        admin_key: key that may change the fleet; None refuses all changes.
        keys: checks the clients' keys; None leaves that to the servers.
        hosts: checks `Host` and `Origin`; None accepts any.
        public_metrics: whether /metrics needs no key.
    """

    fleet: Fleet
    proxy: Proxy
    sockets: SocketProxy
    metrics: RouterMetrics
    admin_key: str | None
    keys: ClientKeys | None = None
    hosts: HostCheck | None = None
    public_metrics: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._pass_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        tag = tag_in(scope["headers"])
        if tag is not None:  # A router in front of this one expects its own tag in the answer.
            send = with_headers(send, [(TAG_HEADER, tag)])
        try:
            await self._route(scope, receive, send)
        except ApiError as error:
            self.metrics.refused.labels(error.status).inc()
            headers = {"content-type": "application/json", **error.headers}
            await _answer(send, error.status, _error_body(error, scope["path"]), headers)

    async def _pass_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.hosts is not None:
                self.hosts.check_socket(scope)
            self._check_loop(scope)
            await self.sockets(scope, receive, send)
        except ApiError as error:
            self.metrics.refused.labels(error.status).inc()
            headers = {"content-type": "application/json", **error.headers}
            answer = Response(_error_body(error, scope["path"]), error.status, headers)
            await answer(scope, receive, send)

    def _check_loop(self, scope: Scope) -> None:
        if any(name == b"via" and self.fleet.via in value for name, value in scope["headers"]):
            reason = (
                "The request has come back: one of this router's replicas is the router itself."
            )
            raise ApiError(508, reason, code="loop", retry=False)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if self.hosts is not None:
            self.hosts.check(scope)
        self._check_loop(scope)
        if path == "/health" and method in ("GET", "HEAD"):
            await _answer(send, 200, b"")
        elif path == "/ready" and method in ("GET", "HEAD"):
            if not any(r.reachable and r.health != "refusing" for r in self.fleet):
                raise ApiError(503, "No replica is ready.", code="no_replica", retry_after=1.0)
            await _answer(send, 200, b"")
        elif path == "/metrics" and method == "GET":
            if not self.public_metrics:
                self._check_key(scope)
            text = generate_latest(self.metrics.registry)
            await _answer(send, 200, text, {"content-type": CONTENT_TYPE_LATEST})
        elif path == "/fleet" and method == "GET":
            page = {"content-type": "text/html; charset=utf-8"}
            await _answer(send, 200, _PAGE.read_bytes(), page)
        elif path == "/replicas" or path.startswith("/replicas/"):
            name = path.removeprefix("/replicas").lstrip("/")
            await self._replicas(method, name, scope, receive, send)
        else:
            allowance = None if self.keys is None else self.keys.check(scope)
            await self.proxy(scope, receive, send, allowance)

    async def _replicas(
        self, method: str, name: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if method == "GET" and not name:
            self._check_key(scope)
            found = FleetState(self.fleet.settings.policy, [_state(each) for each in self.fleet])
            await _json(send, 200, found)
        elif method == "POST" and not name:
            self._check_admin(scope)
            with self.proxy.bodies.hold() as held:
                body = await read_body(receive, _MOST_JOIN_BYTES, held)
            if body is not None:
                await _json(send, 200, _state(await self._join(body)))
        elif method == "DELETE" and name:
            self._check_admin(scope)
            try:
                await _json(send, 200, _state(self.fleet.dismiss(name)))
            except UnknownReplicaError as error:
                raise ApiError(404, str(error), code="no_such_replica") from None
        else:
            raise ApiError(405, f"{method} is not allowed on {scope['path'][:200]}.")

    async def _join(self, body: bytearray) -> RoutedReplica:
        try:
            join = msgspec.json.decode(body, type=JoinRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The body does not describe a replica: {error}") from None
        try:
            return await self.fleet.admit(join.url, join.role, swap=join.swap)
        except ConfigError as error:
            raise ApiError(400, str(error), param="url") from None
        except ReplicaNotAllowedError as error:
            raise ApiError(403, str(error), param="url", code="replica_not_allowed") from None
        except ReplicaLostError as error:
            raise ApiError(502, f"{join.url}: {error}", code="replica_lost") from None
        except OtherModelError as error:
            raise ApiError(409, str(error), code="other_model") from None

    def _check_admin(self, scope: Scope) -> None:
        if self.admin_key is None:
            raise ApiError(403, "The fleet cannot be changed: start with --admin-api-key.")
        if not _has_key(scope, self.admin_key):
            raise ApiError(401, "This needs the admin key.", code="invalid_api_key")

    def _check_key(self, scope: Scope) -> None:
        """Checks the key of a request for the state of the fleet.

        A client's key, the admin's key and the replicas' key are all accepted. If none of them is
        set, no key is needed.

        Raises:
            ApiError: 401.
        """
        own = [key for key in (self.admin_key, self.fleet.settings.key) if key]
        if any(_has_key(scope, key) for key in own):
            return
        if self.keys is not None and self.keys.required:
            self.keys.check(scope)
        elif own:
            raise ApiError(
                401,
                "This needs the router's --admin-api-key or --api-key as a bearer key.",
                code="invalid_api_key",
            )


def _has_key(scope: Scope, key: str) -> bool:
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    return len(sent) == 1 and hmac.compare_digest(sent[0], b"Bearer " + key.encode())


def _error_body(error: ApiError, path: str) -> bytes:
    """Returns an error's JSON in the shape of the path's API, OpenAI's or Anthropic's."""
    if is_anthropic(path):
        return msgspec.json.encode(error_body(error, f"req_{uuid.uuid4().hex}"))
    return msgspec.json.encode(error.body)


def _state(replica: RoutedReplica) -> ReplicaEntry:
    return ReplicaEntry(
        name=replica.name,
        url=replica.upstream.url,
        role=replica.role,
        ready=replica.healthy,
        leaving=replica.leaving,
        running=replica.state.running,
        reported=replica.state.reported,
        requests=replica.answers.total(),
        failures=replica.failures,
        informed=replica.state.informed,
        prompt_tokens=replica.state.queued_tokens,
        prefill_rate=round(replica.state.load.prefill_rate, 1),
        models=sorted(entry.id for entry in replica.model or ()),
    )


async def _json(send: Send, status: int, value: object) -> None:
    await _answer(send, status, msgspec.json.encode(value), {"content-type": "application/json"})


async def _answer(
    send: Send, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    pairs: Sequence[tuple[bytes, bytes]] = [
        (name.lower().encode(), value.encode()) for name, value in (headers or {}).items()
    ]
    start = [*pairs, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
