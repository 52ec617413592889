"""Forwards a request to a replica, and the replica's answer to the client."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from quire.engine.process.placement import Placement
from quire.features.kv_events.prompt_report import (
    LOCAL,
    PREFILL_HEADER,
    PROMPT_HEADER,
    REPORT_HEADER,
    decode_report,
)
from quire.router.choice import RouteChoice
from quire.router.client_keys import Allowance
from quire.router.fleet import Fleet
from quire.router.prompts import Prompt, read_body, read_prompt
from quire.router.replica import RoutedReplica
from quire.router.telemetry import RequestSpan, RouterMetrics
from quire.router.upstream import (
    BadAnswerError,
    Headers,
    ReplicaAnswer,
    ReplicaLostError,
    SilentError,
)
from quire.server.context.body_budget import BodyBudget, HeldBody
from quire.server.errors import ApiError
from quire.server.http.replica_proofs import TAG_HEADER
from quire.server.http.usage_report import ASK_HEADER, USED_HEADER, UsageReader
from quire.server.telemetry.tracing import CONTEXT_HEADERS, Exporter

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HOP_BY_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
"""Headers that hold for one connection only and are not forwarded (RFC 9110, 7.6.1)."""
_ROUTER_HEADERS = {
    b"host", b"content-length", b"expect", PREFILL_HEADER, REPORT_HEADER, ASK_HEADER, TAG_HEADER,
}  # fmt: skip
"""Headers of requests that the router sets itself, so the client's are dropped."""
_INTERNAL_HEADERS = {PROMPT_HEADER, USED_HEADER, TAG_HEADER}
"""Headers of answers that are for the router, not for the client."""
_NO_BODY_STATUSES = (204, 304)
"""Statuses whose answers have no body, even if they have a Content-Length."""
_STORED_PATH = re.compile(r"(/v1)?/(responses|chat/completions)/[^/]+")
_FILE_PATH = re.compile(r"(/v1)?/(files|batches)(/.*)?")


class Proxy:
    """Forwards requests to replicas. Only some headers change.

    If a replica is lost or answers 503 before the client got any bytes, the proxy tries another
    one. A stored answer exists on one replica only, so the proxy asks all of them in turn. Files
    and batches are on the fleet's home replica.

    Args:
        max_body_bytes: bytes of the largest body.
        max_body_memory_bytes: bytes that all bodies may take together while they arrive.
        exporter: sends the router's spans; None makes none.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: RouterMetrics,
        max_body_bytes: int,
        max_body_memory_bytes: int,
        exporter: Exporter | None = None,
    ) -> None:
        self.bodies = BodyBudget(max_body_memory_bytes)
        self._fleet = fleet
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._exporter = exporter

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, allowance: Allowance | None = None
    ) -> None:
        """Answers a request.

        Args:
            allowance: the request's part of its key's limits; None if it has no limits.
        """
        began = time.perf_counter()
        with self.bodies.hold() as held:
            body = await read_body(receive, self._max_body_bytes, held)
            if body is None:
                return
            prompt = read_prompt(body) if body else Prompt()
            exchange = _Exchange(scope, body, held, prompt, allowance)
            del body  # The exchange has the only reference, so the body is freed with it.
            await self._answer(exchange, receive, send, began)

    async def _answer(
        self, exchange: _Exchange, receive: Receive, send: Send, began: float
    ) -> None:
        scope, allowance = exchange.scope, exchange.allowance
        if allowance is not None:
            allowance.take_tokens(exchange.prompt, exchange.body)
            send = with_headers(send, allowance.headers)
        task = asyncio.current_task()
        assert task is not None
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        disconnect.add_done_callback(lambda waiter: None if waiter.cancelled() else task.cancel())
        span = None if self._exporter is None else RequestSpan(self._exporter, scope)
        try:
            await self._forward(exchange, send, began, span)
        except asyncio.CancelledError:
            if not disconnect.done() or task.uncancel():
                raise
            self._metrics.left.inc()
        finally:
            disconnect.cancel()
            if span is not None:
                span.end(exchange.status if exchange.whole else 0)
            if allowance is not None:
                allowance.settle(exchange.used, exchange.computed, exchange.pieces)

    async def _forward(
        self, exchange: _Exchange, send: Send, began: float, span: RequestSpan | None
    ) -> None:
        scope, prompt = exchange.scope, exchange.prompt
        stored = prompt.continues or _STORED_PATH.fullmatch(scope["path"]) is not None
        tried: list[RoutedReplica] = []
        last: tuple[RoutedReplica, ReplicaLostError] | None = None
        while True:
            found = self._choose(scope["path"], prompt, tried)
            if found is None:
                raise no_replica_error(last)
            replica, choice = found
            tried.append(replica)
            if span is not None:
                span.chosen(replica, choice, len(tried))
            try:
                try:
                    headers = self._headers(replica, choice, exchange, span)
                    exchange.sent = True
                    answer = await self._send(replica, headers, exchange)
                except SilentError as error:
                    # By now the client has probably given up, so no other replica is tried.
                    raise ApiError(504, f"{replica.name}: {error}.", code="timeout") from None
                except ReplicaLostError as error:
                    replica.mark_lost(error)
                    last, exchange.sent = (replica, error), False
                    self._metrics.retries.inc()
                    continue
                try:
                    refused = answer.status == 503 or (stored and answer.status == 404)
                    if refused and self._has_more(scope["path"], tried):
                        self._metrics.retries.inc()
                        exchange.sent = False
                        continue
                    replica.answers[answer.status] += 1
                    self._metrics.first_byte.observe(time.perf_counter() - began)
                    if choice.prefill is not None:
                        where = "apart" if choice.prefill else "local"
                        self._metrics.prompts.labels(where).inc()
                    exchange.drop_body()
                    self._learn(prompt, choice, answer)
                    await self._return(replica, answer, choice, exchange, send)
                    return
                finally:
                    answer.close()
            finally:
                choice.end()

    def _choose(
        self, path: str, prompt: Prompt, tried: list[RoutedReplica]
    ) -> tuple[RoutedReplica, RouteChoice] | None:
        if not _FILE_PATH.fullmatch(path):
            return self._fleet.place(prompt, tried)
        home = self._fleet.home()
        if home is None or home in tried or not home.reachable:
            return None
        return home, RouteChoice(home.number, (Placement(home.state, home.number, 0),))

    def _has_more(self, path: str, tried: list[RoutedReplica]) -> bool:
        """Tells whether another replica could take the request."""
        if _FILE_PATH.fullmatch(path):
            return False
        return self._fleet.has_more(tried)

    def _headers(
        self,
        replica: RoutedReplica,
        choice: RouteChoice,
        exchange: _Exchange,
        span: RequestSpan | None,
    ) -> Headers:
        """Returns the headers of the request to the replica."""
        headers = client_headers(exchange.scope, self._fleet.via)
        if choice.prefill is not None:
            headers.append((PREFILL_HEADER, (choice.prefill or LOCAL).encode()))
        if exchange.prompt.keys and replica.state.informed:
            headers.append((REPORT_HEADER, b"1"))
        if exchange.metered:
            headers.append((ASK_HEADER, b"1"))
        if span is not None:
            headers = [header for header in headers if header[0] not in CONTEXT_HEADERS]
            headers += span.headers
        return headers

    async def _send(
        self, replica: RoutedReplica, headers: Headers, exchange: _Exchange
    ) -> ReplicaAnswer:
        method, target = exchange.scope["method"], target_of(exchange.scope)
        return await replica.upstream.send(method, target, headers, exchange.body)

    def _learn(self, prompt: Prompt, choice: RouteChoice, answer: ReplicaAnswer) -> None:
        """Records the blocks of the prompt if the answer reports them."""
        value = next((value for name, value in answer.headers if name == PROMPT_HEADER), None)
        report = None if value is None else decode_report(value)
        if report is not None:
            self._fleet.learn(prompt, choice, *report)

    async def _return(
        self,
        replica: RoutedReplica,
        answer: ReplicaAnswer,
        choice: RouteChoice,
        exchange: _Exchange,
        send: Send,
    ) -> None:
        dropped = _INTERNAL_HEADERS
        if answer.status in _NO_BODY_STATUSES:
            dropped = dropped | {b"content-length"}
        kept = [(n, value) for n, value in _end_to_end_headers(answer.headers) if n not in dropped]
        usage = UsageReader(answer.headers) if exchange.metered else None
        exchange.status = answer.status
        await send({"type": "http.response.start", "status": answer.status, "headers": kept})
        try:
            async for part in answer.parts():
                choice.answered()
                exchange.pieces += 1
                given = part if usage is None else usage.pass_on(part)
                if given:
                    await send({"type": "http.response.body", "body": given, "more_body": True})
        except ReplicaLostError as error:
            # The client has a part of the answer. It must notice that the rest is missing.
            self._metrics.broken.inc()
            if not isinstance(error, SilentError):
                replica.mark_lost(error)
            raise BrokenAnswerError from None
        rest = b"" if usage is None else usage.end()
        exchange.used = None if usage is None else usage.used
        exchange.whole = True
        await send({"type": "http.response.body", "body": rest, "more_body": False})


@dataclass(slots=True)
class _Exchange:
    """A request and the progress of its answer.

    Attributes:
        body: emptied when the answer begins, because the request is not sent again after that.
        held: counts the body's bytes in the `BodyBudget`.
        sent: whether a replica has probably received the request.
        status: HTTP status of the answer; 0 before the answer begins.
        pieces: number of pieces of the answer's body that have arrived.
        used: number of tokens by the replica's report; None without a report.
        whole: whether the answer is complete.
    """

    scope: Scope
    body: bytes | bytearray
    held: HeldBody
    prompt: Prompt
    allowance: Allowance | None
    sent: bool = False
    status: int = 0
    pieces: int = 0
    used: int | None = None
    whole: bool = False

    def drop_body(self) -> None:
        """Frees the body."""
        self.body = b""
        self.held.release()

    @property
    def metered(self) -> bool:
        """Tells whether the request's tokens count against its key's limit."""
        return self.allowance is not None and self.allowance.counts

    @property
    def computed(self) -> bool:
        """Tells whether a replica may have computed tokens for the request.

        That may be true even if the client disconnected before the answer began.
        """
        return self.sent and self.status < 400


class BrokenAnswerError(Exception):
    """A replica was lost in the middle of its answer.

    It makes the HTTP server cut the client's connection, which shows that the answer is incomplete.
    """


def client_headers(scope: Scope, via: bytes) -> Headers:
    """Returns the headers of a client's request that a replica gets, and what the router adds."""
    headers: Headers = [
        (name, value)
        for name, value in _end_to_end_headers(scope["headers"])
        if name not in _ROUTER_HEADERS
        # A page of the router has the router's origin, which a replica would refuse.
        and not (name == b"origin" and _is_own_origin(value, scope))
    ]
    headers.append((b"via", via))
    if scope.get("client"):
        headers.append((b"x-forwarded-for", scope["client"][0].encode()))
    return headers


def target_of(scope: Scope) -> bytes:
    """Returns a request's path and query, as the client wrote them."""
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    return target


def _end_to_end_headers(headers: Headers) -> Headers:
    """Returns the headers to forward.

    Drops the hop-by-hop headers: the standard ones, and those that `Connection` names.
    """
    hop_by_hop = _HOP_BY_HOP
    for name, value in headers:
        if name == b"connection":
            hop_by_hop = hop_by_hop | {each.strip().lower() for each in value.split(b",")}
    return [header for header in headers if header[0] not in hop_by_hop]


def with_headers(send: Send, headers: Headers) -> Send:
    """Returns a `send` that sets these headers of the answer. Headers of the same name are
    replaced."""
    names = {name for name, _ in headers}

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            others = [each for each in message["headers"] if each[0] not in names]
            message = {**message, "headers": [*others, *headers]}
        await send(message)

    return send_with_headers


async def _wait_for_disconnect(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_own_origin(origin: bytes, scope: Scope) -> bool:
    """Tells whether an origin is this router, by the `Host` that the client used."""
    return (b"host", origin.partition(b"://")[2]) in scope["headers"]


def no_replica_error(last: tuple[RoutedReplica, ReplicaLostError] | None) -> ApiError:
    """Returns the error for a request that no replica has answered.

    Args:
        last: the replica that failed last, and how it failed; None if none was tried.
    """
    if last is None:
        return ApiError(503, "No replica is ready.", code="no_replica", retry_after=1.0)
    replica, error = last
    reason = f"the last was {replica.name}: {error}."
    if isinstance(error, BadAnswerError):
        return ApiError(502, f"No replica gave a valid answer; {reason}", code="bad_answer")
    return ApiError(503, f"No replica answers; {reason}", code="no_replica", retry_after=1.0)
