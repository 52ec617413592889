"""Sends the requests of the checks, and reads whole answers, streams and errors."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.http_client import HttpClient
from quire.tools.verify.outcome import FailedError, NotOfferedError
from quire.tools.verify.routes import (
    CheckedAnswer,
    CheckedChoice,
    CheckedRoute,
    Json,
    add_choices,
    usage_of,
)

REFUSED = frozenset({400, 404, 405, 415, 422, 501})
"""Statuses by which servers refuse a field or a route that they do not have."""
_MOST_BYTES = 16_000_000
_MOST_STREAMED_BYTES = 2_000_000
"""Limit for the bytes of a stream. The checks' streams have about ten kilobytes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP status and a JSON body. The body is None if it is not JSON."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """The message of OpenAI's error object, or an empty text."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return message if isinstance(message, str) else ""

    def __str__(self) -> str:
        said = self.message or ("no message" if self.body is None else json.dumps(self.body)[:200])
        return f"{self.status}: {said}"


def send(client: HttpClient, method: str, path: str, content: str | None = None) -> Reply:
    """Sends one request.

    Raises:
        ConfigError: the server cannot be reached, or does not answer.
    """
    connection, response = client.request(method, path, content)
    try:
        data = response.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"{client.address} broke off its answer: {error!r}", "url") from None
    finally:
        connection.close()
    return Reply(response.status, _parsed(data))


def _parsed(data: bytes) -> Any:
    """Returns the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


class Session:
    """One model on one route of a server."""

    def __init__(self, client: HttpClient, model: str, route: CheckedRoute) -> None:
        self.client = client
        self.model = model
        self.route = route
        self._limit = "max_tokens"
        self._greedy: CheckedAnswer | None = None

    def probe(self) -> Reply:
        """Sends the simplest request, and finds out which field limits an answer's length."""
        reply = self.post(self.body("Hello", limit=1))
        if reply.status == 400 and "max_completion_tokens" in reply.message:
            self._limit = "max_completion_tokens"
            reply = self.post(self.body("Hello", limit=1))
        return reply

    def body(self, prompt: str, limit: int, **fields: Any) -> Json:
        """Returns a request's body. Decoding is greedy, unless `fields` change that."""
        start = {"model": self.model, self._limit: limit, "temperature": 0.0}
        return {**start, **self.route.prompt(prompt), **fields}

    @property
    def limit(self) -> str:
        """Name of the field that limits an answer's length."""
        return self._limit

    def post(self, body: Json | str) -> Reply:
        content = body if isinstance(body, str) else json.dumps(body)
        try:
            return send(self.client, "POST", self.route.path, content)
        except ConfigError as error:
            raise FailedError(str(error)) from None

    def ask(self, body: Json, needs: str = "") -> CheckedAnswer:
        """Returns a whole answer.

        Args:
            needs: a field of the body that the server may not support.

        Raises:
            NotOfferedError: the server refuses a request with this field.
            FailedError: the server answers with another error, or not in OpenAI's format.
        """
        reply = self.post(body)
        check_status(reply, needs)
        choices: dict[int, CheckedChoice] = {}
        add_choices(self.route, choices, reply.body)
        return CheckedAnswer(choices, usage_of(reply.body))

    def stream(self, body: Json, needs: str = "") -> CheckedAnswer:
        """Returns the whole of a streamed answer. Raises the same errors as `ask`."""
        answer = CheckedAnswer({}, None)
        try:
            for chunk in self.chunks({**body, "stream": True}, needs):
                add_choices(self.route, answer.choices, chunk)
                answer.usage = usage_of(chunk) or answer.usage
        except (ConfigError, OSError, http.client.HTTPException) as error:
            raise FailedError(f"the stream broke off: {error}") from None
        return answer

    def chunks(self, body: Json, needs: str) -> Iterator[Json]:
        """Yields the events of a stream. Errors are those of `ask`."""
        connection, response = self.client.request("POST", self.route.path, json.dumps(body))
        try:
            if response.status != 200:
                reply = Reply(response.status, _parsed(response.read(_MOST_BYTES)))
                check_status(reply, needs)
            left = _MOST_STREAMED_BYTES
            while line := response.readline(left):
                left -= len(line)
                if left <= 0:
                    raise FailedError(f"the stream goes on after {_MOST_STREAMED_BYTES:,} bytes")
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                chunk = _parsed(data)
                if chunk is None:
                    raise FailedError(f"an event is not JSON: {data[:100]!r}")
                if not isinstance(chunk, dict) or "error" in chunk:
                    raise FailedError(f"an event is an error: {data[:200]!r}")
                yield chunk
            raise FailedError("the stream ended without [DONE]")
        finally:
            connection.close()

    def greedy(self) -> CheckedAnswer:
        """Returns the greedy answer to the checks' prompt. The request is sent only once."""
        if self._greedy is None:
            self._greedy = self.ask(self.body(PROMPT, LIMIT))
        return self._greedy


PROMPT = (
    "Write the numbers from one to forty as English words, with commas between them. "
    "They are: one, two,"
)
"""Models that only go on with a text have something to go on with."""
LIMIT = 48
"""Most tokens of the checks' answers."""


def check_status(reply: Reply, needs: str) -> None:
    """Raises FailedError unless the status is 200, or NotOfferedError if `needs` is refused."""
    if reply.status == 200:
        return
    if needs and reply.status in REFUSED:
        raise NotOfferedError(f"{needs} is refused with {reply}")
    raise FailedError(f"answered {reply}")
