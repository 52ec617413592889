"""The engine's loop in a process of its own: `python -m quire.engine.process ADDRESS CLIENT`.

It connects to the socket of its client, whose process id is CLIENT, is told what to load, and then
takes requests and sends tokens until it is told to stop or its client is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import zmq

from quire.engine.builder import build_core, resolve
from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequest,
    AddRequest,
    End,
    Failed,
    Failure,
    First,
    FromEngine,
    GetSnapshot,
    GetStats,
    Loading,
    Outputs,
    Ready,
    Refused,
    Seen,
    Shutdown,
    Start,
    Stats,
    decode_to_engine,
    encode,
)
from quire.engine.snapshot import take_snapshot
from quire.errors import OverloadedError, QuireError, RequestError
from quire.plan import int32
from quire.request import Request
from quire.scheduler import StepProgress

_ORPHAN_CHECK = 0.5
"""Seconds between looks at whether the client still lives."""


class EngineProcess:
    """The loop. `socket` is a connected PAIR."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._core: EngineCore | None = None
        self._running = True

    def run(self) -> None:
        try:
            self._load()
            while self._running:
                self._take_messages()
                self._step()
        except Exception as error:
            self._send(Failed(Failure.of(error)))
            if not isinstance(error, QuireError):
                raise  # the traceback belongs in the log
        finally:
            if self._core is not None:
                self._core.shutdown()

    def _load(self) -> None:
        start = decode_to_engine(self._socket.recv())
        if not isinstance(start, Start):
            raise QuireError("the engine was not told what to load")
        last = 0.0

        def progress(what: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last > 0.05:
                last = now
                self._send(Loading(what, done, total))

        config = resolve(start.args)
        self._core = build_core(config, progress)
        # What stands now stands for good: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        self._send(Ready(config))

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    # -- in ------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """All that wait. With nothing to compute, sleeps until there is one."""
        if not self.core.has_work():
            self._socket.poll()
        while self._running:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(data)

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise QuireError("the engine is not loaded")
        return self._core

    def _handle(self, data: bytes) -> None:
        message = decode_to_engine(data)
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest(handle, index):
                self.core.abort(str(handle), index)
            case GetStats(call):
                self._send(Stats(call, self.core.stats()))
            case GetSnapshot(call, tokens):
                self._send(Seen(call, take_snapshot(self.core, tokens)))
            case Shutdown():
                self._running = False
            case Start():
                raise QuireError("the engine is loaded already")

    def _add(self, message: AddRequest) -> None:
        try:
            requests = self.core.add(
                str(message.handle),
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
            self._send(Refused(message.handle, Failure.of(error)))
            return
        for index, request in enumerate(requests):
            request.state["handle"] = message.handle + index

    # -- out -----------------------------------------------------------------------------------

    def _step(self) -> None:
        progress = self.core.step()
        for request, error in self.core.take_unfit():
            self._send(Refused(request.state["handle"], Failure.of(error)))
        if progress is None or not len(progress):
            return
        message = outputs(progress)
        if len(message.handles) or message.prompt_logprobs:
            self._send(message)


def outputs(progress: StepProgress) -> Outputs:
    """A step's progress as a message; requests in mid-prompt are left out."""
    requests, counts = progress.requests, progress.n_tokens
    handles = int32([request.state["handle"] for request in requests])
    ended = set(progress.finished)
    told = np.flatnonzero((counts > 0) | _marks(len(requests), progress.finished))
    width = np.arange(progress.tokens.shape[1])
    message = Outputs(
        handles=handles[told],
        counts=counts[told],
        tokens=progress.tokens[told][width < counts[told][:, None]],
        firsts=[
            First(int(handles[i]), requests[i].num_cached_tokens, requests[i].state["times"].queued)
            for i in _untold(requests, told.tolist())
        ],
        ends=[_end(progress, i, requests[i], int(handles[i])) for i in sorted(ended)],
    )
    for name in ("logprobs", "prompt_logprobs", "pooled"):
        if getattr(progress, name) is not None:
            pairs = ((item.request.state["handle"], getattr(item, name)) for item in progress)
            setattr(message, name, [(handle, part) for handle, part in pairs if part is not None])
    return message


def _marks(size: int, places: list[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    marks = np.zeros(size, dtype=bool)
    marks[places] = True
    return marks


def _untold(requests: list[Request], places: list[int]) -> list[int]:
    """Those whose client has heard nothing of them yet; from now on it has."""
    fresh = [i for i in places if "told" not in requests[i].state]
    for i in fresh:
        requests[i].state["told"] = True
    return fresh


def _end(progress: StepProgress, place: int, request: Request, handle: int) -> End:
    reason = request.finish_reason
    return End(handle, str(reason or "error"), progress[place].stop_token)


def _exit_with(client: int) -> None:
    """Ends this process when the client that started it is gone, however it ended. It may be gone
    already: importing what stands above takes a while."""

    def watch() -> None:
        while os.getppid() == client:
            time.sleep(_ORPHAN_CHECK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="client-watch").start()


def main(address: str, client: int) -> None:
    # Ctrl-C reaches the whole process group; the client decides when the engine may stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with(client)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    # A client that is slow for a while must not make the engine wait: its requests bound what can
    # pile up.
    socket.set_hwm(0)
    socket.connect(address)
    try:
        EngineProcess(socket).run()
    finally:
        socket.close(linger=1000)
        context.term()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
