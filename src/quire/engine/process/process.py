"""The engine's loop in its own process: `python -m quire.engine.process.process ADDRESS OWNER`.

OWNER is the id of the process that started it. The process listens at ADDRESS and loads the model
that its owner names. It then takes requests and sends tokens until it gets `Shutdown` or its owner
is gone.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.engine.builder import build_core, resolve
from quire.engine.loop.calls import OWN_CALLS
from quire.engine.loop.core import EngineCore
from quire.engine.loop.features import serving_config
from quire.engine.loop.messages import (
    AbortRequest,
    AddRequest,
    Call,
    CallAnswer,
    CallFailed,
    Failed,
    Failure,
    FromEngine,
    Hello,
    Loading,
    News,
    Ping,
    Pong,
    Ready,
    RequestRefused,
    Resolved,
    Shutdown,
    Start,
    ToEngine,
    aborted,
    decode_to_engine,
    encode,
)
from quire.engine.process.completions import Client, CompletionTable
from quire.engine.process.connection import Connection, SocketServer
from quire.errors import EngineDeadError, QuireError, RequestError
from quire.features.call import Begun, RequestField, decode_body, encode_body, split_options
from quire.features.registry import declared_calls, declared_fields
from quire.request import RequestOptions
from quire.system import end_with

_LAST_MESSAGES = 1.0
"""Seconds that clients have to read the last messages."""


class Clients:
    """The clients that have sent a message, by connection."""

    def __init__(self) -> None:
        self._by_connection: dict[Connection, Client] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_connection.values()))

    def __len__(self) -> int:
        return len(self._by_connection)

    def of(self, connection: Connection) -> Client:
        client = self._by_connection.get(connection)
        if client is None:
            client = self._by_connection[connection] = Client(connection, self._count)
            self._count += 1
        return client

    def forget(self, client: Client) -> None:
        self._by_connection.pop(client.connection, None)


class EngineProcess:
    """Runs the engine: takes messages, steps, and sends outputs."""

    def __init__(self, server: SocketServer) -> None:
        self._server = server
        self._core: EngineCore | None = None
        self._completions: CompletionTable | None = None
        self._running = True
        self._clients = Clients()
        self._waiting_calls = 0
        """Number of calls that features have not answered yet. Second answers do not count."""
        self._answered: deque[tuple[Client, int, Future[Any]]] = deque()
        """Answers to send, each with its client and its call number."""
        self._news: dict[str, bytes] = {}
        """Maps names of news to the values that were last sent to all clients."""

    def run(self) -> None:
        try:
            self._load()
            while self._running:
                self._take_messages()
                self._step()
        except Exception as error:
            for client in self._clients:
                self._send(client, Failed(Failure.of(error)))
            if not isinstance(error, QuireError):
                raise  # The log must show the traceback.
        finally:
            if self._core is not None:
                self._core.shutdown()

    def _load(self) -> None:
        greeted = []
        while True:
            arrived = self._server.receive(wait=True)
            if arrived is None:
                continue
            owner, data = self._clients.of(arrived[0]), arrived[1]
            if data is None:
                self._forget(owner)
                continue
            message = decode_to_engine(data)
            if isinstance(message, Start):
                break
            if isinstance(message, Hello):
                greeted.append(owner)
        # Both raise ConfigError if two features declare one name.
        declared_calls()
        declared_fields()
        last = 0.0

        def progress(what: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last > 0.05:
                last = now
                self._send(owner, Loading(what, done, total))

        config = serving_config(resolve(message.args))
        for client in (owner, *greeted):
            self._send(client, Resolved(config))
        self._completions = CompletionTable(config.scheduler.max_num_seqs)
        self._core = build_core(config, progress, server=True)
        for descriptor in self._core.fds:
            self._server.watch(descriptor)
        # The loaded objects live until the end, so the garbage collector need not scan them.
        gc.collect()
        gc.freeze()
        for client in (owner, *greeted):
            self._greet(client)

    def _greet(self, client: Client) -> None:
        self._send(client, Ready(self.core.config))
        for news, value in self.core.news().items():
            self._send(client, News(news.name, encode_body(value)))

    def _send(self, client: Client, message: FromEngine) -> None:
        self._server.send(client.connection, encode(message))

    def _forget(self, client: Client) -> None:
        """Aborts the requests of a client that has disconnected."""
        self._clients.forget(client)
        for handle in list(client.handles):
            self._abort(client, handle, None)

    # -- in ------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Handles all waiting messages. With nothing to compute, sleeps until one comes."""
        arrived = self._server.receive(wait=not (self.core.has_work() or self._waiting_calls))
        while arrived is not None and self._running:
            connection, data = arrived
            if data is None:
                self._forget(self._clients.of(connection))
            else:
                self._handle(self._clients.of(connection), data)
            arrived = self._server.receive(wait=False)

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise QuireError("the engine is not loaded")
        return self._core

    @property
    def completions(self) -> CompletionTable:
        if self._completions is None:
            raise QuireError("the engine is not loaded")
        return self._completions

    def _handle(self, client: Client, data: bytes) -> None:
        """Carries out a message. If that fails, only the message's client gets the error."""
        message = decode_to_engine(data)
        try:
            self._obey(client, message)
        except EngineDeadError:
            raise
        except Exception as error:
            refusal = _refusal(message, Failure.of(error))
            if refusal is None:
                raise
            if not isinstance(error, QuireError):
                traceback.print_exc()
            self._send(client, refusal)

    def _obey(self, client: Client, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(client, message)
            case AbortRequest(handle, index):
                self._abort(client, handle, index)
            case Ping():
                self._send(client, Pong())
            case Call():
                self._call(client, message)
            case Hello():
                self._greet(client)
            case Shutdown():
                self._running = False
            case Start():
                raise QuireError("the engine is loaded already")

    def _abort(self, client: Client, handle: int, index: int | None) -> None:
        for request in self.core.abort(client.request(handle), index):
            self.completions.end(request)

    def _add(self, client: Client, message: AddRequest) -> None:
        options = RequestOptions(
            priority=message.priority,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            share=message.share,
        )
        further, given = _read_fields(message.features)
        options.update(further)
        name = client.request(message.handle)
        requests = self.core.add(
            name,
            message.prompt,
            message.params,
            max_total=message.max_total,
            **options,
        )
        for field, value in given:
            self.core.give(name, field, value)
        self.completions.add(client, message.handle, requests)

    def _call(self, client: Client, message: Call) -> None:
        """Passes a call to the engine or to the feature that takes it, and sends the answer."""
        found = self._found(message)
        if isinstance(found, Begun):
            if message.end is not None:
                self._answer_later(client, message.end, found.end)
            found = found.answer
        if isinstance(found, Future):
            self._waiting_calls += 1
            found.add_done_callback(self._count_down)
            self._answer_later(client, message.call, found)
            self._send_answers()
        else:
            self._send_news()
            self._send(client, CallAnswer(message.call, encode_body(found)))

    def _found(self, message: Call) -> Any:
        own = OWN_CALLS.get(message.name)
        call = declared_calls().get(message.name) if own is None else own[0]
        if call is None:
            raise RequestError(f"the engine knows no call {message.name!r}")
        try:
            request = decode_body(message.body, call.request)
        except msgspec.DecodeError as error:
            raise RequestError(f"{message.name}: {error}") from None
        return self.core.call(call, request) if own is None else own[1](self.core, request)

    def _count_down(self, answer: Future[Any]) -> None:
        self._waiting_calls -= 1

    def _answer_later(self, client: Client, call: int, answer: Future[Any]) -> None:
        answer.add_done_callback(lambda done: self._answered.append((client, call, done)))

    def _send_answers(self) -> None:
        """Sends the answers that are ready."""
        while self._answered:
            client, call, answer = self._answered.popleft()
            error = answer.exception()
            if error is None:
                self._send_news()
                self._send(client, CallAnswer(call, encode_body(answer.result())))
            else:
                self._send_news()
                self._send(client, CallFailed(call, Failure.of(error)))

    def _send_news(self) -> None:
        """Sends all clients the news whose values have changed since they were last sent."""
        for news, value in self.core.news().items():
            body = encode_body(value)
            if self._news.get(news.name) != bytes(body):
                self._news[news.name] = bytes(body)
                for client in self._clients:
                    self._send(client, News(news.name, body))

    # -- out -----------------------------------------------------------------------------------

    def _step(self) -> None:
        progress = self.core.step()
        if self._answered:
            self._send_answers()
        for request, error in self.core.take_failures():
            completion = self.completions.end(request)
            if completion is None:
                continue
            message: FromEngine
            if error is None:
                message = aborted(completion.handle)
            else:
                message = RequestRefused(completion.handle, Failure.of(error))
            self._send(completion.client, message)
        if progress is not None:
            for client, message in self.completions.outputs(progress, self._clients):
                self._send(client, message)


def _read_fields(
    features: dict[str, msgspec.Raw],
) -> tuple[RequestOptions, list[tuple[RequestField[Any], Any]]]:
    """Returns the values for features: those that are options of `Request`, and all others."""
    values: dict[RequestField[Any], Any] = {}
    for name, body in features.items():
        field = declared_fields().get(name)
        if field is None:
            raise RequestError(f"the engine knows no field {name!r} of a request")
        values[field] = decode_body(body, field.value)
    return split_options(values)


def _refusal(message: ToEngine, failure: Failure) -> FromEngine | None:
    """Returns the message that reports a failure to the client; None if no answer is expected."""
    if isinstance(message, AddRequest):
        return RequestRefused(message.handle, failure)
    return CallFailed(message.call, failure) if isinstance(message, Call) else None


def main(address: str, owner: int) -> None:
    # Ctrl-C reaches the whole process group; the owner decides when the engine may stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(owner)
    server = SocketServer(address)
    try:
        EngineProcess(server).run()
    finally:
        server.close(_LAST_MESSAGES)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
