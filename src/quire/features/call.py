"""Calls, request fields and news: messages between clients and an engine's features.

A feature declares each as data, with the types of its values. The client and the engine's process
know them by their names only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from quire.arrays import Int32, decode_array, encode_array
from quire.config import EngineConfig
from quire.errors import QuireError, RequestError
from quire.request import RequestOptions

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


def split_options(
    values: Mapping[RequestField[Any], Any],
) -> tuple[RequestOptions, list[tuple[RequestField[Any], Any]]]:
    """Returns the values for features: those that are options of `Request`, and all others."""
    options = {field.option: value for field, value in values.items() if field.option is not None}
    others = [(field, value) for field, value in values.items() if field.option is None]
    return cast("RequestOptions", options), others


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt that is no text.

    Attributes:
        kind: what it is: "image".
        source: its bytes, a URL, or an object of the caller's.
        param: the request's field that has it, for errors.
        detail: how much of it the model should see.
    """

    kind: str
    source: Any
    param: str
    detail: str = "auto"


class LoadedPart(Protocol):
    """A part that was read."""

    def close(self) -> None:
        """Frees its memory. Idempotent."""
        ...


class PromptInputs(Protocol):
    """The parts of a prompt that are no text, at their places among its tokens."""

    def cache_ids(self, ids: Int32) -> Int32:
        """Returns the ids by which the KV cache knows the prompt `ids`, int32 [n] both."""
        ...

    def fields(self, ids: Int32) -> Mapping[RequestField[Any], Any]:
        """Returns what the request of the prompt `ids` carries."""
        ...

    def shifted(self, count: int) -> PromptInputs:
        """Returns the parts of a prompt that has `count` more tokens in front."""
        ...


class PromptReader(Protocol):
    """Reads parts of prompts that are no text, in the process where prompts arrive.

    All methods but `load` may take long. They raise RequestError, which names the part's field.
    """

    async def load(self, parts: Sequence[PromptPart]) -> Sequence[LoadedPart]:
        """Reads parts, off the event loop."""
        ...

    def read(self, parts: Sequence[PromptPart]) -> Sequence[LoadedPart]:
        """Reads parts in the caller's thread."""
        ...

    def place(self, ids: Int32, parts: Sequence[Any]) -> tuple[Int32, PromptInputs]:
        """Makes room for parts among a prompt's tokens.

        Args:
            ids: int32 [n], with one token in place of each part.
            parts: what `load` or `read` has returned, in the order of their places.

        Returns:
            The prompt with as many tokens as the model sees of each part, and the parts.
        """
        ...


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
