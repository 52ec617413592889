"""State that routes share: the engine's client, the settings, the metrics."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.requests import Request

from quire import __version__
from quire.engine.processes import stuck_limit
from quire.errors import ConfigError, EngineDeadError, RequestError
from quire.features.lora.calls import adapter_names
from quire.features.lora.registry import folder_of, names_in
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKeys
from quire.server.context.body_budget import BodyBudget
from quire.server.context.rate_limits import RateLimiter
from quire.server.errors import ApiError, asleep, engine_dead, overloaded, stopping
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
"""Seconds for which a queue that was full is taken to be full still."""


class Stoppable(Protocol):
    """A running generation, which can be ended from outside."""

    def fail(self, error: ApiError) -> None: ...


@dataclass(slots=True)
class ServerState:
    """State at `app.state.server`.

    Attributes:
        defaults: the model's own sampling settings.
        sleep_level: 0 while the engine is awake. changing_sleep: it falls asleep or wakes up.
        parse_thread: parses large bodies. One thread, as parsers hold the interpreter's lock:
            several would keep the event loop waiting for each.
        count_threads: tokenize what is not run, of any length: answers do not wait for it.
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
    """Running generations."""
    _full_until: dict[str, float] = field(default_factory=dict)
    """By the name of a tenant."""
    _patterns: re.Pattern[str] | None = field(default=None, init=False)
    """Fits the names that are the served model's by a pattern."""

    def __post_init__(self) -> None:
        """Sets up the parts. `fingerprint` identifies all that decides about an answer besides the
        request.

        Raises:
            ConfigError: the chat template or the key file cannot be used.
        """
        patterns = [name for name in self.args.served_model_name if "*" in name]
        if patterns:
            self._patterns = re.compile("|".join(map(_regex_of, patterns)))
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
        """The model's name in answers: the first of `model_names` that is no pattern."""
        return next(name for name in self.model_names if "*" not in name)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API: the setting, the hub id, or the folder's name without its
        path. With `*` a name is a pattern."""
        given = self.args.served_model_name
        if any("*" not in name for name in given):
            return given
        return self._own_name, *given

    @property
    def _own_name(self) -> str:
        config = self.client.config
        if Path(config.model_name).is_dir():
            # A path like `.` has no name of its own.
            return os.path.basename(os.path.abspath(config.model_path)) or config.model_name
        return config.model_name

    def is_served(self, name: str) -> bool:
        """Tells whether a name is the served model's, which an adapter's is not, even if a pattern
        fits it."""
        if name in self.model_names:
            return True
        fits = self._patterns is not None and self._patterns.fullmatch(name) is not None
        return fits and not self.is_adapter(name)

    async def count(self, work: Callable[[], T]) -> T:
        """Tokenizes what is not run."""
        return await asyncio.get_running_loop().run_in_executor(self.count_threads, work)

    def check_alive(self) -> None:
        """Raises ApiError, 503, or EngineDeadError unless there is an engine."""
        if self.client.asleep:
            raise asleep()
        if not self.client.alive:
            raise EngineDeadError("the engine has stopped")

    def check_health(self) -> None:
        """Raises ApiError, 503, where the engine should live and does not: says how it ended."""
        if not self.client.asleep and not self.client.alive:
            raise engine_dead(self.client.end)

    def check_ready(self) -> None:
        """Raises ApiError, 503, unless requests are taken. However many wait, they are."""
        self.check_alive()
        if self.draining:
            raise stopping()
        if self.client.silence > stuck_limit(self.args.stuck_timeout, self.client.config.device):
            raise ApiError(503, "The engine does not respond.", code="engine_stuck")

    def stop_generations(self) -> None:
        """Ends all running generations with an error that tells clients why."""
        for generation in list(self.generations):
            generation.fail(stopping())

    def note_full(self, tenant: str) -> None:
        """Notes that the engine has just refused a tenant's request because too many wait."""
        self._full_until[tenant] = time.monotonic() + _FULL_SECONDS

    def check_room(self, tenant: str) -> None:
        """Raises ApiError, 503, shortly after the engine refused a request of the tenant.

        The next request is not even read then, so that refusing many costs little.
        """
        if time.monotonic() < self._full_until.get(tenant, 0.0):
            raise overloaded()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters, sorted, which are models in the API."""
        return tuple(sorted({*adapter_names(self.client), *names_in(self._lora_dir)}))

    @property
    def _lora_dir(self) -> Path | None:
        folder = self.client.config.args.lora_dir
        return None if folder is None else Path(folder)

    def is_adapter(self, name: str) -> bool:
        return name in adapter_names(self.client) or folder_of(self._lora_dir, name) is not None

    def check_model(self, name: str | None, context: RequestContext) -> None:
        """Chooses the request's model: the served one, or an adapter of it.

        Raises:
            ApiError: 404, `name` is neither, or a model that the request's key may not use.
        """
        if name is None or self.is_served(name):
            wanted = self.model_name
        elif self.is_adapter(name):
            wanted = context.adapter = name
        else:
            wanted = ""
        key = context.key
        if not wanted or not key.may_use(wanted):
            # Of models that the key may not use nothing is said.
            has = self.model_name
            if not key.may_use(has):
                has = "', '".join(sorted(key.models or ()))[:200]
            raise ApiError(
                404,
                f"The model '{(name or wanted)[:200]}' does not exist; this server has '{has}'.",
                param="model",
                code="model_not_found",
            )

    def tokenizer(self, param: str) -> Tokenizer:
        """Returns the tokenizer. Raises ApiError, 400, naming `param`, which needs one."""
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
    # Only the star is special, and `fnmatch` knows how to match many of them in linear time.
    return fnmatch.translate(re.sub(r"[?\[]", r"[\g<0>]", pattern))


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def new_id(prefix: str, joint: str = "-") -> str:
    """Returns an id that cannot be guessed. APIs differ in how they join prefix and number."""
    return f"{prefix}{joint}{uuid.uuid4().hex}"
