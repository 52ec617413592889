"""The async client of an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from quire.arrays import Int32
from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.beam_search import BeamSearch, BeamSearchSequence
from quire.engine.loop.calls import SNAPSHOT
from quire.engine.loop.embedding import NO_TOKENS
from quire.engine.loop.features import open_prompt_reader
from quire.engine.loop.messages import AbortRequest, AddRequest
from quire.engine.loop.output import (
    CompletionReader,
    CompletionUpdate,
    PromptLogprobCollector,
    completion_readers,
)
from quire.engine.loop.prompts import check_length, max_total, prompt_ids
from quire.engine.loop.snapshot import Snapshot
from quire.engine.loop.stats import EngineStats
from quire.engine.process.host import EngineHost
from quire.engine.process.placement import Placement
from quire.engine.process.remote_engine import RemoteEngine
from quire.engine.process.replicas import Replicas
from quire.engine.process.streams import PromptVector, RequestStream
from quire.errors import (
    BrokenLogitsError,
    EngineDeadError,
    QuireError,
)
from quire.executor import OnProgress
from quire.features.call import (
    CallType,
    PromptInputs,
    PromptReader,
    RequestField,
    encode_body,
)
from quire.request import FinishReason
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

__all__ = ["CompletionUpdate", "EngineClient", "EngineStats"]

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")

_LONG_TEXT = 2000
"""Characters of a prompt above which it is tokenized off the event loop."""


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    if config.tokenizer_path is None:
        return None
    tokenizer = Tokenizer.from_path(config.tokenizer_path)
    tokenizer.warm_up()
    return tokenizer


class EngineClient:
    """Tokenizes requests, sends them to an engine, and reads their output.

    `launch` makes one with an engine; `attach` makes one for an engine that another process has
    launched. It belongs to the event loop that made it.

    Attributes:
        asleep: True from `sleep` to `wake`. Requests fail meanwhile.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.asleep = False

    # -- life ----------------------------------------------------------------------------------

    @classmethod
    async def launch(
        cls,
        args: EngineArgs,
        on_progress: OnProgress | None = None,
        *,
        restarts: int = 0,
        replicas: int = 1,
        stuck_timeout: float | None = math.inf,
    ) -> EngineClient:
        """Starts the engine's process and waits until it takes requests.

        Args:
            restarts: how often to start the engine again when it dies.
            replicas: number of engines to start, each with devices of its own.
            stuck_timeout: seconds without a turn of its loop after which an engine counts as dead
                and is ended; None: the default of `stuck_limit`.

        Raises:
            ConfigError, ModelError: the engine could not start, and reported this error.
            EngineDeadError: the engine's process ended without a message.
        """
        client = cls(Replicas.start(args, replicas, restarts, on_progress, stuck_timeout))
        await client._start()
        return client

    @classmethod
    async def attach(cls, *addresses: str) -> EngineClient:
        """Returns a client of engines that another process starts, once they take requests."""
        client = cls(Replicas([RemoteEngine(address) for address in addresses]))
        await client._start()
        return client

    async def _start(self) -> None:
        try:
            resolved = await self.replicas[0].resolved()
            # The tokenizer of a large vocabulary takes seconds, in which the model loads.
            self.config, self.tokenizer = await asyncio.gather(
                self._replicas.loaded(), asyncio.to_thread(_load_tokenizer, resolved)
            )
        except BaseException:
            await self.shutdown()
            raise
        await self._replicas.open()

    async def shutdown(self) -> None:
        """Stops the engine if this client launched it, and removes its socket. Idempotent."""
        await self._replicas.close()

    @property
    def alive(self) -> bool:
        """Whether an engine takes requests.

        Requests fail when an engine dies. After its restart it takes requests again.
        """
        return self._replicas.alive

    @property
    def end(self) -> str:
        """Returns the error that a dead engine reported; empty if it reported none."""
        return self._replicas.end

    async def sleep(self) -> None:
        """Ends the engine's process, which frees its devices. Running requests fail."""
        self.asleep = True
        await asyncio.gather(*(engine.sleep() for engine in self.replicas))

    async def wake(self) -> None:
        """Starts the engine again, and waits until it takes requests. Raises QuireError if it
        cannot start."""
        await asyncio.gather(*(engine.wake() for engine in self.replicas))
        self.asleep = False

    @property
    def silence(self) -> float:
        """Seconds for which the engine's loop has not answered."""
        return self._replicas.silence

    @property
    def host(self) -> EngineHost | None:
        """The (first) engine's process; None if another process has launched it."""
        return self._replicas.engines[0].host

    @property
    def replicas(self) -> list[RemoteEngine]:
        """The engines. Usually there is one."""
        return self._replicas.engines

    @property
    def pid(self) -> int:
        """The engine's process id. Raises QuireError if another process has launched it."""
        if self.host is None:
            raise QuireError("the engine is another process's child")
        return self.host.process.pid

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
        fields: Mapping[RequestField[Any], Any] | None = None,
        inputs: PromptInputs | None = None,
    ) -> AsyncIterator[CompletionUpdate]:
        """Streams a request's `n` completions. Closing the iterator aborts the unfinished ones.

        Args:
            inputs: the parts of the prompt that are no text, for which `prompt` has room.
            keep_special: special tokens that are in the text despite `skip_special_tokens`.
            tenant, share: see `Request`.
            fields: values for features.

        Raises:
            RequestError: the request is invalid, or can never run. It is raised before the first
                update.
            OverloadedError: the queue is full.
            EngineDeadError: the engine is gone.
        """
        self._replicas.check_alive()
        ids = await self._ids(prompt, params)
        known = ids if inputs is None else inputs.cache_ids(ids)
        placement, (engine, handle, stream) = self._open(
            request_id, params.n, known, _namespace(cache_salt, fields)
        )
        if inputs is not None:
            fields = {**(fields or {}), **inputs.fields(ids)}
        try:
            engine.send(
                AddRequest(
                    handle,
                    ids,
                    params,
                    max_total=max_total(len(ids), params, self.config),
                    priority=priority,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    share=share,
                    features=_encoded(fields),
                )
            )
            prompt_tokens = ids.tolist()
            readers = completion_readers(prompt_tokens, params, self.tokenizer, keep_special)
            source = (engine, handle, stream)
            async for update in self._updates(source, prompt_tokens, readers, params):
                placement.answered()
                yield update
        finally:
            placement.end()
            self._close(engine, request_id, handle, params.n)

    async def _updates(
        self,
        source: tuple[RemoteEngine, int, RequestStream],
        prompt: list[int],
        readers: list[CompletionReader],
        params: SamplingParams,
    ) -> AsyncIterator[CompletionUpdate]:
        engine, handle, stream = source
        about_prompt = None
        if params.prompt_logprobs is not None:
            about_prompt = PromptLogprobCollector(self.tokenizer)
        first, open_readers = True, params.n
        while open_readers:
            await stream.arrived.wait()
            stream.arrived.clear()
            if stream.error is not None:
                raise stream.error
            if about_prompt is not None:
                for part in stream.prompt_logprobs:
                    about_prompt.feed(part)
            stream.prompt_logprobs = []
            for index, experts in stream.experts:
                readers[index].feed_experts(experts)
            stream.experts = []
            for index, delta in stream.take().items():
                reader = readers[index]
                if reader.finished:
                    continue
                update = reader.feed(
                    delta.tokens,
                    delta.logprobs,
                    delta.reason,
                    delta.stop_token,
                    delta.versions,
                    delta.drawn,
                )
                update.delays = delta.delays
                if first:
                    first = False
                    update.prompt_token_ids = prompt
                    update.num_cached_tokens = delta.num_cached_tokens
                    update.queued = delta.queued
                    if about_prompt is not None:
                        update.prompt_logprobs = about_prompt.entries
                if update.finish_reason == FinishReason.ERROR:
                    update.finish_reason = None
                    yield update
                    raise BrokenLogitsError()
                if reader.finished:
                    open_readers -= 1
                    if reader.ended_by_text and delta.reason is None:
                        engine.send(AbortRequest(handle, index))
                yield update

    async def sequences(
        self,
        search: BeamSearch,
        count: int,
        prompt: list[int],
        params: SamplingParams,
        keep_special: frozenset[int] = frozenset(),
    ) -> list[BeamSearchSequence]:
        """Returns the best sequences of a finished search. A thread detokenizes them."""
        return await asyncio.to_thread(
            search.best, count, prompt, params, self.tokenizer, keep_special
        )

    async def vector(
        self,
        prompt: str | Sequence[int] | Int32,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        share: float = 1.0,
        fields: Mapping[RequestField[Any], Any] | None = None,
    ) -> PromptVector:
        """Returns the vector that a feature makes of the prompt, as `fields` ask.

        Cancelling the call aborts the request.

        Raises:
            RequestError, OverloadedError, EngineDeadError: as `generate`.
        """
        self._replicas.check_alive()
        ids = await self._ids(prompt, NO_TOKENS)
        placement, (engine, handle, stream) = self._open(
            request_id, 1, ids, _namespace(cache_salt, fields)
        )
        try:
            engine.send(
                AddRequest(
                    handle,
                    ids,
                    NO_TOKENS,
                    max_total=len(ids) + 1,
                    priority=priority,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    share=share,
                    features=_encoded(fields),
                )
            )
            await stream.arrived.wait()
            if stream.error is not None:
                raise stream.error
            delta = stream.deltas[0]
            if delta.pooled is None:
                raise QuireError("the request was aborted")
            return PromptVector(delta.pooled, ids.tolist(), delta.num_cached_tokens, delta.queued)
        finally:
            placement.end()
            self._close(engine, request_id, handle, 1)

    async def _ids(self, prompt: str | Sequence[int] | Int32, params: SamplingParams) -> Int32:
        """Returns the prompt's token ids. A long text is tokenized off the event loop."""
        if not isinstance(prompt, str):
            # Checked here, so that an overlong list is not copied.
            check_length(len(prompt), self.config)
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            return await asyncio.to_thread(prompt_ids, prompt, params, self.config, self.tokenizer)
        return prompt_ids(prompt, params, self.config, self.tokenizer)

    def _open(
        self, request_id: str, n: int, ids: Int32, namespace: str
    ) -> tuple[Placement, tuple[RemoteEngine, int, RequestStream]]:
        """Chooses an engine for a request, and opens its stream."""
        placement = self._replicas.place(ids, namespace)
        engine = self.replicas[placement.index]
        try:
            return placement, (engine, *engine.streams.open(request_id, n))
        except QuireError:
            placement.end()
            raise

    def _close(self, engine: RemoteEngine, request_id: str, handle: int, n: int) -> None:
        engine.streams.close(request_id, handle, n)
        # The request must not go on if its reader left early. Ended completions ignore this.
        if engine.alive:
            with contextlib.suppress(EngineDeadError):
                engine.send(AbortRequest(handle))

    async def abort(self, request_id: str) -> None:
        """Ends a request early. Its iterator ends with finish reason "abort"."""
        for engine in self.replicas:
            handle = engine.streams.handle_of(request_id)
            if handle is not None and engine.alive:
                engine.send(AbortRequest(handle))
                engine.streams.end(handle, "abort")

    async def stats(self) -> EngineStats:
        """Returns the counts of all engines. Raises EngineDeadError."""
        return await self._replicas.stats()

    async def reset_prefix_cache(self) -> bool:
        """Forgets the prefixes that no request uses; returns False if some are left.

        Raises:
            EngineDeadError: no engine is alive.
        """
        return await self._replicas.reset_prefix_cache()

    @functools.cached_property
    def prompt_reader(self) -> PromptReader | None:
        """Reads parts of prompts that are no text; None: no feature reads any."""
        return open_prompt_reader(self.config)

    @property
    def first_alive(self) -> RemoteEngine:
        """The first engine that is alive. Raises EngineDeadError if there is none."""
        return self._replicas.first_alive

    def check_alive(self) -> None:
        """Raises EngineDeadError if no engine is alive."""
        self._replicas.check_alive()

    async def call(self, call: CallType[Asked, Answered], request: Asked) -> Answered:
        """Makes a call to the first engine that is alive; see `RemoteEngine.call`."""
        return await self.first_alive.call(call, request)

    async def snapshot(self, tokens: bool) -> Snapshot:
        """Returns the current state of the first engine that is alive. Raises EngineDeadError.

        Args:
            tokens: includes the tokens of the prefix tree.
        """
        return await self.call(SNAPSHOT, tokens)


def _encoded(fields: Mapping[RequestField[Any], Any] | None) -> dict[str, msgspec.Raw]:
    return {field.name: encode_body(value) for field, value in (fields or {}).items()}


def _namespace(cache_salt: str, fields: Mapping[RequestField[Any], Any] | None) -> str:
    """Returns a text that is the same for all requests that may share KV."""
    apart = [value for field, value in (fields or {}).items() if field.separates]
    return "\0".join([*map(str, apart), cache_salt])
