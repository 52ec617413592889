"""The state that all routes share: the engine's client, the settings and the metrics."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import HTTPConnection

from quire import __version__
from quire.engine.processes import stuck_limit
from quire.errors import ConfigError, EngineDeadError, RequestError, generates_nothing_error
from quire.features.call import UNREADY, NamedModels, RequestField
from quire.features.registry import installed_features
from quire.features.spec import resolve
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKeys
from quire.server.context.body_budget import BodyBudget
from quire.server.context.rate_limits import RateLimiter
from quire.server.errors import (
    ApiError,
    asleep_error,
    engine_dead_error,
    overloaded_error,
    stopping_error,
    stuck_error,
    unready_error,
)
from quire.server.parsers.chat_format import ChatFormat
from quire.server.telemetry.metrics import ServerMetrics
from quire.server.telemetry.tracing import Tracing
from quire.system import read_bounded

if TYPE_CHECKING:
    from quire.engine.process.client import EngineClient
    from quire.server.context.request_context import RequestContext
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger("quire.server")

_FULL_SECONDS = 0.05
"""Seconds for which a full queue is assumed to stay full."""


class Stoppable(Protocol):
    """A running generation that can be ended with an error."""

    def fail(self, error: ApiError) -> None: ...


@dataclass(slots=True)
class ServerState:
    """The server's state, at `app.state.server`.

    Attributes:
        client: the engine's client.
        args: the server's settings.
        defaults: the sampling settings that the model ships with.
        metrics: the process's metrics.
        created: time of the start, in seconds since the epoch.
        fingerprint: identifies the version, the configuration and the defaults, which all
            influence answers.
        rate_limiter: the levels of the keys' limits.
        keys: the API keys.
        chat_format: the model's formats of tool calls and reasoning.
        tracing: exports traces; None without a collector.
        parse_thread: parses large bodies. It is one thread, because parsers hold the interpreter's
            lock, and the event loop would wait for each of several threads.
        count_threads: tokenize prompts that only need to be counted. Such a prompt may be very
            long, and other requests must not wait for it.
        bodies: bounds the memory of all request bodies.
        draining: the server is stopping.
        sleep_level: 0 while the engine is awake.
        changing_sleep: the engine is falling asleep or waking up.
        generations: the running generations.
        file_path: returns the path of a file of `/v1/files`. Arguments: its id, the digest of the
            request's key, the request's field that names it. None: the server keeps no files.
    """

    client: EngineClient
    args: ServerArgs
    defaults: dict[str, float]
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = ""
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    keys: ApiKeys = field(init=False)
    chat_format: ChatFormat = field(init=False)
    tracing: Tracing | None = None
    parse_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="parse")
    )
    count_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="count")
    )
    bodies: BodyBudget = field(init=False)
    draining: bool = False
    sleep_level: int = 0
    changing_sleep: bool = False
    generations: set[Stoppable] = field(default_factory=set)
    file_path: Callable[[str, bytes, str], Path] | None = None
    _full_until: dict[str, float] = field(default_factory=dict)
    """By tenant: time of `time.monotonic` until which its queue is assumed to be full."""
    _patterns: re.Pattern[str] | None = field(default=None, init=False)
    """Matches the names that the patterns in `served_model_name` allow."""
    _models: list[NamedModels] = field(init=False)
    """The models that features serve."""

    def __post_init__(self) -> None:
        """Sets up the parts.

        Raises:
            ConfigError: the chat template or the key file is invalid.
        """
        patterns = [name for name in self.args.served_model_name if "*" in name]
        if patterns:
            self._patterns = re.compile("|".join(map(_regex_of, patterns)))
        self._models = [resolve(s.models)(self.client) for s in installed_features() if s.models]
        self.keys = ApiKeys(self.args)
        self.bodies = BodyBudget(self.args.max_body_memory_bytes)
        known = f"{__version__} {self.client.config} {self.defaults}".encode()
        self.fingerprint = f"fp_{hashlib.sha256(known).hexdigest()[:12]}"
        tokenizer, file = self.client.tokenizer, self.args.chat_template
        if file is not None:
            if tokenizer is None:
                raise ConfigError("chat_template needs a tokenizer", "chat_template")
            try:
                tokenizer.use_template(read_bounded(file).decode())
            except (OSError, UnicodeDecodeError, RequestError) as error:
                raise ConfigError(f"chat_template {file!r}: {error}", "chat_template") from None
        elif tokenizer is not None and tokenizer.chat_templates:
            try:
                tokenizer.template()
            except RequestError as error:
                logger.warning(
                    "chats will be refused: %s; --chat-template takes another one", error
                )
        self.chat_format = ChatFormat.of(tokenizer, self.args)
        if self.args.otlp_endpoint is not None:
            self.tracing = Tracing(self.args.otlp_endpoint, self.model_name)

    @property
    def model_name(self) -> str:
        """The model's name in answers: the first of `model_names` that is not a pattern."""
        return next(name for name in self.model_names if "*" not in name)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API. A name with `*` is a pattern.

        They are the setting `served_model_name`. If that has only patterns, the hub id or the name
        of the model's folder comes first.
        """
        given = self.args.served_model_name
        if any("*" not in name for name in given):
            return given
        return self._own_name, *given

    @property
    def _own_name(self) -> str:
        config = self.client.config
        if Path(config.model_name).is_file():
            return Path(config.model_name).stem
        if Path(config.model_name).is_dir():
            # A path such as `.` has to be resolved before its last part is a name.
            return os.path.basename(os.path.abspath(config.model_path)) or config.model_name
        return config.model_name

    def is_served(self, name: str) -> bool:
        """Tells whether a name is the served model's.

        The name of a feature's model is not, even if a pattern matches it.
        """
        if name in self.model_names:
            return True
        matches = self._patterns is not None and self._patterns.fullmatch(name) is not None
        return matches and self._fields_of(name) is None

    async def count(self, work: Callable[[], T]) -> T:
        """Runs `work`, which tokenizes a prompt to count its tokens, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.count_threads, work)

    def check_alive(self) -> None:
        """Checks that there is an engine.

        Raises:
            ApiError: 503, it sleeps, or a feature reports that it takes no requests.
            EngineDeadError: it is dead.
        """
        if self.client.asleep:
            raise asleep_error()
        if not self.client.alive:
            raise EngineDeadError("the engine has stopped")
        for engine in self.client.replicas:
            code, reason = engine.news(UNREADY)
            if code:
                raise unready_error(code, reason)

    def check_health(self) -> None:
        """Checks that the engine is alive or asleep.

        Raises:
            ApiError: 503, it is dead; the message says how it ended.
        """
        if not self.client.asleep and not self.client.alive:
            raise engine_dead_error(self.client.end)

    def check_ready(self) -> None:
        """Checks that the server accepts requests. A full queue does not matter here.

        Raises:
            ApiError: 503.
        """
        self.check_alive()
        if self.draining:
            raise stopping_error()
        if self.client.silence > stuck_limit(self.args.stuck_timeout, self.client.config.device):
            raise stuck_error()

    def stop_generations(self) -> None:
        """Ends all running generations with an error that tells clients why."""
        for generation in list(self.generations):
            generation.fail(stopping_error())

    def note_full(self, tenant: str) -> None:
        """Records that the engine has just refused a tenant's request because of a full queue."""
        self._full_until[tenant] = time.monotonic() + _FULL_SECONDS

    def check_room(self, tenant: str) -> None:
        """Checks that the engine has not just refused a request of the tenant.

        Otherwise the next request is refused before its body is read, which makes it cheap to
        refuse many.

        Raises:
            ApiError: 503.
        """
        if time.monotonic() < self._full_until.get(tenant, 0.0):
            raise overloaded_error()

    @property
    def further_models(self) -> tuple[str, ...]:
        """The sorted names of the models that features serve, such as adapters."""
        return tuple(sorted({name for each in self._models for name in each.names()}))

    def _fields_of(self, name: str) -> Mapping[RequestField[Any], Any] | None:
        """Returns what requests for a feature's model carry; None: no feature has the model."""
        found = (each.fields(name) for each in self._models)
        return next((fields for fields in found if fields is not None), None)

    def check_model(self, name: str | None, context: RequestContext) -> None:
        """Chooses the request's model: the served model, or a feature's.

        Args:
            name: the name in the request; None selects the served model.
            context: its `model` and `fields` are set if the name is that of a feature's model.

        Raises:
            ApiError: 404, there is no such model, or the request's key may not use it.
        """
        if name is None or self.is_served(name):
            model = self.model_name
        elif (fields := self._fields_of(name)) is not None:
            model = context.model = name
            context.fields |= fields
        else:
            model = ""
        key = context.key
        if not model or not key.may_use(model):
            # The error must not name models that the key may not use.
            has = self.model_name
            if not key.may_use(has):
                has = "', '".join(sorted(key.models or ()))[:200]
            raise ApiError(
                404,
                f"The model '{(name or model)[:200]}' does not exist; this server has '{has}'.",
                param="model",
                code="model_not_found",
            )

    def check_generates(self) -> None:
        """Raises RequestError if the model is an encoder.

        Routes call it before they look for the chat template, which an encoder lacks anyway.
        """
        if self.client.config.encoder:
            raise generates_nothing_error()

    def tokenizer(self, param: str) -> Tokenizer:
        """Returns the tokenizer.

        Args:
            param: the request's field that needs it, for the error.

        Raises:
            ApiError: 400, the server runs without a tokenizer.
        """
        if self.client.tokenizer is None:
            raise ApiError(
                400,
                f"'{param}' needs a tokenizer, but this server runs without one "
                "(--skip-tokenizer-init): send prompts as token ids.",
                param=param,
                code="no_tokenizer",
            )
        return self.client.tokenizer


def _regex_of(pattern: str) -> str:
    """Returns an expression for a name in which `*` stands for any text."""
    # Only the star is special. `fnmatch` makes an expression that matches stars in linear time.
    return fnmatch.translate(re.sub(r"[?\[]", r"[\g<0>]", pattern))


def state_of(connection: HTTPConnection) -> ServerState:
    state: ServerState = connection.app.state.server
    return state


def new_id(prefix: str, joint: str = "-") -> str:
    """Returns an id that cannot be guessed.

    Args:
        prefix: the kind of object.
        joint: text between prefix and number, which differs between APIs.
    """
    return f"{prefix}{joint}{uuid.uuid4().hex}"
