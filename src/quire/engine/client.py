"""The async handle to an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from quire.arrays import Int32
from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import build_compiler
from quire.engine.core import EngineStats
from quire.engine.embedding import NO_TOKENS, Embedding, finish, pooling_of
from quire.engine.host import EngineHost
from quire.engine.link import Heartbeat, Link
from quire.engine.messages import (
    AbortRequest,
    AddRequest,
    Failed,
    FromEngine,
    GetSnapshot,
    GetStats,
    Hello,
    Loading,
    Pong,
    Ready,
    RequestRefused,
    Shutdown,
    SnapshotReply,
    Start,
    StatsReply,
    StepOutputs,
    ToEngine,
)
from quire.engine.output import CompletionReader, PromptLogprobs, StreamUpdate
from quire.engine.snapshot import Snapshot
from quire.engine.streams import RequestStream, StreamRouter
from quire.engine.tokenizer import Tokenizer
from quire.engine.validate import max_total, prompt_ids
from quire.errors import EngineDeadError, QuireError, RequestError
from quire.executor import OnProgress
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.structured import Compiler

__all__ = ["EngineClient", "EngineStats", "StreamUpdate"]

_LONG_TEXT = 2000
"""Characters of a prompt that are tokenized off the event loop."""

_CHECKED_GRAMMARS = 16
"""Compiled grammars to keep here, where they are only checked."""


class EngineClient:
    """Made by `launch`, or by `attach` where another process has launched the engine. Belongs to
    the event loop that made it.

    alive: requests are taken. When the engine dies they fail, and when it is there again they are
    taken again.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None

    def __init__(
        self, address: str, args: EngineArgs | None, on_progress: OnProgress | None
    ) -> None:
        """args: what the engine is to load, where that is this client's to say."""
        self.alive = False
        self.host: EngineHost | None = None
        self._args = args
        self._on_progress = on_progress
        self._mail = StreamRouter()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._compiler: Compiler | None = None
        self._ready: asyncio.Future[EngineConfig] = asyncio.get_running_loop().create_future()
        self._beat = Heartbeat()
        self._closed = False
        self._link = Link(
            address, on_up=self._greet, on_down=self._on_down, on_message=self._dispatch
        )

    # -- life ----------------------------------------------------------------------------------

    @classmethod
    async def launch(
        cls, args: EngineArgs, on_progress: OnProgress | None = None, *, restarts: int = 0
    ) -> EngineClient:
        """Starts the engine's process and waits until it takes requests. restarts: how often to
        start it again when it dies.

        Raises:
            ConfigError, ModelError: the engine's own, when it cannot start.
            EngineDeadError: its process ended without a word.
        """
        host = EngineHost(restarts)
        client = cls(host.address, args, on_progress)
        client.host = host
        host.start(client._on_death)
        return await client._started()

    @classmethod
    async def attach(cls, address: str) -> EngineClient:
        """Waits until an engine that another process starts takes requests."""
        return await cls(address, None, None)._started()

    async def _started(self) -> EngineClient:
        try:
            self.config = await self._ready
            path = self.config.tokenizer_path
            self.tokenizer = None
            if path is not None:
                self.tokenizer = await asyncio.to_thread(Tokenizer.from_path, path)
                await asyncio.to_thread(self.tokenizer.warm_up)
                self._compiler = build_compiler(self.config, cached=_CHECKED_GRAMMARS)
        except BaseException:
            await self.shutdown()
            raise
        self.alive = True
        self._beat.start(self._link)
        return self

    def _greet(self) -> None:
        """The engine listens: it is told what to load, or asked whether it has."""
        with contextlib.suppress(EngineDeadError):
            self._link.send(Hello() if self._args is None else Start(self._args))

    def _on_down(self) -> None:
        self._fail_all(EngineDeadError("the engine has stopped"))

    def _on_death(self, status: int) -> None:
        """Of the process that this client started."""
        self._on_down()
        if not self._ready.done():
            error = EngineDeadError(f"the engine's process ended with status {status}")
            # Its last words may still be on the way.
            asyncio.get_running_loop().call_later(0.2, self._never_ready, error)

    def _never_ready(self, error: QuireError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)

    async def shutdown(self) -> None:
        """Stops the engine if this client launched it, and removes its socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loading = not self._ready.done()
        self._fail_all(EngineDeadError("the engine was shut down"))
        self._beat.stop()
        if self.host is not None:
            await self.host.stop(self.host.process.kill if loading else self._ask_to_stop)
        if self._compiler is not None:
            self._compiler.shutdown()
        self._link.close()

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(EngineDeadError):
            self._link.send(Shutdown())

    @property
    def pid(self) -> int:
        """The engine's process, where this client has launched it."""
        if self.host is None:
            raise QuireError("the engine is another process's child")
        return self.host.process.pid

    @property
    def responsive(self) -> bool:
        """Whether the engine's loop has turned lately."""
        return self.alive and self._beat.recent

    # -- requests ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Sequence[int] | Int32,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        keep_special: frozenset[int] = frozenset(),
        tenant: str = "",
        share: float = 1.0,
    ) -> AsyncIterator[StreamUpdate]:
        """Streams a request's `n` completions. Closing the iterator aborts what still runs.

        keep_special: special tokens that are in the text despite `skip_special_tokens`.
        tenant, share: see `Request`.

        Raises:
            RequestError: the request is invalid, or can never run; before the first update.
            OverloadedError: the queue is full.
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        ids = await self._ids(prompt, params)
        if params.structured_outputs is not None:
            await self.check_grammar(params.structured_outputs)
        self._check_alive()
        handle, inbox = self._mail.open(request_id, params.n)
        try:
            self._link.send(
                AddRequest(
                    handle,
                    ids,
                    params,
                    max_total=max_total(len(ids), params, self.config),
                    priority=priority,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    share=share,
                )
            )
            prompt_tokens = ids.tolist()
            readers = [
                CompletionReader(i, prompt_tokens, params, self.tokenizer, keep_special)
                for i in range(params.n)
            ]
            async for update in self._updates(handle, inbox, prompt_tokens, readers, params):
                yield update
        finally:
            self._close(request_id, handle, params.n)

    async def _updates(
        self,
        handle: int,
        inbox: RequestStream,
        prompt: list[int],
        readers: list[CompletionReader],
        params: SamplingParams,
    ) -> AsyncIterator[StreamUpdate]:
        about_prompt = None
        if params.prompt_logprobs is not None:
            about_prompt = PromptLogprobs(self.tokenizer)
        first, open_readers = True, params.n
        while open_readers:
            await inbox.arrived.wait()
            inbox.arrived.clear()
            if inbox.error is not None:
                raise inbox.error
            if about_prompt is not None:
                for part in inbox.prompt_logprobs:
                    about_prompt.feed(part)
            inbox.prompt_logprobs = []
            arrived, inbox.news = inbox.news, {}
            for index, news in arrived.items():
                reader = readers[index]
                if reader.finished:
                    continue
                update = reader.feed(news.tokens, news.logprobs, news.reason, news.stop_token)
                if first:
                    first = False
                    update.prompt_token_ids = prompt
                    update.num_cached_tokens = news.num_cached_tokens
                    update.queued = news.queued
                    if about_prompt is not None:
                        update.prompt_logprobs = about_prompt.entries
                if reader.finished:
                    open_readers -= 1
                    if reader.ended_by_text and news.reason is None:
                        self._link.send(AbortRequest(handle, index))
                yield update

    async def embed(
        self,
        prompt: str | Sequence[int] | Int32,
        params: PoolingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        share: float = 1.0,
    ) -> Embedding:
        """The prompt as a vector. Cancelling it aborts the request. Raises as `generate`."""
        self._check_alive()
        pooling = pooling_of(params, self.config)
        ids = await self._ids(prompt, NO_TOKENS)
        self._check_alive()
        handle, inbox = self._mail.open(request_id, 1)
        try:
            self._link.send(
                AddRequest(
                    handle,
                    ids,
                    NO_TOKENS,
                    max_total=len(ids) + 1,
                    priority=priority,
                    cache_salt=cache_salt,
                    pooling=pooling,
                    tenant=tenant,
                    share=share,
                )
            )
            await inbox.arrived.wait()
            if inbox.error is not None:
                raise inbox.error
            news = inbox.news[0]
            if news.pooled is None:
                raise QuireError("the request was aborted")
            return Embedding(
                finish(news.pooled, params), ids.tolist(), news.num_cached_tokens, news.queued
            )
        finally:
            self._close(request_id, handle, 1)

    async def _ids(self, prompt: str | Sequence[int] | Int32, params: SamplingParams) -> Int32:
        """A long text is tokenized off the event loop."""
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            return await asyncio.to_thread(prompt_ids, prompt, params, self.config, self.tokenizer)
        return prompt_ids(prompt, params, self.config, self.tokenizer)

    async def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Compiles a grammar, off the event loop. Raises RequestError where it is unfit."""
        if self._compiler is None:
            raise RequestError(
                "structured outputs need a tokenizer, which was not loaded", "structured_outputs"
            )
        verdict = asyncio.wrap_future(self._compiler.checked(params))
        await asyncio.wait((verdict,), timeout=self._compiler.config.timeout)
        if not verdict.done():
            raise self._compiler.too_slow()
        verdict.result()

    def _close(self, request_id: str, handle: int, n: int) -> None:
        self._mail.close(request_id, handle, n)
        # Ended completions do not mind; a request that was left early must not run on.
        if self.alive:
            with contextlib.suppress(EngineDeadError):
                self._link.send(AbortRequest(handle))

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its iterator ends with finish reason "abort"."""
        handle = self._mail.handle_of(request_id)
        if handle is not None and self.alive:
            self._link.send(AbortRequest(handle))
            self._mail.end(handle, "abort")

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError."""
        stats: EngineStats = await self._ask(GetStats)
        return stats

    async def snapshot(self, tokens: bool) -> Snapshot:
        """What the engine is at; tokens: with those of the prefix tree. Raises EngineDeadError."""
        snapshot: Snapshot = await self._ask(lambda call: GetSnapshot(call, tokens))
        return snapshot

    async def _ask(self, question: Callable[[int], ToEngine]) -> Any:
        self._check_alive()
        call = next(self._call_ids)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(question(call))
            return await answer
        finally:
            self._calls.pop(call, None)

    # -- messages ------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine has stopped")

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self._mail.deliver(message)
            case Pong():
                self._beat.heard()
            case RequestRefused(handle, failure):
                self._mail.refuse(handle, failure.error())
            case StatsReply(call, found) | SnapshotReply(call, found):
                answer = self._calls.get(call)
                if answer is not None and not answer.done():
                    answer.set_result(found)
            case Loading(what, done, total):
                if self._on_progress is not None and not self._ready.done():
                    self._on_progress(what, done, total)
            case Ready(config):
                if not self._ready.done():
                    self._ready.set_result(config)
                elif not self._closed:
                    self._beat.heard()
                    self.alive = True
            case Failed(failure):
                self._never_ready(failure.error())
                self._fail_all(EngineDeadError(f"the engine has stopped: {failure.message}"))
            case _:
                pass

    def _fail_all(self, error: QuireError) -> None:
        self.alive = False
        self._mail.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
