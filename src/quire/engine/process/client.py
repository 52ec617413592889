"""The async client of an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from quire.arrays import Int32
from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.beam_search import BeamSearch, BeamSearchSequence
from quire.engine.loop.embedding import NO_TOKENS, Embedding, finish, pooling_of
from quire.engine.loop.messages import (
    AbortRequest,
    AddRequest,
    ChangeAdapters,
    Failure,
    GetEvents,
    GetSnapshot,
    GrantPrompt,
    PeerReply,
    SetPeers,
    ShakeHands,
)
from quire.engine.loop.output import CompletionReader, CompletionUpdate, PromptLogprobCollector
from quire.engine.loop.prompts import max_total, prompt_ids
from quire.engine.loop.snapshot import Snapshot
from quire.engine.loop.stats import EngineStats
from quire.engine.process.host import EngineHost
from quire.engine.process.placement import Placement
from quire.engine.process.remote_engine import RemoteEngine
from quire.engine.process.replicas import Replicas
from quire.engine.process.streams import RequestStream
from quire.errors import (
    BrokenLogitsError,
    EngineDeadError,
    PromptTooLongError,
    QuireError,
    RequestError,
)
from quire.executor import OnProgress
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import ClosedGrant, Grant, PromptRequest, Welcome
from quire.features.kv_events.messages import KVEvents
from quire.features.structured_output import Compiler, build_compiler
from quire.pooling_params import PoolingParams
from quire.request import FinishReason
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

__all__ = ["CompletionUpdate", "EngineClient", "EngineStats"]

Wanted = TypeVar("Wanted", Welcome, Grant, list[str])

_LONG_TEXT = 2000
"""Characters of a prompt above which it is tokenized off the event loop."""

_CHECKED_GRAMMARS = 16
"""Compiled grammars to keep here, where they are only checked."""


class EngineClient:
    """Tokenizes requests, sends them to an engine, and reads their output.

    Made by `launch`, or by `attach` where another process has launched the engine. Belongs to the
    event loop that made it.

    Attributes:
        asleep: between `sleep` and `wake`; requests fail.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._compiler: Compiler | None = None
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
            replicas: engines to start, each with devices of its own.
            stuck_timeout: seconds without a turn of its loop after which an engine is ended, as if
                it had died; None: as `stuck_limit` has it.

        Raises:
            ConfigError, ModelError: the engine's own, when it cannot start.
            EngineDeadError: its process ended without a message.
        """
        client = cls(Replicas.start(args, replicas, restarts, on_progress, stuck_timeout))
        await client._start()
        return client

    @classmethod
    async def attach(cls, *addresses: str) -> EngineClient:
        """Waits until the engines that another process starts take requests."""
        client = cls(Replicas([RemoteEngine(address) for address in addresses]))
        await client._start()
        return client

    async def _start(self) -> None:
        try:
            self.config = await self._replicas.loaded()
            path = self.config.tokenizer_path
            self.tokenizer = None
            if path is not None:
                self.tokenizer = await asyncio.to_thread(Tokenizer.from_path, path)
                await asyncio.to_thread(self.tokenizer.warm_up)
                self._compiler = build_compiler(self.config, cached=_CHECKED_GRAMMARS)
        except BaseException:
            await self.shutdown()
            raise
        await self._replicas.open()

    async def shutdown(self) -> None:
        """Stops the engine if this client launched it, and removes its socket. Idempotent."""
        await self._replicas.close()
        if self._compiler is not None:
            self._compiler.shutdown()

    @property
    def alive(self) -> bool:
        """Whether requests are taken.

        Requests fail when the engine dies, and are taken again when it has been started again.
        """
        return self._replicas.alive

    @property
    def end(self) -> str:
        """Returns what an engine told of its death; empty where it told nothing."""
        return self._replicas.end

    async def sleep(self) -> None:
        """Ends the engine's process; its devices are free then. Running requests fail."""
        self.asleep = True
        await asyncio.gather(*(engine.sleep() for engine in self.replicas))

    async def wake(self) -> None:
        """Starts the engine again, and waits until it takes requests. Raises QuireError where it
        cannot start."""
        await asyncio.gather(*(engine.wake() for engine in self.replicas))
        self.asleep = False

    @property
    def silence(self) -> float:
        """Seconds for which the engine's loop has not answered."""
        return self._replicas.silence

    @property
    def host(self) -> EngineHost | None:
        """The engine's process, the first of several, where this client has launched it."""
        return self._replicas.engines[0].host

    @property
    def replicas(self) -> list[RemoteEngine]:
        """The engines, most often one."""
        return self._replicas.engines

    @property
    def pid(self) -> int:
        """The engine's process id, where this client has launched it."""
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
        adapter: str = "",
        prefill: str | None = None,
        traceparent: str = "",
    ) -> AsyncIterator[CompletionUpdate]:
        """Streams a request's `n` completions. Closing the iterator aborts what still runs.

        Args:
            keep_special: special tokens that are in the text despite `skip_special_tokens`.
            tenant, share, adapter: see `Request`.
            prefill, traceparent: see `AddRequest`.

        Raises:
            RequestError: the request is invalid, or can never run; before the first update.
            OverloadedError: the queue is full.
            EngineDeadError: the engine is gone.
        """
        self._replicas.check_alive()
        ids = await self._ids(prompt, params)
        if params.structured_outputs is not None:
            await self.check_grammar(params.structured_outputs)
        placement, (engine, handle, stream) = self._open(
            request_id, params.n, ids, f"{adapter}\0{cache_salt}"
        )
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
                    adapter=adapter,
                    prefill=prefill,
                    traceparent=traceparent,
                )
            )
            prompt_tokens = ids.tolist()
            readers = [
                CompletionReader(i, prompt_tokens, params, self.tokenizer, keep_special)
                for i in range(params.n)
            ]
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
            for index, delta in stream.take().items():
                reader = readers[index]
                if reader.finished:
                    continue
                update = reader.feed(delta.tokens, delta.logprobs, delta.reason, delta.stop_token)
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
        """Returns the best sequences of a search that is over; texts are made in a thread."""
        return await asyncio.to_thread(
            search.best, count, prompt, params, self.tokenizer, keep_special
        )

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
        adapter: str = "",
    ) -> Embedding:
        """Returns the prompt's embedding. Cancelling it aborts the request. Raises as
        `generate`."""
        self._replicas.check_alive()
        pooling = pooling_of(params, self.config)
        ids = await self._ids(prompt, NO_TOKENS)
        placement, (engine, handle, stream) = self._open(
            request_id, 1, ids, f"{adapter}\0{cache_salt}"
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
                    pooling=pooling,
                    tenant=tenant,
                    share=share,
                    adapter=adapter,
                )
            )
            await stream.arrived.wait()
            if stream.error is not None:
                raise stream.error
            delta = stream.deltas[0]
            if delta.pooled is None:
                raise QuireError("the request was aborted")
            return Embedding(
                finish(delta.pooled, params), ids.tolist(), delta.num_cached_tokens, delta.queued
            )
        finally:
            placement.end()
            self._close(engine, request_id, handle, 1)

    async def _ids(self, prompt: str | Sequence[int] | Int32, params: SamplingParams) -> Int32:
        """Returns the prompt's token ids. A long text is tokenized off the event loop."""
        limit = self.config.scheduler.max_model_len
        if not isinstance(prompt, str) and len(prompt) >= limit:
            raise PromptTooLongError(len(prompt), limit)  # before it is copied
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            return await asyncio.to_thread(prompt_ids, prompt, params, self.config, self.tokenizer)
        return prompt_ids(prompt, params, self.config, self.tokenizer)

    async def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Compiles a grammar, off the event loop.

        Raises:
            RequestError: it cannot be enforced.
            CompilerBusyError: other grammars took too long.
        """
        if self._compiler is None:
            raise RequestError(
                "structured outputs need a tokenizer, which was not loaded", "structured_outputs"
            )
        verdict = asyncio.wrap_future(self._compiler.checked(params))
        try:
            await asyncio.wait((verdict,), timeout=self._compiler.config.timeout)
            if not verdict.done():
                raise self._compiler.late(params)
        finally:
            if not verdict.done():
                self._compiler.forget(params)
        verdict.result()

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
        # Ended completions do not mind; a request that was left early must not run on.
        if engine.alive:
            with contextlib.suppress(EngineDeadError):
                engine.send(AbortRequest(handle))

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its iterator ends with finish reason "abort"."""
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
            EngineDeadError: no engine is there.
        """
        return await self._replicas.reset_prefix_cache()

    async def shake_hands(self, facts: KVFacts) -> Welcome:
        """Compares another engine's facts with those of this one.

        Raises:
            PeerMismatchError: they differ.
            RequestError: this engine computes no prompts for others.
            EngineDeadError: the engine is gone.
        """
        engine = self._replicas.first_alive
        reply: PeerReply = await engine.ask(lambda call: ShakeHands(call, facts))
        return _wanted(reply, reply.welcome)

    async def grant(
        self,
        asked: PromptRequest,
        *,
        tenant: str,
        share: float,
        on_end: Callable[[ClosedGrant | None], None] | None = None,
    ) -> Grant:
        """Has a prompt computed for another engine, which then fetches its KV. on_end: called once,
        when the grant ends; with None where the engine is gone.

        Raises:
            PeerMismatchError: the engine is not the one that was meant.
            RequestError, OverloadedError, EngineDeadError: as `generate`.
        """
        engine = self._replicas.first_alive
        ended, end = (None, None) if on_end is None else engine.expect()
        try:
            reply: PeerReply = await engine.ask(
                lambda call: GrantPrompt(call, asked, tenant, share, ended)
            )
            granted = _wanted(reply, reply.grant)
        except BaseException:
            if end is not None:
                end.cancel()
            raise
        if on_end is not None and end is not None:
            end.add_done_callback(
                lambda done: on_end(None if done.cancelled() or done.exception() else done.result())
            )
        return granted

    async def set_peers(self, peers: list[str]) -> list[str]:
        """Says which servers compute prompts for the engines here; returns their addresses.

        Raises:
            RequestError: these engines ask nobody, or an address is none.
            EngineDeadError: an engine is gone.
        """
        known: list[str] = []
        for engine in self.replicas:
            reply: PeerReply = await engine.ask(lambda call: SetPeers(call, peers))
            known = _wanted(reply, reply.peers)
        return known

    async def kv_events(self, after: Sequence[tuple[str, int]]) -> list[KVEvents]:
        """Returns what has changed in the engines' caches since these events, (epoch, last) of
        each engine; without any, all that they hold. Raises EngineDeadError."""
        places = [*after, *[("", 0)] * (len(self.replicas) - len(after))]
        found: list[KVEvents] = []
        for engine, place in zip(self.replicas, places, strict=True):
            found.append(await engine.ask(functools.partial(_events_after, place)))
        return found

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that all engines which are alive have told of."""
        alive = [engine.adapters for engine in self.replicas if engine.alive]
        return tuple(name for name in (alive or [()])[0] if all(name in names for names in alive))

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Gives a name to an adapter, once the engine has read it. in_place: also a known name;
        requests that run keep the adapter they began with.

        Raises:
            RequestError: the name is known, or the adapter cannot be used.
            EngineDeadError: the engine is gone.
        """
        self._replicas.check_alive()
        for engine in self.replicas:
            if not engine.alive:
                continue
            # One refusal ends it: of two loads of a name, the first engine takes one only.
            failure = await engine.ask(lambda call: ChangeAdapters(call, name, path, in_place))
            if failure is not None:
                raise failure.error()

    async def unload_adapter(self, name: str) -> None:
        """Forgets a name; requests that run with its adapter go on.

        Raises:
            RequestError: there is no such name.
            EngineDeadError: the engine is gone.
        """
        self._replicas.check_alive()
        failures: list[Failure | None] = [
            await engine.ask(lambda call: ChangeAdapters(call, name))
            for engine in self.replicas
            if engine.alive
        ]
        # A load that was given up had not come to all engines.
        failed = [failure for failure in failures if failure is not None]
        if failed and len(failed) == len(failures):
            raise failed[0].error()

    async def snapshot(self, tokens: bool) -> Snapshot:
        """Returns the engine's current state, of several that of one. Raises EngineDeadError.

        Args:
            tokens: includes those of the prefix tree.
        """
        engine = self._replicas.first_alive
        snapshot: Snapshot = await engine.ask(lambda call: GetSnapshot(call, tokens))
        return snapshot


def _events_after(place: tuple[str, int], call: int) -> GetEvents:
    return GetEvents(call, *place)


def _wanted(reply: PeerReply, found: Wanted | None) -> Wanted:
    """Returns what a reply has."""
    if found is None:
        raise QuireError("no answer")
    return found
