"""A client's view of an engine's process: its connection, its loading and its life."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.messages import (
    Call,
    CallAnswer,
    CallFailed,
    Failed,
    FromEngine,
    Hello,
    Loading,
    News,
    Pong,
    Ready,
    RequestRefused,
    Resolved,
    Shutdown,
    Start,
    StepOutputs,
    ToEngine,
)
from quire.engine.process.connection import Heartbeat, Link
from quire.engine.process.host import EngineHost
from quire.engine.process.streams import StreamRouter
from quire.engine.processes import stuck_limit
from quire.errors import EngineDeadError, QuireError
from quire.executor import OnProgress
from quire.features.call import CallType, NewsType, decode_body, encode_body

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
Value = TypeVar("Value")

logger = logging.getLogger("quire.engine")

_LAST_MESSAGE_SECONDS = 0.2
"""Seconds to wait for the last message of a process that has ended."""


class RemoteEngine:
    """Sends messages to an engine's process and takes in its answers. Belongs to an event loop.

    Attributes:
        alive: whether the engine takes requests. False from its death until its restart.
        end: the error that the engine reported when it died: the lost rank, or the last step of
            each rank. Empty while the engine lives, or if it reported nothing.
        host: the process; None if another client has started it.
        losses: how often the engine was lost, with everything that it held.
        streams: streams of the running requests.
    """

    def __init__(
        self,
        address: str,
        args: EngineArgs | None = None,
        on_progress: OnProgress | None = None,
        host: EngineHost | None = None,
        stuck_timeout: float | None = math.inf,
    ) -> None:
        """Connects to the engine at `address`, once it listens.

        Args:
            args: settings of the engine to load; None if another client sends them.
            host: the engine's process, which this client starts and stops.
            stuck_timeout: see `EngineClient.launch`. It has no effect without a host.
        """
        self.alive = False
        self.end = ""
        self.losses = 0
        self.host = host
        self.streams = StreamRouter()
        self._news: dict[str, msgspec.Raw] = {}
        """Maps names of news to the latest encoded values."""
        self._values: dict[str, Any] = {}
        """Maps names of news to their decoded values, for the news that were read."""
        self._args = args
        self._stuck_timeout = stuck_timeout
        self._on_progress = on_progress
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._call_ids = itertools.count()
        self._ready: asyncio.Future[EngineConfig] = asyncio.get_running_loop().create_future()
        self._resolved: asyncio.Future[EngineConfig] = asyncio.get_running_loop().create_future()
        self._heartbeat = Heartbeat()
        self._closed = False
        self._link = Link(
            address, on_up=self._greet, on_down=self._on_down, on_message=self._dispatch
        )
        if host is not None:
            host.start(self._on_death)

    async def resolved(self) -> EngineConfig:
        """Waits until the engine's settings are known. The model may still be loading.

        Raises:
            ConfigError, ModelError, EngineDeadError: see `loaded`.
        """
        done, _ = await asyncio.wait(
            (self._resolved, self._ready), return_when=asyncio.FIRST_COMPLETED
        )
        return (self._ready if self._ready in done else self._resolved).result()

    async def loaded(self) -> EngineConfig:
        """Waits until the engine is loaded.

        Raises:
            ConfigError, ModelError: the engine could not start, and reported this error.
            EngineDeadError: the engine's process ended without a message.
        """
        return await self._ready

    def open(self) -> None:
        """Begins to take requests. Called when the engine and its client are set up."""
        self.alive = True
        self._heartbeat.start(self._link, self._end_stuck)

    async def close(self) -> None:
        """Stops the engine if this client started it, and disconnects. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loading = not self._ready.done()
        self._fail_all(EngineDeadError("the engine was shut down"))
        self._heartbeat.stop()
        if self.host is not None:
            await self.host.stop(self.host.process.kill if loading else self._ask_to_stop)
        self._link.close()

    async def sleep(self) -> None:
        """Ends the engine's process, which frees its devices. Running requests fail.

        Raises:
            QuireError: another client has started the process.
        """
        if self.host is None:
            raise QuireError("the engine is another process's child")
        self._fail_all(EngineDeadError("the engine sleeps"))
        self._on_progress = None
        await self.host.rest(self._ask_to_stop)

    async def wake(self) -> None:
        """Starts the engine again, and waits until it takes requests.

        Raises:
            QuireError: the engine could not start. Its host goes on trying.
        """
        if self.host is None:
            raise QuireError("the engine is another process's child")
        self._ready = asyncio.get_running_loop().create_future()
        self.host.wake()
        await self.loaded()
        self._heartbeat.note_answer()
        self.alive = True

    def _end_stuck(self, silence: float) -> None:
        """Ends the engine's process if it has been silent for too long. The host starts it
        again."""
        if self.host is None or not self.alive:
            return
        limit = stuck_limit(self._stuck_timeout, self._ready.result().device)
        if silence > limit:
            logger.error(
                "the engine's loop has not turned for %g s (--stuck-timeout); ending it", limit
            )
            self._fail_all(EngineDeadError("the engine has stopped"))
            self.host.process.kill()

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(EngineDeadError):
            self._link.send(Shutdown())

    @property
    def silence(self) -> float:
        """Seconds for which the engine's loop has not answered; infinite if it is not alive."""
        return self._heartbeat.silence if self.alive else math.inf

    @property
    def responsive(self) -> bool:
        """Whether the engine's loop has answered recently."""
        return self.alive and self._heartbeat.recent

    # -- messages ------------------------------------------------------------------------------

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine has stopped")

    def send(self, message: ToEngine) -> None:
        """Sends a message. Raises EngineDeadError if there is no connection."""
        self._link.send(message)

    async def call(
        self,
        call: CallType[Asked, Answered],
        request: Asked,
        on_end: Callable[[Any], None] | None = None,
    ) -> Answered:
        """Makes a call; returns its answer.

        Args:
            on_end: called once, with the second answer of a call that starts work (`Begun`), or
                with None if the engine is gone before.

        Raises:
            EngineDeadError: the engine is gone.
            QuireError: the engine refused the call, or failed to answer it.
        """
        self.check_alive()
        number, answer = self._expect()
        end = None if on_end is None else self._expect()
        try:
            body = encode_body(request)
            self.send(Call(number, call.name, body, None if end is None else end[0]))
            found = decode_body(await answer, call.answer)
        except BaseException:
            if end is not None:
                end[1].cancel()
            raise
        finally:
            self._calls.pop(number, None)
        if on_end is not None and end is not None:
            end[1].add_done_callback(functools.partial(_hand_on, on_end, call.end))
        return found

    def news(self, news: NewsType[Value]) -> Value:
        """Returns the latest value of these news, or their default if none has arrived."""
        body = self._news.get(news.name)
        if body is None:
            return news.default
        if news.name not in self._values:
            self._values[news.name] = decode_body(body, news.value)
        value: Value = self._values[news.name]
        return value

    def _expect(self) -> tuple[int, asyncio.Future[msgspec.Raw]]:
        """Registers a call. Returns its number, and a future of its answer.

        The future gets EngineDeadError if the engine is gone before it answers.
        """
        number = next(self._call_ids)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._calls.pop(number, None))
        return number, answer

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self.streams.deliver(message)
            case Pong():
                self._heartbeat.note_answer()
            case RequestRefused(handle, failure):
                self.streams.refuse(handle, failure.error())
            case CallAnswer(call, body):
                self._answer(call, body)
            case CallFailed(call, failure):
                self._answer(call, failure.error())
            case News(name, body):
                self._news[name] = body
                self._values.pop(name, None)
            case _:
                self._note_start(message)

    def _note_start(self, message: Loading | Resolved | Ready | Failed) -> None:
        """Notes how far the start is, or that the engine has failed."""
        match message:
            case Loading(what, done, total):
                if self._on_progress is not None and not self._ready.done():
                    self._on_progress(what, done, total)
            case Resolved(config):
                if not self._resolved.done():
                    self._resolved.set_result(config)
            case Ready(config):
                self.end = ""
                if not self._ready.done():
                    self._ready.set_result(config)
                elif not self._closed:
                    self._heartbeat.note_answer()
                    self.alive = True
            case Failed(failure):
                error = failure.error()
                # Other errors may contain paths, which clients must not see.
                self.end = failure.message if isinstance(error, EngineDeadError) else ""
                self._never_ready(error)
                self._fail_all(EngineDeadError(f"the engine has stopped: {failure.message}"))

    def _answer(self, call: int, found: msgspec.Raw | QuireError) -> None:
        """Resolves a call with an answer or an error, unless nobody waits for it any more."""
        answer = self._calls.get(call)
        if answer is None or answer.done():
            return
        if isinstance(found, QuireError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    # -- life ----------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Greets an engine that has begun to listen.

        The client that started it sends the settings to load. Other clients send `Hello`.
        """
        with contextlib.suppress(EngineDeadError):
            self._link.send(Hello() if self._args is None else Start(self._args))

    def _on_down(self) -> None:
        self.losses += 1
        self._fail_all(EngineDeadError("the engine has stopped"))

    def _on_death(self, status: int) -> None:
        """Called when the process that this client started has ended."""
        self._on_down()
        if not self._ready.done():
            error = EngineDeadError(f"the engine's process ended with status {status}")
            asyncio.get_running_loop().call_later(_LAST_MESSAGE_SECONDS, self._never_ready, error)

    def _never_ready(self, error: QuireError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)

    def _fail_all(self, error: QuireError) -> None:
        self.alive = False
        self.streams.fail_all(error)
        for answer in list(self._calls.values()):
            if not answer.done():
                answer.set_exception(error)


def _hand_on(
    on_end: Callable[[Any], None], kind: type[Any] | None, answer: asyncio.Future[msgspec.Raw]
) -> None:
    """Calls `on_end` with the answer, or with None if the engine is gone."""
    gone = answer.cancelled() or answer.exception() is not None
    on_end(None if gone else decode_body(answer.result(), kind))
