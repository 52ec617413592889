"""Runs batches in the background of a server, below the priority of its other requests."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp

from quire.server.apis.batch.lines import (
    BatchError,
    BatchLine,
    BatchOutcome,
    BatchRequest,
    OutcomeFile,
    read_lines,
)
from quire.server.apis.batch.run import AppAnswer, BatchRunner, Counts, call
from quire.server.apis.batch.store import (
    BatchErrors,
    BatchObject,
    BatchRecord,
    BatchStore,
    FileRecord,
    Status,
)
from quire.server.args import ServerArgs
from quire.server.context.request_context import BATCH_KEY
from quire.server.errors import ApiError
from quire.server.state import ServerState, new_id

logger = logging.getLogger("quire.server")

T = TypeVar("T")

MAX_LINES = 50_000
MAX_WAITING = 100
"""Most batches of a key that have not ended."""
WINDOW_SECONDS = 24 * 3600

_AT_ONCE = 2
"""Batches of a key that run at once."""
_SHOWN_ERRORS = 100
_LONGEST_PAUSE = 30.0
_ENDED_EARLY: dict[Status, BatchError] = {
    "expired": BatchError(
        "batch_expired", "The batch's time was over before this request was answered."
    ),
    "cancelled": BatchError(
        "batch_cancelled", "The batch was cancelled before this request was answered."
    ),
}


def open_store(args: ServerArgs) -> BatchStore | None:
    """Returns the store that the settings ask for. Raises ConfigError."""
    if args.batch_dir is None:
        return None
    seconds = args.batch_days * 24 * 3600
    size, own = round(args.batch_dir_gb * 1e9), None
    if args.batch_key_gb is not None:
        own = round(args.batch_key_gb * 1e9)
    elif args.api_key_file is not None or len(args.api_key) > 1:
        own = size // 2
    return BatchStore(Path(args.batch_dir), size, seconds, owner_bytes=own)


class BatchService:
    """The batches of all keys, each in a task of its own.

    A request that is to be sent again later, as its key's limit is reached, the queue is full or
    the engine is starting, is sent again later. What is done is in files: after a restart, batches
    go on where they were.
    """

    def __init__(self, app: ASGIApp, state: ServerState, store: BatchStore) -> None:
        self.store = store
        self._app = app
        self._state = state
        self._concurrency = state.client.config.scheduler.max_num_seqs
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_AT_ONCE)
        )
        self._closed = False

    def start(self) -> None:
        """Goes on with the batches that have not ended."""
        for record in self.store.unfinished():
            self._begin(record)

    def stop(self) -> None:
        """Leaves all batches as they are, for the next start."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Stops, and lets another server use the folder."""
        self.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.store.close()

    def create(
        self,
        owner: bytes,
        file: FileRecord,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None,
    ) -> BatchObject:
        """Starts a batch. Raises ApiError, 413 or 429."""
        waiting = sum(record.owner == owner.hex() for record in self.store.unfinished())
        if waiting >= MAX_WAITING:
            raise ApiError(
                429,
                f"{waiting} batches of this key have not ended, which is all that may wait.",
                code="rate_limit_exceeded",
            )
        now = self.store.now
        batch = BatchObject(
            self.store.new_batch_id(owner), endpoint, file.id, now, now + WINDOW_SECONDS,
            metadata=metadata,
        )  # fmt: skip
        record = BatchRecord(owner.hex(), batch, new_id("file"), new_id("file"), output_seconds)
        self.store.save(record)
        self._begin(record)
        return batch

    def cancel(self, record: BatchRecord) -> None:
        """Ends a batch early. Raises ApiError, 409, for one that has ended or is about to."""
        batch = record.batch
        if batch.status == "cancelling":
            return
        if record.ended or batch.status == "finalizing":
            raise ApiError(
                409,
                f"A batch that is {batch.status.replace('_', ' ')} cannot be cancelled.",
                code="batch_ended",
            )
        batch.turn("cancelling", self.store.now)
        self.store.save(record)
        task = self._tasks.get(record.id)
        if task is not None:
            task.cancel()

    def _begin(self, record: BatchRecord) -> None:
        task = asyncio.create_task(self._run(record))
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    # -- a batch -------------------------------------------------------------------------------

    async def _run(self, record: BatchRecord) -> None:
        try:
            ending = await self._work(record)
            await self._end(record, ending)
        except Exception as error:
            logger.error("the batch %s has failed", record.id, exc_info=error)
            problem = BatchError("internal_error", "The server could not run this batch.")
            self._fail(record, [problem])

    async def _work(self, record: BatchRecord) -> Status:
        """Runs a batch; returns how it ends."""
        batch = record.batch
        if batch.status == "cancelling":
            return "cancelled"
        if batch.finalizing_at is not None:
            return "expired" if batch.finalizing_at >= batch.expires_at else "completed"
        try:
            async with asyncio.timeout(batch.expires_at - self.store.clock()):
                if batch.status == "validating":
                    problems = await self._examine(record)
                    if problems:
                        self._fail(record, problems)
                        return "failed"
                    batch.turn("in_progress", self.store.now)
                    self.store.save(record)
                async with self._turns[record.owner]:
                    await self._answer(record)
        except TimeoutError:
            return "expired"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed or task is None:
                raise
            task.uncancel()
            return "cancelled"
        return "completed"

    async def _examine(self, record: BatchRecord) -> list[BatchError]:
        """Counts the requests; returns what is wrong with the file."""
        batch = record.batch

        def examine() -> tuple[int, list[BatchError]]:
            total, problems = 0, []
            for line in self._lines(record):
                total += 1
                problem = _problem(line, batch.endpoint)
                if problem is not None:
                    problems.append(problem)
                if len(problems) == _SHOWN_ERRORS or total > MAX_LINES:
                    break
            return total, problems

        total, problems = await asyncio.to_thread(examine)
        batch.request_counts.total = total
        if total == 0:
            problems.append(BatchError("empty_file", "The file has no requests."))
        elif total > MAX_LINES:
            why = f"The file has more than {MAX_LINES} requests."
            problems.append(BatchError("too_many_requests", why))
        return problems

    async def _answer(self, record: BatchRecord) -> None:
        counts = record.batch.request_counts

        def count(_: Counts) -> None:
            failed = runner.counts.failed
            completed = len(runner.known) - failed
            metrics = self._state.metrics.batch_requests
            metrics.labels("completed").inc(max(0, completed - counts.completed))
            metrics.labels("failed").inc(max(0, failed - counts.failed))
            counts.completed, counts.failed = completed, failed

        async with self._opened(record) as (target, errors):
            runner = BatchRunner(functools.partial(self._ask, record), target, errors, count)
            counts.failed = runner.counts.failed
            counts.completed = len(runner.known) - counts.failed
            await runner.run(self._lines(record), self._concurrency)

    async def _ask(self, record: BatchRecord, request: BatchRequest) -> AppAnswer:
        while True:
            key = self._state.keys.find_by_digest(bytes.fromhex(record.owner))
            if key is None:
                gone = ApiError(
                    401, "The API key that made the batch is gone.", code="invalid_api_key"
                )
                return AppAnswer(401, msgspec.json.encode(gone.body))
            answer = await call(self._app, request, **{BATCH_KEY: key})
            if self._closed:  # a request of a server that stops is answered in spite of `cancel`
                raise asyncio.CancelledError
            if answer.retry_after is None:
                return answer
            await asyncio.sleep(min(answer.retry_after, _LONGEST_PAUSE))

    async def _end(self, record: BatchRecord, ending: Status) -> None:
        """Makes the files of outcomes known, and ends the batch."""
        batch = record.batch
        if ending == "failed":
            return
        if ending != "cancelled":
            batch.turn("finalizing", self.store.now)
            self.store.save(record)
        counts, reason = batch.request_counts, _ENDED_EARLY.get(ending)
        counts.completed, counts.failed = await _to_its_end(self._complete, record, reason)
        batch.output_file_id = self._publish(record, record.outputs, "output")
        batch.error_file_id = self._publish(record, record.failures, "error")
        batch.turn(ending, self.store.now)
        self.store.save(record)
        self._state.metrics.batches_finished.labels(ending).inc()

    def _complete(self, record: BatchRecord, reason: BatchError | None) -> tuple[int, int]:
        """Writes the outcomes of requests that have none, and counts both kinds."""
        target, errors = self._outcome_files(record)
        with target, errors:
            completed, failed = len(target.done), len(errors.done)
            if reason is not None:
                known = target.done | errors.done
                for line in self._lines(record):
                    if line.key not in known:
                        problem = line.error or reason
                        name = new_id("batch_req", "_")
                        errors.write(BatchOutcome(name, line.custom_id, None, problem))
                        failed += 1
        return completed, failed

    def _publish(self, record: BatchRecord, id: str, what: str) -> str | None:
        path = self.store.data(id)
        if path.stat().st_size == 0:
            path.unlink()
            return None
        owner = bytes.fromhex(record.owner)
        name = f"{record.id}_{what}.jsonl"
        self.store.add_file(id, owner, name, "batch_output", record.output_seconds)
        return id

    def _fail(self, record: BatchRecord, problems: list[BatchError]) -> None:
        record.batch.errors = BatchErrors(problems)
        record.batch.turn("failed", self.store.now)
        self.store.save(record)
        self._state.metrics.batches_finished.labels("failed").inc()

    def _lines(self, record: BatchRecord) -> Iterator[BatchLine]:
        path = self.store.data(record.batch.input_file_id)
        return read_lines(path, self._state.args.max_body_bytes)

    @asynccontextmanager
    async def _opened(self, record: BatchRecord) -> AsyncIterator[tuple[OutcomeFile, OutcomeFile]]:
        opening = asyncio.create_task(asyncio.to_thread(self._outcome_files, record))
        try:
            yield await asyncio.shield(opening)
        finally:
            for file in await opening:
                file.close()

    def _outcome_files(self, record: BatchRecord) -> tuple[OutcomeFile, OutcomeFile]:
        target = OutcomeFile(self.store.data(record.outputs))
        try:
            return target, OutcomeFile(self.store.data(record.failures))
        except BaseException:
            target.close()
            raise


async def _to_its_end(work: Callable[..., T], *given: Any) -> T:
    """Returns what a thread comes to. Cancelled, it waits for the thread before it ends."""
    task = asyncio.create_task(asyncio.to_thread(work, *given))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _problem(line: BatchLine, endpoint: str) -> BatchError | None:
    """Returns what is wrong with a line, with its number."""
    if line.error is not None:
        return msgspec.structs.replace(line.error, line=line.number)
    if line.request is not None and line.request.url != endpoint:
        why = f"'url' must be the batch's endpoint, {endpoint}, not {line.request.url[:100]!r}."
        return BatchError("mismatched_endpoint", why, "url", line.number)
    return None
