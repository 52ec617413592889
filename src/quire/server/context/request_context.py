"""The context of one HTTP request: its key, its deadline and its counts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Scope

from quire.server.context.api_keys import ApiKey
from quire.server.context.hints import Hints
from quire.server.context.rate_limits import LimitStatus, RateLimiter, RateLimits
from quire.server.context.request_trace import RequestTrace
from quire.server.errors import ApiError

if TYPE_CHECKING:
    from quire.engine.loop.output import CompletionUpdate
    from quire.features.call import RequestField

SCOPE_KEY = "quire.request_context"
BATCH_KEY = "quire.batch_key"
"""Scope entry with the `ApiKey` of a batch's requests. This process makes these requests itself."""

_BATCH_SHARE = 0.01
"""Weight of a key's batches in the engine's fair scheduling, relative to its other requests."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")


@dataclass(slots=True)
class RequestContext:
    """Context of one HTTP request.

    Attributes:
        id: the request's id, which the answer returns.
        key: the API key.
        rate_limiter: the limits of all keys.
        deadline: time of `time.monotonic` by which the request must be answered.
        began: time of `time.perf_counter` at which it arrived.
        levels: what is left of the key's limits.
        status: HTTP status of the answer; 0 before there is one.
        end: why its last completion ended.
        prompt_tokens, cached_tokens, completion_tokens: tokens so far, for logs and limits.
        searched_tokens: tokens that beam searches computed. Answers contain only the best ones.
        is_continuation: its further prompts repeat an earlier prompt and a part of its answer, so
            their tokens are counted already.
        first_token: seconds until the first token.
        prompts: the prompts' texts, if the server logs them.
        model: the feature's model that the request chose, such as an adapter; "" for the model
            itself.
        fields: what the request carries for the engine's features.
        batch: the request belongs to a batch, so other requests go first.
        prefill: the peer that a router chose to compute the prompt. "" means no peer; None leaves
            the decision to the engine.
        traceparent: the request's trace, if a peer may compute the prompt.
        tag: the router's tag, which the answer must return, see `replica_proofs`.
        wants_report: a router wants the hashes of the prompt's blocks.
        report: these hashes, once they are known.
        wants_usage: a router wants the number of tokens, see `usage_report`.
        is_stream: the answer is a stream of events.
        trace: data for its spans; None if it is not traced.
        hints: the hints that its answer ignores.
        on_end: called once at the end of the request.
        closing: called at its end too, to free what the request holds.
    """

    id: str
    key: ApiKey
    rate_limiter: RateLimiter
    deadline: float | None = None
    began: float = field(default_factory=time.perf_counter)
    levels: RateLimits = RateLimits(None, None)  # noqa: RUF009 (it is frozen)
    status: int = 0
    end: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    searched_tokens: int = 0
    is_continuation: bool = False
    first_token: float | None = None
    prompts: list[str] = field(default_factory=list)
    model: str = ""
    fields: dict[RequestField[Any], Any] = field(default_factory=dict)
    batch: bool = False
    prefill: str | None = None
    traceparent: str = ""
    tag: bytes = b""
    wants_report: bool = False
    report: bytes = b""
    wants_usage: bool = False
    is_stream: bool = False
    trace: RequestTrace | None = None
    hints: Hints | None = None
    on_end: Callable[[RequestContext], None] | None = None
    closing: list[Callable[[], None]] = field(default_factory=list)
    _taken: int = 0
    _holders: int = 1

    @property
    def tenant(self) -> str:
        """The engine's fair scheduling counts the request under this name.

        No key has a slash in its name, so a batch's name cannot be another key's.
        """
        return f"{self.key.name}/batch" if self.batch else self.key.name

    @property
    def share(self) -> float:
        return self.key.share * _BATCH_SHARE if self.batch else self.key.share

    # -- limits --------------------------------------------------------------------------------

    def take_request(self) -> None:
        """Takes one request from the key's limit.

        Raises:
            ApiError: 429.
        """
        if self.key.requests_per_minute is None and self.key.tokens_per_minute is None:
            return
        taken, self.levels = self.rate_limiter.take_request(self.key)
        if not taken:
            if self.levels.tokens is not None and self.levels.tokens.remaining < 1:
                raise limit_error("tokens", self.levels.tokens, 1)
            if self.levels.requests is not None:
                raise limit_error("requests", self.levels.requests, 1)

    def take_tokens(self, prompt: int, answer: int | None, completions: int = 1) -> None:
        """Takes the tokens that a prompt and its answer may need.

        The end of the request gives unused ones back.

        Args:
            prompt: the prompt's tokens.
            answer: most tokens of a completion; None charges them at the end.
            completions: number of completions.

        Raises:
            ApiError: 429.
        """
        if self.key.tokens_per_minute is None:
            return
        tokens = prompt + (answer or 0) * completions
        taken, self.levels = self.rate_limiter.take_tokens(self.key, tokens)
        if not taken and self.levels.tokens is not None:
            raise limit_error("tokens", self.levels.tokens, tokens)
        self._taken += tokens

    def read_limits(self) -> None:
        """Reads the limits for the answer's headers, without taking from them."""
        if self.key.requests_per_minute is not None or self.key.tokens_per_minute is not None:
            _, self.levels = self.rate_limiter.take_tokens(self.key, 0)

    def hold(self) -> None:
        """Keeps the request open until a matching `release`."""
        self._holders += 1

    def release(self) -> None:
        """Ends the request if this is the last release; then gives unused tokens back."""
        self._holders -= 1
        if self._holders > 0:
            return
        for close in self.closing:
            close()
        if self.on_end is not None:
            self.on_end(self)
        if self.key.tokens_per_minute is not None:
            self.rate_limiter.give_back(self.key, self._taken - self.used_tokens)

    # -- progress ------------------------------------------------------------------------------

    @property
    def remaining(self) -> float | None:
        """Seconds left to answer the request; None is unlimited."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def used_tokens(self) -> int:
        """Tokens that count against the key's limit."""
        return self.prompt_tokens + max(self.completion_tokens, self.searched_tokens)

    def observe(self, update: CompletionUpdate) -> None:
        if update.prompt_token_ids is not None and not self.is_continuation:
            self.count_prompt(len(update.prompt_token_ids), update.num_cached_tokens)
        if update.token_ids:
            self.completion_tokens += len(update.token_ids)
            if self.first_token is None:
                self.first_token = time.perf_counter() - self.began
        if update.finish_reason is not None:
            self.end = str(update.finish_reason)

    def count_prompt(self, tokens: int, cached: int) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens += cached


def context_of(request: Request) -> RequestContext:
    return context_in(request.scope)


def owner_of(request: Request) -> bytes:
    """Returns the digest of the request's API key, b"" on a server without keys."""
    return context_of(request).key.digest


def context_in(scope: Scope) -> RequestContext:
    context: RequestContext = scope[SCOPE_KEY]
    return context


def is_id(text: str) -> bool:
    """Tells whether a client's request id is safe in headers and logs."""
    return _GIVEN_ID.fullmatch(text) is not None


def timeout_error() -> ApiError:
    return ApiError(504, "The request took longer than --request-timeout allows.", code="timeout")


def limit_error(what: str, left: LimitStatus, need: int) -> ApiError:
    """Returns the error for a request that needs more than is left of a limit.

    A request that needs more than the limit itself gets `X-Should-Retry: false`, because retrying
    cannot help.

    Args:
        what: "requests" or "tokens".
        left: the limit and its rest.
        need: the amount that the request needs.
    """
    if need > left.limit:
        return ApiError(
            429,
            f"The request may need {need} tokens, but this key's limit is {left.limit} a minute: "
            "lower max_tokens or the prompt.",
            code="rate_limit_exceeded",
            kind=what,
            retry=False,
        )
    wait = left.until(need)
    have = max(0, math.floor(left.remaining))
    return ApiError(
        429,
        f"This key's limit of {left.limit} {what} a minute is reached: {have} are left and {need} "
        f"needed. Try again in {duration(wait)}.",
        code="rate_limit_exceeded",
        kind=what,
        retry_after=wait,
    )


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI's headers do: 20ms, 1.5s, 6m0s, 1h0m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    rest = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes == 0:
        return rest
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}"
