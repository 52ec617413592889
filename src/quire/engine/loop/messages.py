"""Messages between an engine process and its clients: typed structs in MessagePack, no pickle.

A `handle` identifies a completion. It is an integer that the client picks for a request, and the
k-th completion has the request's handle plus k. Handles of different clients may be equal.
"""

from __future__ import annotations

import msgspec

from quire import errors
from quire.arrays import Float32, Int32, decode_array, encode_array, int32
from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError, QuireError, RequestError
from quire.features.call import shown_text
from quire.plan import ChosenExperts, DrawnTokens, Logprobs
from quire.sampling_params import SamplingParams


class Failure(msgspec.Struct):
    """An error as data: its class among `quire.errors`, and that class's fields."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        known = isinstance(error, QuireError)
        return cls(
            kind=type(error).__name__ if known else "QuireError",
            message=shown_text(error),
            param=getattr(error, "param", None),
            code=getattr(error, "code", None),
        )

    def error(self) -> QuireError:
        kind = getattr(errors, self.kind, QuireError)
        if issubclass(kind, ConfigError):
            return ConfigError(self.message, self.param)
        if issubclass(kind, RequestError):
            # The constructors of subclasses take numbers, but only the message is known here.
            return RequestError(self.message, self.param, self.code)
        error: QuireError = kind(self.message)
        return error


class Start(msgspec.Struct, tag=True):
    """Loads a model; the first message of the client that started the engine's process."""

    args: EngineArgs


class Hello(msgspec.Struct, tag=True):
    """Greets the engine, which answers with `Ready` once it is loaded."""


class AddRequest(msgspec.Struct, tag=True):
    """Adds a request.

    Attributes:
        handle: handle of its first completion.
        max_total: length, prompt included, at which the request must end.
        tenant, share: see `Request`.
        features: values for features, by the name of a `RequestField`.
    """

    handle: int
    prompt: Int32
    params: SamplingParams
    max_total: int
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    share: float = 1.0
    features: dict[str, msgspec.Raw] = {}


class AbortRequest(msgspec.Struct, tag=True):
    """Aborts one completion of a request, or all of them if `index` is None."""

    handle: int
    index: int | None = None


class Call(msgspec.Struct, tag=True):
    """Makes a call. The engine answers with `CallAnswer` or `CallFailed`.

    Attributes:
        call: The client's number for the call.
        name: Name of a `CallType`.
        body: The request, encoded as the call type declares.
        end: Number for the second answer, which is sent when the work is over; None: no second
            answer.
    """

    call: int
    name: str
    body: msgspec.Raw
    end: int | None = None


class Ping(msgspec.Struct, tag=True):
    """Asks for a `Pong`, which the engine sends in the next turn of its loop."""


class Shutdown(msgspec.Struct, tag=True):
    pass


ToEngine = Start | Hello | AddRequest | AbortRequest | Call | Ping | Shutdown


class Loading(msgspec.Struct, tag=True):
    """Reports the progress of loading; see `OnProgress`."""

    what: str
    done: int
    total: int


class Resolved(msgspec.Struct, tag=True):
    """Reports the settings before the model is loaded, so that clients get ready meanwhile."""

    config: EngineConfig


class Ready(msgspec.Struct, tag=True):
    config: EngineConfig


class Failed(msgspec.Struct, tag=True):
    """Reports the error that kept the engine from starting or stopped it. The engine exits."""

    failure: Failure


class RequestRefused(msgspec.Struct, tag=True):
    """Reports that the engine refused a request."""

    handle: int
    failure: Failure


class CompletionStart(msgspec.Struct, array_like=True):
    """Data that is sent with a completion's first tokens.

    Attributes:
        queued: seconds until its first step.
        delays: `RequestTimes.delays` so far.
    """

    handle: int
    num_cached_tokens: int
    queued: float = 0.0
    delays: dict[str, float] = {}


class CompletionEnd(msgspec.Struct, array_like=True):
    """The end of a completion. delays: its `RequestTimes.delays`."""

    handle: int
    reason: str
    stop_token: int | None
    delays: dict[str, float] = {}


class StepOutputs(msgspec.Struct, tag=True):
    """One step's tokens, ragged: completion `handles[i]` gets the next `counts[i]` of `tokens`.

    Attributes:
        handles, counts: int32 [completions].
        tokens: int32 [sum of counts].
        logprobs, prompt_logprobs, drawn, experts, pooled: pairs of handle and value.
        version: version of the weights that gave the tokens.
    """

    handles: Int32
    counts: Int32
    tokens: Int32
    starts: list[CompletionStart] = []
    ends: list[CompletionEnd] = []
    logprobs: list[tuple[int, Logprobs]] = []
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    drawn: list[tuple[int, DrawnTokens]] = []
    experts: list[tuple[int, ChosenExperts]] = []
    pooled: list[tuple[int, Float32]] = []
    version: int = 0


def aborted(handle: int) -> StepOutputs:
    """Returns the message that ends a completion, which keeps its tokens so far."""
    nobody = int32([])
    return StepOutputs(nobody, nobody, nobody, ends=[CompletionEnd(handle, "abort", None)])


class CallAnswer(msgspec.Struct, tag=True):
    """Answers a call. body: the answer, encoded as the `CallType` declares."""

    call: int
    body: msgspec.Raw


class CallFailed(msgspec.Struct, tag=True):
    """Reports that a call failed. The engine goes on."""

    call: int
    failure: Failure


class News(msgspec.Struct, tag=True):
    """Tells all clients the value of a `NewsType`."""

    name: str
    body: msgspec.Raw


class Pong(msgspec.Struct, tag=True):
    pass


FromEngine = (
    Loading
    | Resolved
    | Ready
    | Failed
    | RequestRefused
    | StepOutputs
    | CallAnswer
    | CallFailed
    | News
    | Pong
)

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
