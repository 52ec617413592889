"""The connection to an engine's process, which may come and go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from quire.engine.messages import FromEngine, Ping, ToEngine, decode_from_engine, encode
from quire.errors import EngineDeadError

_RECONNECT_MS = 50
_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 2.0
"""Without an answer, after which the engine's loop does not turn."""


class Link:
    """Connects to `address` as soon as somebody listens there, and again whenever that is gone.

    on_up: the engine's process listens. on_down: it does no more; what was sent is lost.
    on_message: it said something. All are called on the event loop.
    """

    def __init__(
        self,
        address: str,
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_message: Callable[[FromEngine], None],
    ) -> None:
        self._on_up, self._on_down, self._on_message = on_up, on_down, on_message
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # an abort must not be lost because the engine is busy
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nor may a new engine get an old one's requests
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._read())]

    def send(self, message: ToEngine) -> None:
        """Raises EngineDeadError where nobody listens."""
        # At once, or not at all: its future is done.
        sent = cast("asyncio.Future[None]", self._socket.send(encode(message), zmq.NOBLOCK))
        if sent.exception() is not None:
            raise EngineDeadError("the engine has stopped")

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_up()
            else:
                self._on_down()

    async def _read(self) -> None:
        while True:
            self._on_message(decode_from_engine(await self._socket.recv()))

    def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


class Beat:
    """Asks the engine's loop again and again whether it turns."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self, link: Link) -> None:
        self.heard()
        self._task = asyncio.create_task(self._ask(link))

    async def _ask(self, link: Link) -> None:
        while True:
            with contextlib.suppress(EngineDeadError):
                link.send(Ping())
            await asyncio.sleep(_BEAT_SECONDS)

    def heard(self) -> None:
        self._heard = time.monotonic()

    @property
    def recent(self) -> bool:
        return time.monotonic() - self._heard < _SILENCE_SECONDS

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
