"""The passing on of a request to a replica, and of its answer to the client."""

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

_OF_A_CONNECTION = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
"""Headers that are of one connection (RFC 9110, 7.6.1)."""
_SET_HERE = {
    b"host", b"content-length", b"expect", PREFILL_HEADER, REPORT_HEADER, ASK_HEADER, TAG_HEADER,
}  # fmt: skip
_KEPT_BACK = {PROMPT_HEADER, USED_HEADER, TAG_HEADER}
_BODILESS = (204, 304)
"""Statuses whose answers have no body, whatever length they tell."""
_STORED = re.compile(r"(/v1)?/(responses|chat/completions)/[^/]+")
_FILED = re.compile(r"(/v1)?/(files|batches)(/.*)?")


class Proxy:
    """Passes requests on as they are.

    A request is sent to another replica if the first is lost, or answers that it is overloaded or
    ends (503), before any of its answer was passed on. What only one replica can have is looked
    for: a stored answer at all of them in turn, files and batches at the fleet's home.
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
        """Answers a request. allowance: what it takes from its key's limits, None for nothing."""
        began = time.perf_counter()
        with self.bodies.hold() as held:
            body = await read_body(receive, self._max_body_bytes, held)
            if body is None:
                return
            prompt = read_prompt(body) if body else Prompt()
            exchange = _Exchange(scope, body, held, prompt, allowance)
            del body  # it goes when its answer begins
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
        leaving = asyncio.create_task(_left(receive))
        leaving.add_done_callback(lambda left: None if left.cancelled() else task.cancel())
        span = None if self._exporter is None else RequestSpan(self._exporter, scope)
        try:
            await self._pass_on(exchange, send, began, span)
        except asyncio.CancelledError:
            if not leaving.done() or task.uncancel():
                raise
            self._metrics.left.inc()
        finally:
            leaving.cancel()
            if span is not None:
                span.end(exchange.status if exchange.whole else 0)
            if allowance is not None:
                allowance.settle(exchange.used, exchange.computed, exchange.pieces)

    async def _pass_on(
        self, exchange: _Exchange, send: Send, began: float, span: RequestSpan | None
    ) -> None:
        scope, prompt = exchange.scope, exchange.prompt
        stored = prompt.continues or _STORED.fullmatch(scope["path"]) is not None
        tried: list[RoutedReplica] = []
        last: tuple[RoutedReplica, ReplicaLostError] | None = None
        while True:
            found = self._choose(scope["path"], prompt, tried)
            if found is None:
                raise _nobody(last)
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
                    # Another replica would be asked when the client has left long since.
                    raise ApiError(504, f"{replica.name}: {error}.", code="timeout") from None
                except ReplicaLostError as error:
                    replica.lost(error)
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
        if not _FILED.fullmatch(path):
            return self._fleet.place(prompt, tried)
        home = self._fleet.home()
        if home is None or home in tried or not home.reachable:
            return None
        return home, RouteChoice(home.number, (Placement(home.state, home.number, 0),))

    def _has_more(self, path: str, tried: list[RoutedReplica]) -> bool:
        """Whether a further replica could take a request."""
        if _FILED.fullmatch(path):
            return False
        return any(
            replica.reachable and replica.health != "refusing" and replica not in tried
            for replica in self._fleet
        )

    def _headers(
        self,
        replica: RoutedReplica,
        choice: RouteChoice,
        exchange: _Exchange,
        span: RequestSpan | None,
    ) -> Headers:
        """Returns what is sent to a replica besides the body."""
        scope = exchange.scope
        headers: Headers = [
            (name, value)
            for name, value in _end_to_end(scope["headers"])
            if name not in _SET_HERE
            # To a replica the router's own pages would be those of another host.
            and not (name == b"origin" and _is_own(value, scope))
        ]
        headers.append((b"via", self._fleet.via))
        if choice.prefill is not None:
            headers.append((PREFILL_HEADER, (choice.prefill or LOCAL).encode()))
        if exchange.prompt.keys and replica.state.informed:
            headers.append((REPORT_HEADER, b"1"))
        if exchange.metered:
            headers.append((ASK_HEADER, b"1"))
        if scope.get("client"):
            headers.append((b"x-forwarded-for", scope["client"][0].encode()))
        if span is not None:
            headers = [header for header in headers if header[0] not in CONTEXT_HEADERS]
            headers += span.headers
        return headers

    async def _send(
        self, replica: RoutedReplica, headers: Headers, exchange: _Exchange
    ) -> ReplicaAnswer:
        scope = exchange.scope
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        return await replica.upstream.send(scope["method"], target, headers, exchange.body)

    def _learn(self, prompt: Prompt, choice: RouteChoice, answer: ReplicaAnswer) -> None:
        """Takes note of what an answer says of its prompt's blocks."""
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
        kept_back = _KEPT_BACK
        if answer.status in _BODILESS:
            kept_back = kept_back | {b"content-length"}
        kept = [(n, value) for n, value in _end_to_end(answer.headers) if n not in kept_back]
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
            # The client has a part of the answer: that it ends too early must show.
            self._metrics.broken.inc()
            if not isinstance(error, SilentError):
                replica.lost(error)
            raise BrokenAnswerError from None
        rest = b"" if usage is None else usage.end()
        exchange.used = None if usage is None else usage.used
        exchange.whole = True
        await send({"type": "http.response.body", "body": rest, "more_body": False})


@dataclass(slots=True)
class _Exchange:
    """A request, and what became of it.

    body: empty once its answer has begun, as nobody else is asked then. held: counts it.
    sent: a replica has it, as far as is known. status: of its answer, 0 before there is one.
    pieces: of the answer that have come. used: tokens, as the replica says. whole: the answer has
    come to its end.
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
        """Frees the body, which no replica needs any more."""
        self.body = b""
        self.held.release()

    @property
    def metered(self) -> bool:
        """Whether its tokens count."""
        return self.allowance is not None and self.allowance.counts

    @property
    def computed(self) -> bool:
        """Whether a replica may have computed for it, also where its client left before the
        answer."""
        return self.sent and self.status < 400


class BrokenAnswerError(Exception):
    """A replica was lost within its answer: the client's connection must end without its end."""


def _end_to_end(headers: Headers) -> Headers:
    """Returns the headers that are not of one connection: neither one of those, nor named there."""
    left = _OF_A_CONNECTION
    for name, value in headers:
        if name == b"connection":
            left = left | {each.strip().lower() for each in value.split(b",")}
    return [header for header in headers if header[0] not in left]


def with_headers(send: Send, headers: Headers) -> Send:
    """Returns `send` with these headers of answers, in place of those of the same names."""
    names = {name for name, _ in headers}

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            others = [each for each in message["headers"] if each[0] not in names]
            message = {**message, "headers": [*others, *headers]}
        await send(message)

    return sending


async def _left(receive: Receive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_own(origin: bytes, scope: Scope) -> bool:
    """Whether a page's origin is this router, by the name under which it is asked."""
    return (b"host", origin.partition(b"://")[2]) in scope["headers"]


def _nobody(last: tuple[RoutedReplica, ReplicaLostError] | None) -> ApiError:
    """Returns the error of a request that no replica has answered. last: which failed, and how."""
    if last is None:
        return ApiError(503, "No replica is ready.", code="no_replica", retry_after=1.0)
    replica, error = last
    reason = f"the last was {replica.name}: {error}."
    if isinstance(error, BadAnswerError):
        return ApiError(502, f"No replica gave a valid answer; {reason}", code="bad_answer")
    return ApiError(503, f"No replica answers; {reason}", code="no_replica", retry_after=1.0)
