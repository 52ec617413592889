"""WebSockets of clients: each is passed to the replica that its first turn is placed on.

A connection stays with its replica, which keeps the conversation. Every turn of it is placed, and
charged to the client's key, as a request is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from quire.router.choice import RouteChoice
from quire.router.client_keys import Allowance, ClientKeys
from quire.router.fleet import Fleet
from quire.router.prompts import BYTES_PER_TOKEN, Prompt, read_prompt
from quire.router.proxy import client_headers, no_replica_error, target_of
from quire.router.replica import RoutedReplica
from quire.router.telemetry import RouterMetrics
from quire.router.upstream import ReplicaLostError, SocketRefusedError
from quire.server.errors import ApiError
from quire.server.http.websocket import RESTART, error_event

_REPLICA_LOST = 1011
_FORWARDED_CODES = frozenset({1000, 1003, 1007, 1008, 1009, 1011, RESTART})
"""Codes that a client gets if its replica closes with one of them."""
MOST_TURNS = 1024
"""Most turns of a connection whose end has not come."""
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""Types of events that end a turn."""
_STEER = "response.steer"


class _Usage(msgspec.Struct):
    total_tokens: int


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    code: str | None = None


class _Event(msgspec.Struct):
    """The fields of an event that the router reads."""

    type: str = ""
    response: _Response | None = None
    error: _Error | None = None

    @property
    def tokens(self) -> int | None:
        """Number of tokens that the event reports; None without a report."""
        usage = None if self.response is None else self.response.usage
        return None if usage is None else usage.total_tokens


_DECODER = msgspec.json.Decoder(_Event)
_NOT_FOUND = _Error("previous_response_not_found")


@dataclass(slots=True)
class _Turn:
    """A turn whose end has not come.

    Attributes:
        pieces: number of the replica's events for it.
    """

    choice: RouteChoice | None
    allowance: Allowance | None
    pieces: int = 0

    def answered(self) -> None:
        self.pieces += 1
        if self.choice is not None:
            self.choice.answered()

    def end(self, used: int | None = None) -> None:
        if self.choice is not None:
            self.choice.end()
        if self.allowance is not None:
            self.allowance.settle(used, computed=True, pieces=self.pieces)


@dataclass(slots=True)
class ReplicaLink:
    """A connection to a replica."""

    replica: RoutedReplica
    connection: ClientConnection


class SocketProxy:
    """Passes WebSockets to replicas.

    Args:
        keys: check the clients' keys; None leaves that to the servers.
    """

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, keys: ClientKeys | None) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection of a client.

        The handshake with a replica comes first, so a client without a valid key gets the
        replica's answer.

        Raises:
            ApiError: the key is invalid, or no replica takes the connection.
        """
        if self.keys is not None:
            self.keys.check({**scope, "method": "GET"})
        websocket = WebSocket(scope, receive, send)
        try:
            link = await self._shake_hands(scope)
        except SocketRefusedError as error:
            await websocket.send_denial_response(error.answer())
            return
        session = _Session(self, websocket, link)
        try:
            await websocket.accept()
            with self.metrics.sockets.track_inprogress():
                await session.run()
        finally:
            await session.end()

    async def connect(self, scope: Scope, replica: RoutedReplica) -> ReplicaLink:
        """Opens a connection to a replica for a client's.

        Raises:
            SocketRefusedError: the replica refuses the handshake.
            ReplicaLostError: it cannot be reached.
        """
        try:
            connection = await replica.upstream.open_socket(
                target_of(scope), client_headers(scope, self.fleet.via)
            )
        except ReplicaLostError as error:
            replica.mark_lost(error)
            raise
        replica.answers[101] += 1
        return ReplicaLink(replica, connection)

    async def _shake_hands(self, scope: Scope) -> ReplicaLink:
        """Connects to the replica with the fewest requests that accepts the connection.

        Raises:
            SocketRefusedError: the last replica refused the handshake.
            ApiError: no replica can be reached.
        """
        last: tuple[RoutedReplica, ReplicaLostError] | None = None
        refusal: SocketRefusedError | None = None
        reachable = (replica for replica in self.fleet if replica.reachable)
        for replica in sorted(reachable, key=lambda each: (not each.healthy, each.state.busy)):
            try:
                return await self.connect(scope, replica)
            except SocketRefusedError as error:
                refusal = error
                if error.status != 503:
                    break
            except ReplicaLostError as error:
                last = replica, error
        raise refusal or no_replica_error(last)


class _Session:
    """One client's connection, and that to its replica."""

    def __init__(self, proxy: SocketProxy, websocket: WebSocket, link: ReplicaLink) -> None:
        self._proxy = proxy
        self._websocket = websocket
        self._link = link
        self._turns: deque[_Turn] = deque()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Passes messages in both directions until one side ends."""
        try:
            while not await self._first_turn():
                pass
            code, reason = await self._pass_messages()
        except KeyError:
            code, reason = 1003, "messages are text"
        except WebSocketDisconnected:
            return
        except WebSocketDisconnect as end:
            if end.code != RESTART:
                return
            code, reason = RESTART, "the router stops"
        with contextlib.suppress(WebSocketDisconnect, WebSocketDisconnected):
            await self._websocket.close(code, reason)

    async def _pass_messages(self) -> tuple[int, str]:
        """Passes messages in both directions.

        Returns:
            Code and reason with which the client's connection closes.
        """
        tasks = [asyncio.create_task(each()) for each in (self._pass_events, self._pass_turns)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self) -> None:
        """Gives back what the turns took, and closes the connection to the replica."""
        for turn in self._turns:
            turn.end()
        self._turns.clear()
        await self._link.connection.close()

    async def _first_turn(self) -> bool:
        """Places the first turn, and passes on its first event.

        A turn that continues a stored response is sent to one replica after another until one has
        the response.

        Returns:
            Whether a replica has answered. Otherwise the client gets an error, and may try again.
        """
        text = await self._websocket.receive_text()
        prompt = read_prompt(text.encode())
        try:
            turn = _Turn(None, self._charge(text, prompt))
        except ApiError as error:
            await self._fail(error)
            return False
        try:
            event = await self._send_first(text, prompt, turn)
        except ApiError as error:
            turn.end(0)
            await self._fail(error)
            return False
        if _read_event(text).type == _STEER:
            turn.end(0)  # No response runs, so the input was given back.
        else:
            self._begin(turn)
        await self._take_event(event)
        return True

    async def _send_first(self, text: str, prompt: Prompt, turn: _Turn) -> str:
        """Sends the first turn to a replica that takes it, and returns its first event.

        Raises:
            ApiError: no replica takes it.
        """
        tried: list[RoutedReplica] = []
        while True:
            turn.choice = await self._relink(prompt, tried)
            try:
                await self._link.connection.send(text)
                event = await self._link.connection.recv(decode=True)
            except ConnectionClosed as error:
                turn.choice.end()
                self._link.replica.mark_lost(ReplicaLostError(str(error)))
                continue
            missing = prompt.continues and _read_event(event).error == _NOT_FOUND
            if not (missing and self._proxy.fleet.has_more(tried)):
                return event
            turn.choice.end()
            self._proxy.metrics.retries.inc()

    async def _relink(self, prompt: Prompt, tried: list[RoutedReplica]) -> RouteChoice:
        """Places a prompt, and connects to its replica.

        Args:
            tried: replicas that cannot take it. The next ones are added.

        Raises:
            ApiError: no replica is left.
        """
        last: tuple[RoutedReplica, ReplicaLostError] | None = None
        while (found := self._proxy.fleet.place(prompt, tried)) is not None:
            replica, choice = found
            tried.append(replica)
            if replica is self._link.replica:
                return choice
            try:
                link = await self._proxy.connect(self._websocket.scope, replica)
            except BaseException as error:
                choice.end()
                if not isinstance(error, (ReplicaLostError, SocketRefusedError)):
                    raise
                if isinstance(error, ReplicaLostError):
                    last = replica, error
                self._proxy.metrics.retries.inc()
            else:
                await self._link.connection.close()
                self._link = link
                return choice
        raise no_replica_error(last)

    async def _pass_turns(self) -> tuple[int, str]:
        """Passes the client's messages to the replica.

        Returns:
            Code and reason with which the client's connection closes.
        """
        while True:
            try:
                text = await self._websocket.receive_text()
            except WebSocketDisconnect as end:
                if end.code == RESTART:
                    await self._idle.wait()
                raise
            if self._link.replica.leaving:
                await self._idle.wait()
                return RESTART, "the replica leaves: open another connection"
            try:
                await self._pass_turn(text)
            except ApiError as error:
                await self._fail(error)
            except ConnectionClosed:
                await asyncio.Event().wait()  # `_pass_events` has the reason.

    async def _pass_turn(self, text: str) -> None:
        if len(self._turns) >= MOST_TURNS:
            raise ApiError(
                429, f"More than {MOST_TURNS} turns of this connection wait.",
                code="rate_limit_exceeded",
            )  # fmt: skip
        prompt = read_prompt(text.encode())
        allowance = self._charge(text, prompt)
        if _read_event(text).type == _STEER:
            # It has no end of its own. Its response goes on, and another one may follow.
            if allowance is not None:
                allowance.settle(prompt.size // BYTES_PER_TOKEN, computed=True, pieces=0)
        else:
            others = [each for each in self._proxy.fleet if each is not self._link.replica]
            found = self._proxy.fleet.place(prompt, others)
            self._begin(_Turn(None if found is None else found[1], allowance))
        await self._link.connection.send(text)

    def _charge(self, text: str, prompt: Prompt) -> Allowance | None:
        """Takes a turn from the limits of the client's key.

        Raises:
            ApiError: 401, 429.
        """
        if self._proxy.keys is None:
            return None
        allowance = self._proxy.keys.check({**self._websocket.scope, "method": "POST"})
        if allowance is not None:
            allowance.take_tokens(prompt, text.encode())
        return allowance

    def _begin(self, turn: _Turn) -> None:
        self._turns.append(turn)
        self._idle.clear()

    async def _pass_events(self) -> tuple[int, str]:
        """Passes the replica's events to the client.

        Returns:
            Code and reason with which the client's connection closes.
        """
        while True:
            try:
                event = await self._link.connection.recv(decode=True)
            except ConnectionClosed as error:
                if error.rcvd is not None and error.rcvd.code in _FORWARDED_CODES:
                    return error.rcvd.code, error.rcvd.reason
                self._proxy.metrics.broken.inc(len(self._turns))
                return _REPLICA_LOST, "the replica is lost"
            await self._take_event(event)

    async def _take_event(self, text: str) -> None:
        """Passes an event on, and ends its turn if it is the last one."""
        event = _read_event(text)
        if self._turns:
            self._turns[0].answered()
        if event.type == "response.created":
            self._running += 1
        elif event.type in _ENDS:
            if event.type != "error":
                self._running -= 1
            if self._turns:
                self._turns.popleft().end(event.tokens)
        await self._websocket.send_text(text)
        if not self._turns and self._running <= 0:
            self._idle.set()

    async def _fail(self, error: ApiError) -> None:
        self._proxy.metrics.refused.labels(error.status).inc()
        await self._websocket.send_text(error_event(error.status, error.body.error).decode())


def _read_event(text: str) -> _Event:
    """Returns an event; an empty one if the text is not the JSON of one."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _Event()
