"""Calls, request fields and news: messages between clients and an engine's features.

A feature declares each as data, with the types of its values. The client and the engine's process
know them by their names only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from quire.arrays import decode_array, encode_array
from quire.config import EngineConfig
from quire.errors import QuireError, RequestError
from quire.sampling_params import SamplingParams

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class CallType(Generic[Asked, Answered]):
    """Declares a call.

    Attributes:
        name: unique, "feature.verb".
        request: the request's type.
        answer: the answer's type.
        end: the second answer's type, if a call starts work that ends later (`Begun`).
        refusal: makes the error that the engine raises if none of its features takes the call.
            None: the error names the call.
    """

    name: str
    request: type[Asked]
    answer: type[Answered]
    end: type[Any] | None = None
    refusal: Callable[[], RequestError] | None = None

    def refuse(self) -> RequestError:
        """Returns the error that the engine raises if none of its features takes the call."""
        if self.refusal is not None:
            return self.refusal()
        return RequestError(f"this engine does not take the call {self.name!r}")


@dataclass(frozen=True, slots=True)
class RequestField(Generic[Value]):
    """Declares a value that requests carry for a feature.

    Attributes:
        name: unique, "feature.noun".
        value: the value's type.
        option: the keyword of `Request` for the value. None: `LoopFeature.fields` takes it.
        separates: whether requests with different values share no KV.
        refusal: makes the error that the engine raises if none of its features takes the value,
            or returns None to ignore the value. Without it, a value is an error if the field has a
            key, and is ignored otherwise.
        key: the field's name in bodies of HTTP requests. Empty: no body has the field.
        apis: the APIs with the field: `OPENAI`, `RESPONSES`, `ANTHROPIC`.
        body: the field's type in a body, for pydantic. None: `value`.
    """

    name: str
    value: type[Value]
    option: str | None = None
    separates: bool = False
    refusal: Callable[[Value], RequestError | None] | None = None
    key: str = ""
    apis: tuple[str, ...] = ()
    body: Any = field(default=None, compare=False)

    def refuse(self, value: Value) -> RequestError | None:
        """Returns the error if none of the engine's features takes the value; None: no error."""
        if self.refusal is not None:
            return self.refusal(value)
        if not self.key:
            return None
        return RequestError(
            f"'{self.key}' is not supported: the engine runs without its feature", self.key
        )


@dataclass(frozen=True, slots=True)
class NewsType(Generic[Value]):
    """Declares news: a value that a feature sends to each client at once and after every change.

    Attributes:
        name: unique, "feature.noun".
        value: the value's type.
        default: the value of a client that has no news yet.
    """

    name: str
    value: type[Value]
    default: Value


UNREADY: NewsType[tuple[str, str]] = NewsType("engine.unready", tuple[str, str], ("", ""))
"""Why the engine takes no requests for now: an error code, and a sentence. Empty if it does."""


WEIGHTS: NewsType[str] = NewsType("engine.weights", str, "")
"""The id of the last update of the weights, "" before the first; a part of KV's namespace."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer of a call that starts work.

    Attributes:
        answer: the engine sends it at once.
        end: becomes the second answer, for clients that asked for one (`Call.end`).
    """

    answer: Any
    end: Future[Any]


class RequestCheck(Protocol):
    """Checks requests in the process where they arrive. `check` raises RequestError."""

    async def check(self, params: SamplingParams) -> None: ...

    def close(self) -> None: ...


class NamedModels(Protocol):
    """The models that a feature serves in addition to the engine's own, by name in the API."""

    def names(self) -> Collection[str]:
        """Returns the known names."""
        ...

    def fields(self, name: str) -> Mapping[RequestField[Any], Any] | None:
        """Returns the fields of a request for a model; None: no model has the name."""
        ...


class Caller(Protocol):
    """An engine as its client sees it."""

    @property
    def alive(self) -> bool: ...

    async def call(
        self,
        call: CallType[Asked, Answered],
        request: Asked,
        on_end: Callable[[Any], None] | None = None,
    ) -> Answered: ...

    def news(self, news: NewsType[Value]) -> Value: ...


class Callers(Protocol):
    """The client of one engine or more."""

    config: EngineConfig

    @property
    def replicas(self) -> Sequence[Caller]: ...

    @property
    def first_alive(self) -> Caller: ...

    def check_alive(self) -> None: ...


def encode_body(value: Any) -> msgspec.Raw:
    """Returns a value in MessagePack, to be part of a message."""
    return msgspec.Raw(_encoder.encode(value))


def decode_body(body: msgspec.Raw, kind: type[Value] | None) -> Value:
    """Returns a value that a message carries. Raises msgspec.DecodeError if it has another type."""
    value: Value = msgspec.msgpack.decode(body, type=kind, dec_hook=decode_array)
    return value


def shown_text(error: BaseException) -> str:
    """Returns an error's text for clients. The texts of errors other than `QuireError` are left out
    because they may contain paths or addresses."""
    if isinstance(error, QuireError):
        return str(error)
    return f"internal error ({type(error).__name__})"


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
