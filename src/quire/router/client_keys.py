"""The API keys of a router's clients, and what each may ask of the whole fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Scope

from quire.router.prompts import BYTES_PER_TOKEN, Prompt
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKey, ApiKeys
from quire.server.context.rate_limits import RateLimiter, RateLimits
from quire.server.context.request_context import limit_exceeded
from quire.server.http.auth import find_key
from quire.server.http.context_middleware import limit_headers
from quire.server.http.error_handler import is_anthropic
from quire.server.routes import COUNTED_PATHS, PUBLIC_PATHS, UNQUEUED_PATHS

Headers = list[tuple[bytes, bytes]]


class _Answer(msgspec.Struct):
    """The answer's length as a body says it, whatever it is; servers check it."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    beam_width: Any = None


_DECODER = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Allowance:
    """The part of its key's limits that a request takes.

    counts: whether its tokens count. levels: the limits since it has taken its part.
    """

    key: ApiKey
    limiter: RateLimiter
    anthropic: bool
    counts: bool
    levels: RateLimits
    _taken: int = field(default=0, init=False)
    _prompt: int = field(default=0, init=False)

    def take_tokens(self, prompt: Prompt, body: bytes | bytearray) -> None:
        """Takes the tokens that a prompt, estimated by its bytes, and its answer may need: what is
        not used is given back by `settle`. Raises ApiError, 429."""
        if not self.counts:
            return
        self._prompt = prompt.size // BYTES_PER_TOKEN + 1
        tokens = self._prompt + _most_answered(body)
        taken, self.levels = self.limiter.take_tokens(self.key, tokens)
        if not taken and self.levels.tokens is not None:
            raise limit_exceeded("tokens", self.levels.tokens, tokens)
        self._taken = tokens

    def settle(self, used: int | None, computed: bool, pieces: int) -> None:
        """Gives back what was taken and not used. used: tokens, as the server says. It says nothing
        of an answer that broke off, or that its client left: of such a one each of the `pieces`
        that came counts, and at least what was taken. computed: whether a server may have computed
        for it; else nothing counts."""
        if not self.counts:
            return
        if used is None:
            used = max(self._taken, self._prompt + pieces) if computed else 0
        self.limiter.give_back(self.key, self._taken - used)

    @property
    def headers(self) -> Headers:
        """Returns headers of the answer that tell of the key's limits."""
        levels = ("requests", self.levels.requests), ("tokens", self.levels.tokens)
        return [
            (name.encode(), value.encode())
            for what, left in levels
            if left is not None
            for name, value in limit_headers(what, left, self.anthropic)
        ]


class ClientKeys:
    """Refuses requests without a key of the file, and takes each from its key's limits.

    Paths are those of a server: what needs no key there needs none here, and what is counted there
    is counted here.

    Args:
        file: as of a server's `api_key_file`; None asks for no key.
        requests_per_minute, tokens_per_minute: of keys for which the file names no limit; None is
            no limit.

    Raises:
        ConfigError: the file is wrong.
    """

    def __init__(
        self,
        file: str | None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        args: dict[str, Any] = {"api_key_file": file, "requests_per_minute": requests_per_minute}
        self._keys = ApiKeys(ServerArgs(**args, tokens_per_minute=tokens_per_minute))
        self._limiter = RateLimiter()

    @property
    def required(self) -> bool:
        """Tells whether a key is needed."""
        return self._keys.required

    def reload(self) -> None:
        """Reads the file again; errors go to the log."""
        self._keys.reload()

    def close(self) -> None:
        self._limiter.close()

    def check(self, scope: Scope) -> Allowance | None:
        """Takes a request from its key's limit; returns what else it may take, None where nothing
        is limited. Raises ApiError: 401, 429."""
        path = scope["path"]
        if path in PUBLIC_PATHS:
            return None
        key = self._keys.anonymous
        if self._keys.required:
            key = find_key(self._keys, scope, "--api-key-file")
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return None
        if scope["method"] != "POST" or path not in COUNTED_PATHS:
            return None
        taken, levels = self._limiter.take_request(key)
        if not taken:
            if levels.tokens is not None and levels.tokens.remaining < 1:
                raise limit_exceeded("tokens", levels.tokens, 1)
            if levels.requests is not None:
                raise limit_exceeded("requests", levels.requests, 1)
        counts = key.tokens_per_minute is not None and path not in UNQUEUED_PATHS
        return Allowance(key, self._limiter, is_anthropic(path), counts, levels)


def _most_answered(body: bytes | bytearray) -> int:
    """Returns the most tokens of all answers to a request, 0 where its body names no number."""
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    lengths = found.max_tokens, found.max_completion_tokens, found.max_output_tokens
    most = max((n for n in lengths if isinstance(n, int) and n > 0), default=0)
    runs = found.n, found.best_of, found.beam_width
    return most * max((n for n in runs if isinstance(n, int) and n > 0), default=1)
