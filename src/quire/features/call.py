"""Calls and news: what clients ask of an engine's features, and what features tell all clients.

A feature declares its calls and news as data, with the types of what travels. The client and the
engine's process know a call by its name only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
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
        request: the type of what the client sends.
        answer: the type of what the engine answers.
        end: the type of the second answer of a call that began something (`Begun`).
        refusal: returns the error for an engine none of whose features takes the call.
    """

    name: str
    request: type[Asked]
    answer: type[Answered]
    end: type[Any] | None = None
    refusal: Callable[[], RequestError] = lambda: RequestError("this engine does not take the call")


@dataclass(frozen=True, slots=True)
class RequestField(Generic[Value]):
    """Declares what a request carries for a feature.

    Attributes:
        name: unique, "feature.noun".
        value: the type of what it carries.
        option: the keyword of `Request` that takes the value; None: `LoopFeature.fields` does.
        separates: whether requests with different values share no KV.
        refusal: returns the error for a value that no feature of the engine takes; None: the value
            is ignored there.
        key: its name in the bodies of HTTP requests; "": no body has it.
        apis: the APIs whose requests have it: `OPENAI`, `RESPONSES`, `ANTHROPIC`.
        body: its type in a body, as pydantic takes it; None: `value`.
    """

    name: str
    value: type[Value]
    option: str | None = None
    separates: bool = False
    refusal: Callable[[Value], RequestError | None] = lambda value: None
    key: str = ""
    apis: tuple[str, ...] = ()
    body: Any = None


@dataclass(frozen=True, slots=True)
class NewsType(Generic[Value]):
    """Declares what a feature tells every client: when it connects, and whenever it has changed.

    Attributes:
        name: unique, "feature.noun".
        value: the type of what is told.
        default: the value until the engine has told one.
    """

    name: str
    value: type[Value]
    default: Value


@dataclass(frozen=True, slots=True)
class Begun:
    """Answers a call that began something which ends later.

    Attributes:
        answer: the answer, sent at once.
        end: a second answer for clients that asked for it (`Call.end`).
    """

    answer: Any
    end: Future[Any]


class RequestCheck(Protocol):
    """Checks requests where they arrive. check: raises RequestError for one that it refuses."""

    async def check(self, params: SamplingParams) -> None: ...

    def close(self) -> None: ...


class NamedModels(Protocol):
    """The models that a feature serves beside the engine's own, each by its name in the API."""

    def names(self) -> Collection[str]:
        """Returns the names, as far as they are known."""
        ...

    def fields(self, name: str) -> Mapping[RequestField[Any], Any] | None:
        """Returns what a request for a model carries; None: no model has the name."""
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
    """Returns an error's text for clients: other errors may name paths or addresses."""
    if isinstance(error, QuireError):
        return str(error)
    return f"internal error ({type(error).__name__})"


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
