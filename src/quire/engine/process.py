"""The engine's loop in its own process: `python -m quire.engine.process ADDRESS OWNER`.

The process listens at ADDRESS and loads what the process that started it asks for, whose id is
OWNER. It then takes requests and sends tokens until it is told to stop or its owner is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.arrays import Int32, int32
from quire.engine.builder import build_core, resolve
from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequest,
    AddRequest,
    CompletionEnd,
    CompletionStart,
    Failed,
    Failure,
    FromEngine,
    GetSnapshot,
    GetStats,
    Hello,
    Loading,
    Ping,
    Pong,
    Ready,
    RequestRefused,
    Shutdown,
    SnapshotReply,
    Start,
    StatsReply,
    StepOutputs,
    decode_to_engine,
    encode,
)
from quire.engine.snapshot import take_snapshot
from quire.engine.socket_server import Connection, SocketServer
from quire.errors import OverloadedError, QuireError, RequestError
from quire.request import Request
from quire.scheduler import StepProgress

_ORPHAN_CHECK = 0.5
"""Seconds between checks that the owner still lives."""
_LAST_MESSAGES = 1.0
"""Seconds that clients have to read the last messages."""


@dataclass(slots=True, eq=False)
class Client:
    """A client of the engine.

    Attributes:
        number: unique among the engine's clients.
        handles: maps handles of running requests to their number of unfinished completions.
    """

    connection: Connection
    number: int
    handles: dict[int, int] = field(default_factory=dict)

    def request(self, handle: int) -> str:
        return f"{self.number}.{handle}"

    def ended(self, request: Request) -> None:
        handle = request.state["handle"] - request.sample_index
        left = self.handles.get(handle, 1) - 1
        if left:
            self.handles[handle] = left
        else:
            self.handles.pop(handle, None)


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
        self._running = True
        self._clients = Clients()

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
                raise  # the traceback belongs in the log
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
        last = 0.0

        def progress(what: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last > 0.05:
                last = now
                self._send(owner, Loading(what, done, total))

        config = resolve(message.args)
        self._core = build_core(config, progress)
        # What stands now stands for good: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        for client in (owner, *greeted):
            self._send(client, Ready(config))

    def _send(self, client: Client, message: FromEngine) -> None:
        self._server.send(client.connection, encode(message))

    def _forget(self, client: Client) -> None:
        """Aborts the requests of a client that has disconnected."""
        self._clients.forget(client)
        for handle in list(client.handles):
            self.core.abort(client.request(handle))

    # -- in ------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Handles all waiting messages. With nothing to compute, sleeps until one comes."""
        arrived = self._server.receive(wait=not self.core.has_work())
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

    def _handle(self, client: Client, data: bytes) -> None:
        message = decode_to_engine(data)
        match message:
            case AddRequest():
                self._add(client, message)
            case AbortRequest(handle, index):
                self.core.abort(client.request(handle), index)
                if index is None:
                    client.handles.pop(handle, None)
            case Ping():
                self._send(client, Pong())
            case GetStats(call):
                self._send(client, StatsReply(call, self.core.stats()))
            case GetSnapshot(call, tokens):
                self._send(client, SnapshotReply(call, take_snapshot(self.core, tokens)))
            case Hello():
                self._send(client, Ready(self.core.config))
            case Shutdown():
                self._running = False
            case Start():
                raise QuireError("the engine is loaded already")

    def _add(self, client: Client, message: AddRequest) -> None:
        try:
            requests = self.core.add(
                client.request(message.handle),
                message.prompt,
                message.params,
                max_total=message.max_total,
                priority=message.priority,
                cache_salt=message.cache_salt,
                pooling=message.pooling,
                tenant=message.tenant,
                share=message.share,
            )
        except (RequestError, OverloadedError) as error:
            self._send(client, RequestRefused(message.handle, Failure.of(error)))
            return
        for index, request in enumerate(requests):
            request.state["handle"] = message.handle + index
            request.state["client"] = client
        client.handles[message.handle] = len(requests)

    # -- out -----------------------------------------------------------------------------------

    def _step(self) -> None:
        progress = self.core.step()
        for request, error in self.core.take_unfit():
            client: Client = request.state["client"]
            client.ended(request)
            self._send(client, RequestRefused(request.state["handle"], Failure.of(error)))
        if progress is None or not len(progress):
            return
        for client, places in self._by_client(progress):
            message = outputs(progress, places)
            if len(message.handles) or message.prompt_logprobs:
                self._send(client, message)

    def _by_client(self, progress: StepProgress) -> list[tuple[Client, Int32]]:
        """Returns each client's rows of the step, int32."""
        for place in progress.finished:
            progress.requests[place].state["client"].ended(progress.requests[place])
        if len(self._clients) == 1:
            return [(next(iter(self._clients)), np.arange(len(progress.requests), dtype=np.int32))]
        numbers = int32([request.state["client"].number for request in progress.requests])
        return [
            (client, np.flatnonzero(numbers == client.number).astype(np.int32))
            for client in self._clients
        ]


def outputs(progress: StepProgress, places: Int32) -> StepOutputs:
    """Returns a step's outputs of the requests at `places`; requests in mid-prompt have none."""
    requests, counts = progress.requests, progress.n_tokens
    handles = int32([request.state["handle"] for request in requests])
    own = _mask(len(requests), places)
    ended = [place for place in sorted(progress.finished) if own[place]]
    shown = np.flatnonzero(own & ((counts > 0) | _mask(len(requests), ended)))
    width = np.arange(progress.tokens.shape[1])
    message = StepOutputs(
        handles=handles[shown],
        counts=counts[shown],
        tokens=progress.tokens[shown][width < counts[shown][:, None]],
        starts=[
            CompletionStart(
                int(handles[i]), requests[i].num_cached_tokens, requests[i].state["times"].queued
            )
            for i in _unreported(requests, shown.tolist())
        ],
        ends=[_end(progress, i, requests[i], int(handles[i])) for i in ended],
    )
    for name in ("logprobs", "prompt_logprobs", "pooled"):
        if getattr(progress, name) is not None:
            pairs = (
                (item.request.state["handle"], getattr(item, name))
                for place, item in enumerate(progress)
                if own[place]
            )
            setattr(message, name, [(handle, part) for handle, part in pairs if part is not None])
    return message


def _mask(size: int, places: Sequence[int] | Int32) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    marks = np.zeros(size, dtype=bool)
    marks[places] = True
    return marks


def _unreported(requests: list[Request], places: list[int]) -> list[int]:
    """Returns the places of requests that are in an output for the first time, and marks them."""
    fresh = [i for i in places if "reported" not in requests[i].state]
    for i in fresh:
        requests[i].state["reported"] = True
    return fresh


def _end(progress: StepProgress, place: int, request: Request, handle: int) -> CompletionEnd:
    reason = request.finish_reason
    return CompletionEnd(handle, str(reason or "error"), progress[place].stop_token)


def _exit_with(owner: int) -> None:
    """Ends this process when its owner is gone.

    The owner may be gone already, as importing the modules above takes a while.
    """

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(_ORPHAN_CHECK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def main(address: str, owner: int) -> None:
    # Ctrl-C reaches the whole process group; the owner decides when the engine may stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with(owner)
    server = SocketServer(address)
    try:
        EngineProcess(server).run()
    finally:
        server.close(_LAST_MESSAGES)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
