"""Messages between an engine process and its clients: typed structs in MessagePack, no pickle.

A completion is named by a `handle`, an integer that its client picks: the k-th completion of a
request has its request's handle plus k. Handles of different clients may be equal.
"""

from __future__ import annotations

import msgspec

from quire import errors
from quire.arrays import Float32, Int32, decode_array, encode_array
from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.snapshot import Snapshot
from quire.engine.loop.stats import EngineStats
from quire.errors import ConfigError, QuireError, RequestError
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import ClosedGrant, Grant, PromptRequest, Welcome
from quire.features.kv_events.messages import KVEvents
from quire.plan import Logprobs
from quire.pooling_params import Pooling
from quire.sampling_params import SamplingParams


class Failure(msgspec.Struct):
    """An error as data: its class among `quire.errors`, and that class's fields."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        # Only errors made for users show their text: others may name paths or addresses.
        known = isinstance(error, QuireError)
        return cls(
            kind=type(error).__name__ if known else "QuireError",
            message=str(error) if known else f"internal error ({type(error).__name__})",
            param=getattr(error, "param", None),
            code=getattr(error, "code", None),
        )

    def error(self) -> QuireError:
        kind = getattr(errors, self.kind, QuireError)
        if issubclass(kind, ConfigError):
            return ConfigError(self.message, self.param)
        if issubclass(kind, RequestError):
            # Subclasses make their message from numbers; here it is made already.
            return RequestError(self.message, self.param, self.code)
        error: QuireError = kind(self.message)
        return error


class Start(msgspec.Struct, tag=True):
    """Loads a model; the first message of the client that started the engine's process."""

    args: EngineArgs


class Hello(msgspec.Struct, tag=True):
    """Greets the engine; it answers with `Ready` once it is."""


class AddRequest(msgspec.Struct, tag=True):
    """Adds a request.

    Attributes:
        handle: of its first completion.
        max_total: length, prompt included, at which it must end.
        pooling: set for an embedding.
        tenant, share, adapter: see `Request`.
        prefill: the peer to compute the prompt, "" for none of them; None: the engine decides.
        traceparent: what such a peer is told of the request's trace.
    """

    handle: int
    prompt: Int32
    params: SamplingParams
    max_total: int
    priority: int = 0
    cache_salt: str = ""
    pooling: Pooling | None = None
    tenant: str = ""
    share: float = 1.0
    adapter: str = ""
    prefill: str | None = None
    traceparent: str = ""


class AbortRequest(msgspec.Struct, tag=True):
    """Aborts a completion; index None aborts all of the request's."""

    handle: int
    index: int | None = None


class GetStats(msgspec.Struct, tag=True):
    call: int


class GetSnapshot(msgspec.Struct, tag=True):
    """Asks for a snapshot; `tokens` includes those of the prefix tree."""

    call: int
    tokens: bool


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forgets every prefix that no request uses; answered by `PrefixCacheReset`."""

    call: int


class ChangeAdapters(msgspec.Struct, tag=True):
    """Gives a name to an adapter (`path`), or forgets one; answered by `AdaptersChanged` when that
    is done.

    Attributes:
        path: the adapter's folder; None forgets the name.
        in_place: a known name may be given to another adapter.
    """

    call: int
    name: str
    path: str | None = None
    in_place: bool = False


class ShakeHands(msgspec.Struct, tag=True):
    """Compares another engine's facts with this one's; answered by `PeerAnswer`."""

    call: int
    facts: KVFacts


class GrantPrompt(msgspec.Struct, tag=True):
    """Has a prompt computed for another engine; answered by `PeerAnswer`. tenant, share: see
    `Request`. ended: a further call, answered by `GrantEnded` where there was a grant; None: who
    asks need not know."""

    call: int
    asked: PromptRequest
    tenant: str = ""
    share: float = 1.0
    ended: int | None = None


class SetPeers(msgspec.Struct, tag=True):
    """Says which servers compute prompts for this engine; answered by `PeerAnswer`."""

    call: int
    peers: list[str]


class GetEvents(msgspec.Struct, tag=True):
    """Asks for the events behind event `last` of an epoch; answered by `EventsReply`."""

    call: int
    epoch: str
    last: int


class Ping(msgspec.Struct, tag=True):
    """Asks for a `Pong`, which comes when the loop turns."""


class Shutdown(msgspec.Struct, tag=True):
    pass


ToEngine = (
    Start | Hello | AddRequest | AbortRequest | GetStats | GetSnapshot | ResetPrefixCache
    | ChangeAdapters | ShakeHands | GrantPrompt | SetPeers | GetEvents | Ping | Shutdown
)  # fmt: skip


class Loading(msgspec.Struct, tag=True):
    """Tells how far loading is; see `OnProgress`."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True):
    config: EngineConfig


class Failed(msgspec.Struct, tag=True):
    """Tells that the engine could not start, or stopped by an error; it exits."""

    failure: Failure


class RequestRefused(msgspec.Struct, tag=True):
    """Tells that a request was refused."""

    handle: int
    failure: Failure


class CompletionStart(msgspec.Struct, array_like=True):
    """Data of a completion that comes with its first tokens. `queued`: seconds until its first
    step."""

    handle: int
    num_cached_tokens: int
    queued: float = 0.0


class CompletionEnd(msgspec.Struct, array_like=True):
    handle: int
    reason: str
    stop_token: int | None


class StepOutputs(msgspec.Struct, tag=True):
    """One step's tokens, ragged: completion `handles[i]` gets the next `counts[i]` of `tokens`.

    Attributes:
        handles, counts: int32 [completions].
        tokens: int32 [sum of counts].
        logprobs, prompt_logprobs, pooled: pairs of handle and value.
    """

    handles: Int32
    counts: Int32
    tokens: Int32
    starts: list[CompletionStart] = []
    ends: list[CompletionEnd] = []
    logprobs: list[tuple[int, Logprobs]] = []
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    pooled: list[tuple[int, Float32]] = []


class StatsReply(msgspec.Struct, tag=True):
    call: int
    stats: EngineStats


class SnapshotReply(msgspec.Struct, tag=True):
    call: int
    snapshot: Snapshot


class PrefixCacheReset(msgspec.Struct, tag=True):
    """Answers `ResetPrefixCache`. whole: nothing is left."""

    call: int
    whole: bool


class AdaptersChanged(msgspec.Struct, tag=True):
    """Answers `ChangeAdapters`. failure: why nothing has changed."""

    call: int
    failure: Failure | None = None


class EventsReply(msgspec.Struct, tag=True):
    call: int
    events: KVEvents


class PeerReply(msgspec.Struct):
    """welcome, grant, peers: what was asked for."""

    welcome: Welcome | None = None
    grant: Grant | None = None
    peers: list[str] | None = None


class PeerAnswer(msgspec.Struct, tag=True):
    call: int
    reply: PeerReply


class CallFailed(msgspec.Struct, tag=True):
    """Answers any call that the engine could not carry out. The engine goes on."""

    call: int
    failure: Failure


class GrantEnded(msgspec.Struct, tag=True):
    """Tells of the end of a grant: the handover of its prompt, or what came between."""

    call: int
    closed: ClosedGrant


class AdapterNames(msgspec.Struct, tag=True):
    """Tells all clients which adapters there are."""

    names: list[str]


class Pong(msgspec.Struct, tag=True):
    pass


FromEngine = (
    Loading | Ready | Failed | RequestRefused | StepOutputs | StatsReply | SnapshotReply
    | PrefixCacheReset | AdaptersChanged | AdapterNames | PeerAnswer | GrantEnded | EventsReply
    | CallFailed | Pong
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=decode_array)
_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=decode_array)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    message: FromEngine = _from_engine.decode(data)
    return message
