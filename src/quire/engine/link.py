"""The connection to an engine's process, which may come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from quire.engine.framing import FrameDecoder, framed
from quire.engine.messages import FromEngine, Ping, ToEngine, decode_from_engine, encode
from quire.errors import EngineDeadError

_RECONNECT_SECONDS = 0.05
_PING_SECONDS = 0.5
_SILENCE_SECONDS = 2.0
"""Seconds without an answer after which other engines are chosen first."""


class Link(asyncio.Protocol):
    """Connects to the Unix socket at `address` as soon as the engine listens there, and again after
    every loss of the connection.

    Args:
        on_up: called when the engine's process listens.
        on_down: called when it listens no more; messages under way are lost.
        on_message: called with each message. All are called on the event loop.
    """

    def __init__(
        self,
        address: str,
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_message: Callable[[FromEngine], None],
    ) -> None:
        self._address = address
        self._on_up, self._on_down, self._on_message = on_up, on_down, on_message
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._task = asyncio.create_task(self._keep_connected())

    def send(self, message: ToEngine) -> None:
        """Raises EngineDeadError where the engine does not listen."""
        if self._transport is None:
            raise EngineDeadError("the engine has stopped")
        self._transport.write(framed(encode(message)))

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            with contextlib.suppress(OSError):  # it does not listen yet
                await loop.create_unix_connection(lambda: self, self._address)
                await self._lost.wait()
            await asyncio.sleep(_RECONNECT_SECONDS)

    def close(self) -> None:
        """Disconnects for good. Idempotent."""
        self._task.cancel()
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._decoder = FrameDecoder()
        self._transport = transport  # type: ignore[assignment]
        self._on_up()

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._on_message(decode_from_engine(message))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost.set()
        self._on_down()


class Heartbeat:
    """Pings the engine's loop twice a second, and notes its answers.

    Silence is counted in pings without an answer: while this process has no turn itself, the
    engine's answers wait, and it is not silent.
    """

    def __init__(self) -> None:
        self._unanswered = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, link: Link, on_silence: Callable[[float], None]) -> None:
        """on_silence: told of the seconds of silence twice a second."""
        self.heard()
        self._task = asyncio.create_task(self._ping(link, on_silence))

    async def _ping(self, link: Link, on_silence: Callable[[float], None]) -> None:
        while True:
            with contextlib.suppress(EngineDeadError):
                link.send(Ping())
            self._unanswered += 1
            await asyncio.sleep(_PING_SECONDS)
            on_silence(self.silence)

    def heard(self) -> None:
        self._unanswered = 0

    @property
    def silence(self) -> float:
        """For how many seconds the loop has not answered."""
        return max(0, self._unanswered - 1) * _PING_SECONDS

    @property
    def recent(self) -> bool:
        return self.silence < _SILENCE_SECONDS

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
