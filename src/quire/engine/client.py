"""The async handle to an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import build_compiler
from quire.engine.core import EngineStats
from quire.engine.embedding import NO_TOKENS, Embedding, finish, pooling_of
from quire.engine.inbox import Inbox, Mailroom
from quire.engine.messages import (
    AbortRequest,
    AddRequest,
    Failed,
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
    ToEngine,
    decode_from_engine,
    encode,
)
from quire.engine.output import CompletionReader, PromptLogprobs, StreamUpdate
from quire.engine.snapshot import Snapshot
from quire.engine.tokenizer import Tokenizer
from quire.engine.validate import max_total, prompt_ids
from quire.errors import EngineDeadError, QuireError, RequestError
from quire.executor import OnProgress
from quire.plan import Int32
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.structured import Compiler

__all__ = ["EngineClient", "EngineStats", "StreamUpdate"]

_LONG_TEXT = 2000
"""Characters of a prompt that are tokenized off the event loop."""

_STOP_SECONDS = 5.0

_CHECKED_GRAMMARS = 16
"""Compiled grammars to keep here, where they are only checked."""


class EngineClient:
    """Made by `launch`. Belongs to the event loop that launched it."""

    config: EngineConfig
    tokenizer: Tokenizer | None

    def __init__(self, process: subprocess.Popen[bytes], folder: str, address: str) -> None:
        self.alive = False
        self._process = process
        self._folder = folder
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # an abort must not be lost because the engine is busy
        self._socket.bind(address)
        self._mail = Mailroom()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._compiler: Compiler | None = None
        self._died = asyncio.Event()
        self._closed = False

    # -- life ----------------------------------------------------------------------------------

    @classmethod
    async def launch(cls, args: EngineArgs, on_progress: OnProgress | None = None) -> EngineClient:
        """Starts the engine's process and waits until it takes requests.

        Raises:
            ConfigError, ModelError: the engine's own, when it cannot start.
            EngineDeadError: its process ended without a word.
        """
        folder = tempfile.mkdtemp(prefix="quire-")  # readable by its owner alone
        address = f"ipc://{folder}/engine"
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.engine.process", address, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for the client alone, from the first moment
        )
        client = cls(process, folder, address)
        try:
            client._watch_process()
            await client._start(args, on_progress)
        except BaseException:
            await client.shutdown()
            raise
        return client

    def _watch_process(self) -> None:
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop may be closed by then
                loop.call_soon_threadsafe(self._on_exit)

        threading.Thread(target=wait, daemon=True, name="engine-watch").start()

    def _on_exit(self) -> None:
        self._died.set()
        self._fail_all(EngineDeadError("the engine has stopped"))

    async def _start(self, args: EngineArgs, on_progress: OnProgress | None) -> None:
        await self._socket.send(encode(Start(args)))
        while True:
            message = await self._receive()
            match message:
                case Loading(what, done, total):
                    if on_progress is not None:
                        on_progress(what, done, total)
                case Ready(config):
                    self.config = config
                    break
                case Failed(failure):
                    raise failure.error()
        path = self.config.tokenizer_path
        self.tokenizer = None
        if path is not None:
            self.tokenizer = await asyncio.to_thread(Tokenizer.from_path, path)
            self._compiler = build_compiler(self.config, cached=_CHECKED_GRAMMARS)
        self.alive = True
        self._reader = asyncio.create_task(self._read())

    async def _receive(self) -> FromEngine:
        """The next message, or EngineDeadError if none can come any more."""
        receiving = asyncio.ensure_future(self._socket.recv())
        dying = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((receiving, dying), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Its last words may still be on the way.
                await asyncio.wait((receiving,), timeout=0.2)
            if receiving.done():
                return decode_from_engine(receiving.result())
            raise EngineDeadError(
                f"the engine's process ended with status {self._process.returncode}"
            )
        finally:
            dying.cancel()
            if not receiving.done():
                receiving.cancel()

    async def shutdown(self) -> None:
        """Stops the engine and removes its socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._fail_all(EngineDeadError("the engine was shut down"))
        if self._reader is not None:
            self._reader.cancel()
        if self._process.poll() is None:
            if self._reader is not None:  # else it is loading, and would not listen
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send(encode(Shutdown()), zmq.NOBLOCK)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._died.wait(), _STOP_SECONDS)
            if self._process.poll() is None:
                self._process.kill()
        if self._compiler is not None:
            self._compiler.shutdown()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

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
            await self._send(
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
        inbox: Inbox,
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
                        await self._send(AbortRequest(handle, index))
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
            await self._send(
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
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(encode(AbortRequest(handle)), zmq.NOBLOCK)

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its iterator ends with finish reason "abort"."""
        handle = self._mail.handle_of(request_id)
        if handle is not None and self.alive:
            await self._send(AbortRequest(handle))
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
            await self._send(question(call))
            return await answer
        finally:
            self._calls.pop(call, None)

    # -- messages ------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine has stopped")

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(encode(message))

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(decode_from_engine(await self._socket.recv()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail_all(EngineDeadError(f"lost the engine: {type(error).__name__}"))

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._mail.deliver(message)
            case Refused(handle, failure):
                self._mail.refuse(handle, failure.error())
            case Stats(call, found) | Seen(call, found):
                answer = self._calls.get(call)
                if answer is not None and not answer.done():
                    answer.set_result(found)
            case Failed(failure):
                self._fail_all(EngineDeadError(f"the engine has stopped: {failure.message}"))
            case _:
                pass

    def _fail_all(self, error: QuireError) -> None:
        self.alive = False
        self._mail.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
