"""The engine's loop in its own process: `python -m quire.engine.process.process ADDRESS OWNER`.

The process listens at ADDRESS and loads what the process that started it asks for, whose id is
OWNER. It then takes requests and sends tokens until it is told to stop or its owner is gone.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future

from quire.arrays import int32
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.engine.loop.load import load_of
from quire.engine.loop.messages import (
    AbortRequest,
    AdapterNames,
    AdaptersChanged,
    AddRequest,
    CallFailed,
    ChangeAdapters,
    EventsReply,
    Failed,
    Failure,
    FromEngine,
    GetEvents,
    GetSnapshot,
    GetStats,
    GrantEnded,
    GrantPrompt,
    Hello,
    Loading,
    PeerAnswer,
    PeerReply,
    Ping,
    Pong,
    PrefixCacheReset,
    Ready,
    RequestRefused,
    ResetPrefixCache,
    SetPeers,
    ShakeHands,
    Shutdown,
    SnapshotReply,
    Start,
    StatsReply,
    ToEngine,
    decode_to_engine,
    encode,
)
from quire.engine.loop.snapshot import take_snapshot
from quire.engine.process.completions import Client, CompletionTable
from quire.engine.process.connection import Connection, SocketServer
from quire.errors import EngineDeadError, OverloadedError, QuireError, RequestError
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import Grant
from quire.features.kv_events.feature import KVEventFeature
from quire.features.tuning.settings import served
from quire.sampling_params import SamplingParams
from quire.system import end_with

_LAST_MESSAGES = 1.0
"""Seconds that clients have to read the last messages."""


_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of a request whose prompt is wanted, not its answer."""


def _no_prompts() -> RequestError:
    return RequestError("this server computes no prompts for others (--role)", code="wrong_role")


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
        self._completions: CompletionTable | None = None
        self._events = KVEventFeature()
        self._running = True
        self._clients = Clients()
        self._changes: list[tuple[Client, int, Future[None]]] = []
        """Clients that wait for a change of adapters, with their calls."""
        self._grants: dict[str, tuple[Client, int]] = {}
        """Clients that wait for the end of a grant, with their calls, by its name."""

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

        config = served(resolve(message.args))
        self._completions = CompletionTable(config.scheduler.max_num_seqs)
        self._core = build_core(config, progress, tenants=True)
        self._core.scheduler.add_feature(self._events)
        for descriptor in self._core.fds:
            self._server.watch(descriptor)
        # What stands now stands for good: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        for client in (owner, *greeted):
            self._greet(client)

    def _greet(self, client: Client) -> None:
        self._send(client, Ready(self.core.config))
        names = self.core.control({"op": "adapters"})
        if names is not None:
            self._send(client, AdapterNames(names))

    def _send(self, client: Client, message: FromEngine) -> None:
        self._server.send(client.connection, encode(message))

    def _forget(self, client: Client) -> None:
        """Aborts the requests of a client that has disconnected."""
        self._clients.forget(client)
        for handle in list(client.handles):
            self._abort(client, handle, None)

    # -- in ------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Handles all waiting messages. With nothing to compute, sleeps until one comes."""
        arrived = self._server.receive(wait=not (self.core.has_work() or self._changes))
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

    @property
    def completions(self) -> CompletionTable:
        if self._completions is None:
            raise QuireError("the engine is not loaded")
        return self._completions

    def _handle(self, client: Client, data: bytes) -> None:
        """Does as a message says. An error of what it holds is its client's alone."""
        message = decode_to_engine(data)
        try:
            self._obey(client, message)
        except EngineDeadError:
            raise
        except Exception as error:
            refusal = _refusal(message, Failure.of(error))
            if refusal is None:
                raise
            if not isinstance(error, QuireError):
                traceback.print_exc()
            self._send(client, refusal)

    def _obey(self, client: Client, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(client, message)
            case AbortRequest(handle, index):
                self._abort(client, handle, index)
            case Ping():
                self._send(client, Pong())
            case GetStats(call):
                self._send(client, StatsReply(call, self.core.stats()))
            case GetSnapshot(call, tokens):
                self._send(client, SnapshotReply(call, take_snapshot(self.core, tokens)))
            case GetEvents(call, epoch, last):
                load = load_of(self.core, self._events)
                self._send(client, EventsReply(call, self._events.events(epoch, last, load)))
            case ResetPrefixCache(call):
                whole = self.core.scheduler.reset_prefix_cache()
                self._send(client, PrefixCacheReset(call, whole))
            case ChangeAdapters():
                self._change_adapters(client, message)
            case ShakeHands() | GrantPrompt() | SetPeers():
                self._answer_peer(client, message)
            case Hello():
                self._greet(client)
            case Shutdown():
                self._running = False
            case Start():
                raise QuireError("the engine is loaded already")

    def _abort(self, client: Client, handle: int, index: int | None) -> None:
        for request in self.core.abort(client.request(handle), index):
            self.completions.end(request)

    def _add(self, client: Client, message: AddRequest) -> None:
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
            adapter=message.adapter,
        )
        if message.prefill is not None or message.traceparent:
            self._choose_peer(client.request(message.handle), message)
        self.completions.add(client, message.handle, requests)

    def _choose_peer(self, name: str, message: AddRequest) -> None:
        """Says who computes a new request's prompt. Raises RequestError, without the request."""
        peer, trace = message.prefill, message.traceparent
        asked = {"op": "choose_peer", "request": name, "peer": peer, "traceparent": trace}
        try:
            if self.core.control(asked) is None and peer:
                raise RequestError("this server asks no others for prompts (--role)", "prefill")
        except Exception:
            self.core.abort(name)
            raise

    def _answer_peer(self, client: Client, message: ShakeHands | GrantPrompt | SetPeers) -> None:
        match message:
            case ShakeHands():
                reply = self._shake_hands(message.facts)
            case GrantPrompt():
                reply = self._grant(client, message)
            case SetPeers():
                reply = self._set_peers(message.peers)
        self._send(client, PeerAnswer(message.call, reply))

    def _shake_hands(self, facts: KVFacts) -> PeerReply:
        welcome = self.core.control({"op": "handshake", "facts": facts})
        if welcome is None:
            raise _no_prompts()
        return PeerReply(welcome=welcome)

    def _set_peers(self, peers: list[str]) -> PeerReply:
        known = self.core.control({"op": "set_peers", "peers": peers})
        if known is None:
            raise RequestError("this server asks no others for prompts (--role)", code="wrong_role")
        return PeerReply(peers=known)

    def _grant(self, client: Client, message: GrantPrompt) -> PeerReply:
        """Adds a request whose blocks, not its tokens, are wanted."""
        grant: Grant | None = self.core.control({"op": "grant", "asked": message.asked})
        if grant is None:
            raise _no_prompts()
        tokens = int32(message.asked.tokens)
        try:
            self.core.add(
                grant.name,
                tokens,
                _ONE_TOKEN,
                max_total=len(tokens) + 1,
                cache_salt=message.asked.cache_salt,
                tenant=message.tenant,
                share=message.share,
            )
        except Exception as error:
            outcome = "overloaded" if isinstance(error, OverloadedError) else "refused"
            reason = Failure.of(error).message
            revoked = {"op": "revoke", "name": grant.name, "outcome": outcome, "reason": reason}
            self.core.control(revoked)
            raise
        if message.ended is not None:
            self._grants[grant.name] = client, message.ended
        return PeerReply(grant=grant)

    def _change_adapters(self, client: Client, message: ChangeAdapters) -> None:
        op = "unload_adapter" if message.path is None else "load_adapter"
        answer = self.core.control(
            {"op": op, "name": message.name, "path": message.path, "in_place": message.in_place}
        )
        if answer is None:
            raise RequestError("this server takes no adapters (--enable-lora)", "lora_name")
        self._changes.append((client, message.call, answer))
        self._answer_changes()

    def _answer_changes(self) -> None:
        """Answers who waits for a change of adapters that is done."""
        for change in [change for change in self._changes if change[2].done()]:
            self._changes.remove(change)
            client, call, answer = change
            error = answer.exception()
            if error is None:
                names = AdapterNames(self.core.control({"op": "adapters"}))
                for each in self._clients:
                    self._send(each, names)
            failure = None if error is None else Failure.of(error)
            self._send(client, AdaptersChanged(call, failure))

    def _tell_of_grants(self) -> None:
        """Answers who waits for the end of a grant that is over."""
        for closed in self.core.control({"op": "closed_grants"}):
            client, call = self._grants.pop(closed.name, (None, 0))
            if client is not None:
                self._send(client, GrantEnded(call, closed))

    # -- out -----------------------------------------------------------------------------------

    def _step(self) -> None:
        progress = self.core.step()
        if progress is not None:
            self._events.step_ended()
        if self._changes:
            self._answer_changes()
        if self._grants:
            self._tell_of_grants()
        for request, error in self.core.take_failures():
            completion = self.completions.end(request)
            if completion is None:
                continue
            refusal = RequestRefused(completion.handle, Failure.of(error))
            self._send(completion.client, refusal)
        if progress is not None:
            for client, message in self.completions.outputs(progress, self._clients):
                self._send(client, message)


def _refusal(message: ToEngine, failure: Failure) -> FromEngine | None:
    """Returns what tells a message's client of a failure; None: nobody waits for an answer."""
    if isinstance(message, AddRequest):
        return RequestRefused(message.handle, failure)
    call: int | None = getattr(message, "call", None)
    return None if call is None else CallFailed(call, failure)


def main(address: str, owner: int) -> None:
    # Ctrl-C reaches the whole process group; the owner decides when the engine may stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(owner)
    server = SocketServer(address)
    try:
        EngineProcess(server).run()
    finally:
        server.close(_LAST_MESSAGES)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
