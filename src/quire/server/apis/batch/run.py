"""Runs a file of requests against the application, in this process and without a port."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from quire.errors import ConfigError, EngineDeadError
from quire.server.apis.batch.lines import (
    BatchLine,
    BatchOutcome,
    BatchRequest,
    BatchResponse,
    OutcomeFile,
    read_lines,
    refused,
)
from quire.server.state import new_id


@dataclass(slots=True)
class Counts:
    """Counts of a batch's lines.

    Attributes:
        total: lines of the input.
        done: lines with an outcome, earlier runs included.
        before: lines that earlier runs have done.
        failed: failures among the lines that are done.
    """

    total: int = 0
    done: int = 0
    before: int = 0
    failed: int = 0


_ENGINE_DEAD = b'"engine_dead"'
"""Code of the error that a stopped engine gives, as it stands in a body."""

_RETRY_AFTER = b"retry-after-ms"


@dataclass(frozen=True, slots=True)
class AppAnswer:
    """The application's answer. retry_after: seconds, where it asks for the request again."""

    status: int
    body: bytes
    retry_after: float | None = None


Ask = Callable[[BatchRequest], Awaitable[AppAnswer]]
OnCount = Callable[[Counts], None]
"""Called after each line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A file of requests and the files of its outcomes.

    Attributes:
        errors: file of failures; None writes them to `target`.
        concurrency: most requests under way at once.
        max_body: most bytes of a request's body.
    """

    source: Path
    target: Path
    errors: Path | None = None
    concurrency: int = 256
    max_body: int = 16_000_000

    def check(self) -> None:
        """Raises ConfigError unless the files are three different ones and the input exists."""
        if not self.source.is_file():
            raise ConfigError(f"no file {self.source}", "input")
        paths = [path.resolve() for path in (self.source, self.target, self.errors) if path]
        if len(set(paths)) < len(paths):
            raise ConfigError("input, output and error file must be different files", "output")

    async def run(self, app: ASGIApp, on_count: OnCount) -> Counts:
        """Runs the lines that are not done yet.

        Raises:
            ConfigError: one of the files is wrong.
            EngineDeadError: the engine stopped. Outcomes so far are written; a second run does the
                rest.
        """
        self.check()
        with ExitStack() as stack:
            target = stack.enter_context(OutcomeFile(self.target))
            errors = target
            if self.errors is not None:
                errors = stack.enter_context(OutcomeFile(self.errors))
            runner = BatchRunner(functools.partial(call, app), target, errors, on_count)
            runner.counts.total = sum(1 for _ in self._lines())
            await runner.run(self._lines(), self.concurrency)
            return runner.counts

    def _lines(self) -> Iterator[BatchLine]:
        return read_lines(self.source, self.max_body)


class BatchRunner:
    """Runs the lines that have no outcome yet.

    Attributes:
        known: keys of the lines that have one.
    """

    def __init__(
        self, ask: Ask, target: OutcomeFile, errors: OutcomeFile, on_count: OnCount
    ) -> None:
        self.ask = ask
        self.target = target
        self.errors = errors
        self.on_count = on_count
        self.known = target.done | errors.done
        self.counts = Counts(failed=target.failed)
        if errors is not target:
            self.counts.failed += errors.failed

    async def run(self, lines: Iterator[BatchLine], concurrency: int) -> None:
        """Raises EngineDeadError when an answer says that the engine has stopped."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(self._work(lines))
        except ExceptionGroup as group:
            # Not `except*`, which wraps what is raised in it until Python 3.11.4.
            dead = group.subgroup(EngineDeadError)
            if dead is None:
                raise
            raise dead.exceptions[0] from None

    async def _work(self, lines: Iterator[BatchLine]) -> None:
        for line in lines:
            if line.key in self.known:
                self.counts.before += 1
            else:
                self.write(line, await self._outcome(line))
            self.counts.done += 1
            self.on_count(self.counts)

    async def _outcome(self, line: BatchLine) -> BatchOutcome:
        if line.error is not None or line.request is None:
            return refused(line)
        answer = await self.ask(line.request)
        if answer.status == 503 and _ENGINE_DEAD in answer.body:
            raise EngineDeadError("the engine has stopped; run the same command again to go on")
        response = BatchResponse(answer.status, new_id("req", "_"), msgspec.Raw(answer.body))
        return BatchOutcome(new_id("batch_req", "_"), line.custom_id, response, None)

    def write(self, line: BatchLine, outcome: BatchOutcome) -> None:
        """Writes a line's outcome to the file where it belongs."""
        self.known.add(line.key)
        self.counts.failed += outcome.failed
        (self.errors if outcome.failed else self.target).write(outcome)


async def call(app: ASGIApp, request: BatchRequest, **extra: Any) -> AppAnswer:
    """Returns the application's answer. extra: further entries of the scope."""
    data = bytes(request.body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        **extra,
    }
    messages = iter([{"type": "http.request", "body": data, "more_body": False}])
    status, parts, retry_after = 500, [], None

    async def receive() -> Any:
        message = next(messages, None)
        if message is not None:
            return message
        return await asyncio.Event().wait()  # this client stays

    async def send(message: Any) -> None:
        nonlocal status, retry_after
        if message["type"] == "http.response.start":
            status = message["status"]
            for name, value in message["headers"]:
                if name.lower() == _RETRY_AFTER:
                    retry_after = int(value) / 1000
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        if not parts:  # the application answers errors, then raises them for its server's log
            raise
    return AppAnswer(status, b"".join(parts), retry_after)
