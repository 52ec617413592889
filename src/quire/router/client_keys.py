"""The API keys of a router's clients, with rate limits that hold for the whole fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Scope

from quire.router.prompts import BYTES_PER_TOKEN, Prompt
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKey, ApiKeys
from quire.server.context.rate_limits import RateLimiter, RateLimits
from quire.server.context.request_context import limit_error
from quire.server.http.auth import find_key
from quire.server.http.context_middleware import limit_headers
from quire.server.http.error_handler import is_anthropic
from quire.server.routes import COUNTED_PATHS, PUBLIC_PATHS, UNQUEUED_PATHS

Headers = list[tuple[bytes, bytes]]


class _LengthFields(msgspec.Struct):
    """The fields of a body that bound the answer's length. Only servers validate them."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    beam_width: Any = None


_DECODER = msgspec.json.Decoder(_LengthFields)


@dataclass(slots=True)
class Allowance:
    """The amounts that one request takes from its key's limits.

    Attributes:
        key: the client's key.
        limiter: counts the requests and tokens of all keys.
        anthropic: whether the route is in Anthropic's API, which has other header names.
        counts: whether the request's tokens count against the key's limit.
        levels: the rest of the key's limits after this request was counted.
    """

    key: ApiKey
    limiter: RateLimiter
    anthropic: bool
    counts: bool
    levels: RateLimits
    _taken: int = field(default=0, init=False)
    _prompt: int = field(default=0, init=False)

    def take_tokens(self, prompt: Prompt, body: bytes | bytearray) -> None:
        """Takes the tokens that the request may need; `settle` gives unused ones back.

        The prompt's tokens are estimated from its bytes. The answer counts with its largest
        allowed length.

        Raises:
            ApiError: 429.
        """
        if not self.counts:
            return
        self._prompt = prompt.size // BYTES_PER_TOKEN + 1
        tokens = self._prompt + _max_answer_tokens(body)
        taken, self.levels = self.limiter.take_tokens(self.key, tokens)
        if not taken and self.levels.tokens is not None:
            raise limit_error("tokens", self.levels.tokens, tokens)
        self._taken = tokens

    def settle(self, used: int | None, computed: bool, pieces: int) -> None:
        """Gives back the tokens that were taken and not used.

        Args:
            used: number of tokens by the server's report. It is None if the answer broke off or the
                client disconnected before the report. Then the larger one of two numbers counts:
                the taken tokens, and the prompt plus one token for each piece.
            computed: whether a server may have computed tokens for the request. If not, and `used`
                is None, no tokens count.
            pieces: number of pieces of the answer's body that have arrived.
        """
        if not self.counts:
            return
        if used is None:
            used = max(self._taken, self._prompt + pieces) if computed else 0
        self.limiter.give_back(self.key, self._taken - used)

    @property
    def headers(self) -> Headers:
        """Headers of the answer that show the key's limits."""
        levels = ("requests", self.levels.requests), ("tokens", self.levels.tokens)
        return [
            (name.encode(), value.encode())
            for what, left in levels
            if left is not None
            for name, value in limit_headers(what, left, self.anthropic)
        ]


class ClientKeys:
    """Refuses requests without a valid key, and charges each request to its key's limits.

    The router treats each path as a server does: the same paths are public, and the same paths
    count against the limits.

    Args:
        file: key file in the format of a server's `api_key_file`; None asks for no key.
        requests_per_minute: limit of keys for which the file sets none; None is unlimited.
        tokens_per_minute: limit of keys for which the file sets none; None is unlimited.

    Raises:
        ConfigError: the file is invalid.
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
        """Checks a request's key and takes the request from the key's limit.

        Returns:
            The allowance from which the request takes its tokens; None if it has no limits.

        Raises:
            ApiError: 401, 429.
        """
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
                raise limit_error("tokens", levels.tokens, 1)
            if levels.requests is not None:
                raise limit_error("requests", levels.requests, 1)
        counts = key.tokens_per_minute is not None and path not in UNQUEUED_PATHS
        return Allowance(key, self._limiter, is_anthropic(path), counts, levels)


def _max_answer_tokens(body: bytes | bytearray) -> int:
    """Returns the most tokens that all answers may have; 0 if the body sets no limit."""
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    lengths = found.max_tokens, found.max_completion_tokens, found.max_output_tokens
    most = max((n for n in lengths if isinstance(n, int) and n > 0), default=0)
    runs = found.n, found.best_of, found.beam_width
    return most * max((n for n in runs if isinstance(n, int) and n > 0), default=1)
