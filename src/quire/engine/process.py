"""The engine's loop in a process of its own: `python -m quire.engine.process ADDRESS OWNER`.

It listens at ADDRESS, is told what to load by the process that started it, whose id is OWNER, and
then takes requests and sends tokens until it is told to stop or its owner is gone.
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
"""Seconds between looks at whether the client still lives."""
_LAST_WORDS = 1.0
"""Seconds that clients have to read them."""


@dataclass(slots=True, eq=False)
class Client:
    """number: counts them. handles: of its running requests, with the completions that have not
    ended."""

    peer: Connection
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
    """Those that have said something."""

    def __init__(self) -> None:
        self._by_peer: dict[Connection, Client] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_peer.values()))

    def __len__(self) -> int:
        return len(self._by_peer)

    def of(self, peer: Connection) -> Client:
        client = self._by_peer.get(peer)
        if client is None:
            client = self._by_peer[peer] = Client(peer, self._count)
            self._count += 1
        return client

    def forget(self, client: Client) -> None:
        self._by_peer.pop(client.peer, None)


class EngineProcess:
    """The loop."""

    def __init__(self, board: SocketServer) -> None:
        self._board = board
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
            arrived = self._board.receive(wait=True)
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
        self._board.send(client.peer, encode(message))

    def _forget(self, client: Client) -> None:
        """It is gone, and nobody will read what its requests give."""
        self._clients.forget(client)
        for handle in list(client.handles):
            self.core.abort(client.request(handle))

    # -- in ------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """All that wait. With nothing to compute, sleeps until there is one."""
        arrived = self._board.receive(wait=not self.core.has_work())
        while arrived is not None and self._running:
            peer, data = arrived
            if data is None:
                self._forget(self._clients.of(peer))
            else:
                self._handle(self._clients.of(peer), data)
            arrived = self._board.receive(wait=False)

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
        """The places of each client's rows, int32."""
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
    """What a step brought to the requests at `places`; those in mid-prompt are left out."""
    requests, counts = progress.requests, progress.n_tokens
    handles = int32([request.state["handle"] for request in requests])
    own = _marks(len(requests), places)
    ended = [place for place in sorted(progress.finished) if own[place]]
    told = np.flatnonzero(own & ((counts > 0) | _marks(len(requests), ended)))
    width = np.arange(progress.tokens.shape[1])
    message = StepOutputs(
        handles=handles[told],
        counts=counts[told],
        tokens=progress.tokens[told][width < counts[told][:, None]],
        firsts=[
            CompletionStart(
                int(handles[i]), requests[i].num_cached_tokens, requests[i].state["times"].queued
            )
            for i in _untold(requests, told.tolist())
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


def _marks(size: int, places: Sequence[int] | Int32) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    marks = np.zeros(size, dtype=bool)
    marks[places] = True
    return marks


def _untold(requests: list[Request], places: list[int]) -> list[int]:
    """Those whose client has heard nothing of them yet; from now on it has."""
    fresh = [i for i in places if "told" not in requests[i].state]
    for i in fresh:
        requests[i].state["told"] = True
    return fresh


def _end(progress: StepProgress, place: int, request: Request, handle: int) -> CompletionEnd:
    reason = request.finish_reason
    return CompletionEnd(handle, str(reason or "error"), progress[place].stop_token)


def _exit_with(owner: int) -> None:
    """Ends this process when the one that started it is gone, however it ended. It may be gone
    already: importing what stands above takes a while."""

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(_ORPHAN_CHECK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def main(address: str, owner: int) -> None:
    # Ctrl-C reaches the whole process group; the owner decides when the engine may stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with(owner)
    board = SocketServer(address)
    try:
        EngineProcess(board).run()
    finally:
        board.close(_LAST_WORDS)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
