"""Every step and request as Chrome trace events, in files of bounded size."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import ConfigError
from quire.plan import StepPlan
from quire.request import Request, RequestStatus
from quire.scheduler import StepProgress

if TYPE_CHECKING:
    from quire.scheduler import Scheduler

logger = logging.getLogger("quire.engine")

Event = dict[str, Any]

FILE_BYTES = 32_000_000
MOST_FILES = 8
_PATTERN = "quire-*.trace.json"
_FLUSH_BYTES = 256_000
_FLUSH_SECONDS = 1.0


class TraceFiles:
    """Writes events to files. A file is a JSON array with one event per line.

    Only whole lines are written. After a crash a file misses only the last second and the closing
    bracket. The oldest files are removed, including those of earlier runs.
    """

    def __init__(
        self, folder: Path, file_bytes: int = FILE_BYTES, most_files: int = MOST_FILES
    ) -> None:
        """Raises ConfigError if `folder` cannot be written to."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError(f"trace_dir {str(folder)!r}: {error.strerror}", "trace_dir") from None
        if not writable:
            raise ConfigError(f"trace_dir {str(folder)!r} cannot be written to", "trace_dir")
        self.begin: Callable[[], Iterable[Event]] = tuple
        """Returns the first events of each file: the names of its tracks."""
        self._folder = folder
        self._file_bytes = file_bytes
        self._most_files = most_files
        self._stem = f"quire-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._fd: int | None = None
        self._count = 0
        self._size = 0
        self._lines: list[bytes] = []
        self._waiting = 0
        self._flushed = time.monotonic()
        self._failed = False

    def write(self, event: Event) -> None:
        if self._failed:
            return
        if self._fd is None:
            self._open()
        self._add(msgspec.json.encode(event) + b",\n")
        if self._size > self._file_bytes:
            self.close()
        elif self._waiting > _FLUSH_BYTES or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting += len(line)
        self._size += len(line)

    def _open(self) -> None:
        path = self._folder / f"{self._stem}-{self._count:05d}.trace.json"
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            self._give_up(error)
            return
        self._count += 1
        self._size = 0
        self._add(b"[\n")
        for event in self.begin():
            self._add(msgspec.json.encode(event) + b",\n")
        self._prune()

    def _prune(self) -> None:
        files = sorted(self._folder.glob(_PATTERN), key=lambda path: (_age(path), path.name))
        for path in files[: -self._most_files]:
            with contextlib.suppress(OSError):  # The file is gone or belongs to another user.
                path.unlink()

    def flush(self) -> None:
        """Writes all events so far to the file."""
        self._flushed = time.monotonic()
        if self._fd is None or not self._lines:
            return
        data = memoryview(b"".join(self._lines))
        self._lines.clear()
        self._waiting = 0
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Ends tracing, because a full disk must not stop the engine."""
        logger.warning("no more traces are written: %s", error)
        self._failed = True
        self._lines.clear()
        self._release()

    def _release(self) -> None:
        if self._fd is not None:
            # A full network disk may raise here. The next write reports it.
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Completes the file. The next event begins another file. Idempotent."""
        if self._fd is not None:
            self._lines.append(b'{"name":"end of file","ph":"M","pid":0,"args":{}}\n]\n')
            self.flush()
            self._release()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removes old files too
        return 0.0


# Chrome trace events for every step of the engine and every phase of a request.

ENGINE, REQUESTS = 1, 2
"""Groups of tracks, which the format calls processes."""
HOST, DEVICE = 1, 2
_WAITED = 50e-6
"""If a wait for a result took longer than this, the device's step ended when the wait ended."""


@dataclass(slots=True)
class _Track:
    """A request's track. phase: its current phase. since: time at which the phase began."""

    request: Request
    number: int
    phase: str
    since: float
    preemptions: int = 0


@dataclass(slots=True)
class _StepLaunch:
    step: int
    at: float
    rows: int
    tokens: int


class StepTrace:
    """Traces steps and requests.

    Times are of `time.monotonic`: seconds in calls, microseconds in the files. The tracks are:

    - the host's: plan, submit (the upload and the launches), wait (for the oldest step's result)
      and update.
    - the device's: the steps, with the times that the device measured.
    - a request's: queue, prefill, decode and preempted.
    """

    def __init__(self, files: TraceFiles, scheduler: Scheduler) -> None:
        self._files = files
        self._scheduler = scheduler
        self._launches: deque[_StepLaunch] = deque()
        self._device_end = 0.0
        self._tracks: dict[str, _Track] = {}
        self._prefilling: list[_Track] = []
        self._count = 0
        files.begin = self._names

    def _names(self) -> Iterator[Event]:
        yield _name("process_name", ENGINE, HOST, "engine")
        yield _name("process_name", REQUESTS, 0, "requests")
        yield _name("thread_name", ENGINE, HOST, "host")
        yield _name("thread_name", ENGINE, DEVICE, "device")
        clock = {"unix_us": time.time() * 1e6, "ts": time.monotonic() * 1e6}
        yield {"name": "clock", "ph": "M", "pid": ENGINE, "args": clock}
        for track in self._tracks.values():
            yield _name("thread_name", REQUESTS, track.number, track.request.request_id)

    # -- steps ---------------------------------------------------------------------------------

    def launched(
        self, plan: StepPlan, admitted: list[Request], begun: float, planned: float, now: float
    ) -> None:
        """Traces a launch; see `Telemetry.launched`."""
        step, rows, tokens = plan.step_id, plan.num_rows, plan.num_tokens
        self._launches.append(_StepLaunch(step, planned, rows, tokens))
        args = {"step": step, "requests": rows, "tokens": tokens, "admitted": len(admitted)}
        for move in plan.transfers:
            name = f"blocks_{move.direction}"
            args[name] = args.get(name, 0) + len(move.blocks)
        self._span("plan", ENGINE, HOST, begun, planned, args)
        self._span("submit", ENGINE, HOST, planned, now, {"step": step})
        if plan.frees or self._scheduler.num_running < len(self._tracks):
            self._look_for_left(planned)
        for request in admitted:
            self._admit(request, planned)
        self._count_at(begun, {"batch": {"requests": rows}, "tokens": {"tokens": tokens}})

    def read(
        self, progress: StepProgress, device_us: float, begun: float, collected: float, now: float
    ) -> None:
        """Traces a result; see `Telemetry.read`."""
        launch = self._launches.popleft()
        args = {"step": launch.step}
        self._span("wait", ENGINE, HOST, begun, collected, args)
        self._span("update", ENGINE, HOST, collected, now, args)
        self._device(launch, device_us * 1e-6, begun, collected)
        self._note_first_tokens(now)
        for place in progress.finished:
            self._end(progress.requests[place].request_id, now)
        scheduler = self._scheduler
        usage = scheduler.blocks.usage()
        self._count_at(
            now,
            {
                "queue": {"waiting": scheduler.num_waiting},
                "running": {"running": scheduler.num_running},
                "blocks used": {f"group {i}": group.used for i, group in enumerate(usage)},
            },
        )
        if not scheduler.has_work():
            self._files.flush()  # The next event may be far away.

    def _device(self, launch: _StepLaunch, seconds: float, begun: float, collected: float) -> None:
        """Traces a step's device time.

        If the host waited for the result, the step ended when the wait ended. Otherwise the step
        began when the previous one ended.
        """
        earliest = max(launch.at, self._device_end)
        end = earliest + seconds if collected - begun < _WAITED else collected
        end = min(end, collected)
        start = max(earliest, end - seconds)
        idle = max(0.0, start - self._device_end) * 1e6 if self._device_end else 0.0
        args = {
            "step": launch.step,
            "requests": launch.rows,
            "tokens": launch.tokens,
            "device_us": round(seconds * 1e6, 1),
            "idle_before_us": round(idle, 1),
        }
        self._span("step", ENGINE, DEVICE, start, max(start, end), args)
        self._device_end = max(start, end)

    # -- requests ------------------------------------------------------------------------------

    def _admit(self, request: Request, now: float) -> None:
        times = request.times
        track = self._tracks.get(request.request_id)
        if track is None:
            self._count += 1
            track = _Track(request, self._count, "queue", times.arrival)
            self._tracks[request.request_id] = track
            self._files.write(_name("thread_name", REQUESTS, track.number, request.request_id))
        args = {"prompt_tokens": request.prompt_len, "cached_tokens": request.num_cached_tokens}
        self._move(track, "decode" if times.first_token is not None else "prefill", now, args)
        if track.phase == "prefill":
            self._prefilling.append(track)

    def _note_first_tokens(self, now: float) -> None:
        still = []
        for track in self._prefilling:
            if track.phase != "prefill":
                continue
            if track.request.num_output_tokens:
                self._move(track, "decode", now)
            else:
                still.append(track)
        self._prefilling = still

    def _look_for_left(self, now: float) -> None:
        """Finds requests that have lost their lanes because they were preempted or aborted."""
        for track in list(self._tracks.values()):
            request = track.request
            if request.status is RequestStatus.FINISHED:
                self._end(request.request_id, now)
            elif request.num_preemptions > track.preemptions:
                track.preemptions = request.num_preemptions
                self._move(track, "preempted", now, {"preemptions": track.preemptions})

    def _end(self, request_id: str, now: float) -> None:
        track = self._tracks.pop(request_id, None)
        if track is None:
            return
        request = track.request
        reason = str(request.finish_reason or "error")
        delays = {cause: round(1e6 * seconds) for cause, seconds in request.times.delays.items()}
        args: Event = {"output_tokens": request.num_output_tokens, "finish_reason": reason}
        args["delays_us"] = delays
        self._move(track, "ended", now, args)

    def _move(
        self, track: _Track, phase: str, now: float, args: Mapping[str, object] | None = None
    ) -> None:
        """Writes the phase that ends, and begins another."""
        self._span(track.phase, REQUESTS, track.number, track.since, now, args)
        track.phase, track.since = phase, now

    def close(self) -> None:
        """Ends the tracks of requests that still run. Idempotent."""
        now = time.monotonic()
        for request_id in list(self._tracks):
            self._end(request_id, now)
        self._files.close()

    # -- events --------------------------------------------------------------------------------

    def _span(
        self,
        name: str,
        group: int,
        track: int,
        start: float,
        end: float,
        args: Mapping[str, object] | None = None,
    ) -> None:
        event: Event = {
            "name": name,
            "ph": "X",
            "pid": group,
            "tid": track,
            "ts": round(start * 1e6, 1),
            "dur": round(max(0.0, end - start) * 1e6, 1),
        }
        if args is not None:
            event["args"] = args
        self._files.write(event)

    def _count_at(self, at: float, counters: dict[str, dict[str, int]]) -> None:
        for name, values in counters.items():
            event = {"name": name, "ph": "C", "pid": ENGINE, "ts": round(at * 1e6, 1)}
            self._files.write(event | {"args": values})


def _name(kind: str, group: int, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": group, "tid": track, "args": {"name": name}}
