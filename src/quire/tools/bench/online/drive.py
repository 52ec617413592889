"""Starts client processes, and the server under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, TypeVar

import msgspec

from quire.errors import ConfigError, QuireError
from quire.http_client import HttpClient
from quire.system import python_command
from quire.tools.bench.online.client import Answer, Answers, ClientLoad

T = TypeVar("T", str, bytes)
Form = TypeVar("Form")

PER_PROCESS = 16
"""Number of streams that one client process receives."""
MOST_PROCESSES = 8
BUSY = 0.85
"""If a client process uses more of a core than this, the client may limit the measurement."""
_LEAD = 0.5
"""Seconds in which client processes must read their requests."""
_CALL_SECONDS = 60.0
_TOPS = (10_000, 5000, 2000, 1000, 500, 200, 100)
_SERVING = re.compile(r"^Serving (\S+) at (\S+)\. ")


def processes_for(concurrency: int, asked: int | None) -> int:
    if asked is not None:
        return asked
    return max(1, min(MOST_PROCESSES, -(-concurrency // PER_PROCESS)))


def drive(
    url: str,
    headers: dict[str, str],
    bodies: Sequence[bytes],
    *,
    concurrency: int,
    processes: int,
    send_at: Sequence[float] | None = None,
    timeout: float = 600.0,
) -> tuple[list[Answer], float]:
    """Sends all bodies. Processes take requests in turn.

    Args:
        concurrency: most streams of all processes at once; 0 is no limit.

    Returns:
        The answers in the order of bodies, and the fraction of a core that the busiest process
        used.
    """
    processes = min(processes, len(bodies), concurrency or len(bodies))
    running = [_start() for _ in range(processes)]
    for process in running:
        _pipe(process.stdout).readline()  # The process prints a line when it is ready.
    begin = time.perf_counter() + _LEAD
    for rank, process in enumerate(running):
        places = range(rank, len(bodies), processes)
        streams = concurrency // processes + (rank < concurrency % processes)
        at = None if send_at is None else [send_at[i] for i in places]
        own = [bodies[i] for i in places]
        job = ClientLoad(url, headers, own, streams, begin, at, timeout)
        with _pipe(process.stdin) as pipe:
            pipe.write(msgspec.msgpack.encode(job))
        process.stdin = None
    answers: list[Answer] = []
    busiest = 0.0
    try:
        for rank, process in enumerate(running):
            out, _ = process.communicate()
            if process.returncode:
                raise QuireError("a client process failed")
            done = msgspec.msgpack.decode(out, type=Answers)
            for answer in done.answers:
                answer.index = rank + answer.index * processes
            answers += done.answers
            busiest = max(busiest, done.cpu)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    return sorted(answers, key=lambda answer: answer.index), busiest


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("quire.tools.bench.online.client"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _pipe(pipe: IO[T] | None) -> IO[T]:
    if pipe is None:
        raise QuireError("a process has no pipe")
    return pipe


class _ModelName(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelName]


class _Detokenized(msgspec.Struct):
    prompt: str


class Server:
    """The server under load.

    Attributes:
        base_url: the server's address, without /v1.
        headers: headers of each request.

    Raises:
        ConfigError: `url` is not an http address.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client = HttpClient(url, api_key, _CALL_SECONDS)
        self.base_url = self._client.url
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def call(self, path: str, form: type[Form], body: dict[str, Any] | None = None) -> Form:
        """Sends a GET request, or a POST request with `body`, and returns the answer.

        Args:
            form: type of the answer.

        Raises:
            ConfigError: the request failed. The likeliest reason is a wrong address or key.
        """
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection, response = self._client.request(method, path, content)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{path} broke off its answer: {error!r}", "url") from None
        finally:
            connection.close()
        if response.status != 200:
            said = data[:300].decode(errors="replace")
            raise ConfigError(f"{path} answered {response.status}: {said}", "url")
        try:
            return msgspec.json.decode(data, type=form)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.base_url}{path} does not answer as it should: {error}", "url"
            ) from None

    def model(self) -> str:
        """Returns the name of the server's first model."""
        models = self.call("/v1/models", _ModelList).data
        if not models:
            raise ConfigError("the server names no model; give --model", "model")
        return models[0].id

    def top(self, model: str) -> int:
        """Returns the upper limit for random ids: 10000, or less if the vocabulary is smaller."""
        for top in _TOPS[:-1]:
            with contextlib.suppress(ConfigError):
                self.detokenize(model, [top - 1])
                return top
        return _TOPS[-1]

    def detokenize(self, model: str, tokens: list[int]) -> str:
        return self.call("/detokenize", _Detokenized, {"model": model, "tokens": tokens}).prompt


@contextlib.contextmanager
def launched(flags: str, timeout: float = 600.0) -> Iterator[tuple[str, int]]:
    """Runs `quire serve` with these flags on a free port during the block.

    Yields its URL and its process id. Its messages go to standard error.

    Raises:
        ConfigError: the server does not start.
    """
    command = python_command("quire", "serve", *shlex.split(flags), "--port", "0")
    # Tuning in the background would disturb the measurement.
    variables = {"QUIRE_TUNE_TABLES": "off", **os.environ}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    try:
        yield _url_of(process, timeout), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _url_of(process: subprocess.Popen[str], timeout: float) -> str:
    end = time.monotonic() + timeout
    output = _pipe(process.stdout)
    for line in output:
        found = _SERVING.match(line)
        if found:
            # A thread reads the rest of the output, because a full pipe would block the server.
            threading.Thread(target=output.read, daemon=True).start()
            return found[2]
        if time.monotonic() > end:
            break
    raise ConfigError("the server did not start", "serve")
