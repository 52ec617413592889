"""Several API processes on one port, with one engine behind them.

At about 30,000 tokens a second one core is busy with tokenizing, detokenizing and writing events.
`--api-workers` spreads this work over several processes. The supervisor serves no requests: it
starts the workers, restarts the ones that die, and forwards signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import multiprocess

from quire.engine.process.client import EngineClient
from quire.errors import QuireError
from quire.server.args import ServerArgs
from quire.server.process.worker import READY_LINE, WorkerConfig
from quire.server.telemetry.metrics import MULTIPROCESS
from quire.system import python_command

logger = logging.getLogger("quire.server")

_PAUSE = 1.0
"""Seconds before a worker that died is started again."""
_FORCED_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""Seconds without a line from a worker after which it is killed. It writes one every second."""
START_SECONDS = 120.0
"""Seconds until a worker's first line, which it writes after its imports."""


class Supervisor:
    """Runs the API workers of an engine.

    Args:
        client: client of the launched engine.
        sockets: bound sockets, the API's first. Each worker binds its own to the same ports. With a
            Unix socket all workers share these.
    """

    def __init__(
        self, client: EngineClient, args: ServerArgs, sockets: list[socket.socket]
    ) -> None:
        if client.host is None:
            raise QuireError("a supervisor starts engines itself")
        folder = client.host.folder
        self._metrics = folder / "metrics"
        self._metrics.mkdir()
        self._sockets = sockets
        self._fds: list[int] = []
        if sockets[0].family == socket.AF_UNIX:
            for sock in sockets:
                sock.listen(2048)
                self._fds.append(sock.fileno())
        else:
            # Port 0 means any free port. All workers must bind the ports that were chosen.
            port, *others = (sock.getsockname()[1] for sock in sockets)
            args = dataclasses.replace(args, port=port, ollama_api=others[0] if others else None)
        self._args = args
        self._config = WorkerConfig(
            args,
            [engine.host.address for engine in client.replicas if engine.host is not None],
            self._fds,
            str(folder / "limits"),
            os.getpid(),
        )
        self._workers: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._signals = 0

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until a signal, and until all workers have drained.

        Args:
            on_ready: called once all workers serve.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._signal_all, signal.SIGHUP)
        ready = [asyncio.Event() for _ in range(self._args.api_workers)]
        restarters = [
            asyncio.create_task(self._keep_running(i, event)) for i, event in enumerate(ready)
        ]
        stopped = asyncio.create_task(self._stopping.wait())
        waiting = asyncio.create_task(_wait_for_all(ready))
        await asyncio.wait((waiting, stopped, *restarters), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            on_ready()
        waiting.cancel()
        # The restarters run until the server stops. One that ends earlier has failed.
        await asyncio.wait((stopped, *restarters), return_when=asyncio.FIRST_COMPLETED)
        self._stopping.set()
        # Workers drain by themselves. Those that take too long are killed.
        with contextlib.suppress(TimeoutError):
            limit = self._args.drain_timeout + _FORCED_SECONDS
            await asyncio.wait_for(asyncio.shield(asyncio.gather(*restarters)), limit)
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*restarters)

    def _stop(self) -> None:
        self._signals += 1
        self._stopping.set()
        self._signal_all(signal.SIGTERM)
        if self._signals > 1:  # a second signal forces
            for worker in self._workers:
                worker.kill()

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(number)

    async def _keep_running(self, number: int, ready: asyncio.Event) -> None:
        """Runs a worker, and starts a new one whenever it dies."""
        while not self._stopping.is_set():
            began = time.monotonic()
            worker = await self._start()
            status = await self._watch(worker, number, ready)
            self._workers.discard(worker)
            multiprocess.mark_process_dead(worker.pid, str(self._metrics))  # type: ignore[no-untyped-call]
            if self._stopping.is_set():
                return
            logger.error("API worker %d ended with status %d; starting another", number, status)
            if time.monotonic() - began < _PAUSE:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _PAUSE)

    async def _watch(
        self, worker: asyncio.subprocess.Process, number: int, ready: asyncio.Event
    ) -> int:
        """Waits until a worker ends, and kills it if it writes nothing for too long.

        Args:
            number: the worker's number, for the log.
            ready: set when the worker reports that it is ready.

        Returns:
            The worker's exit status.
        """
        ended = asyncio.create_task(worker.wait())
        patience = START_SECONDS
        while not ended.done() and worker.stdout is not None:
            try:
                async with asyncio.timeout(patience):
                    line = await worker.stdout.readline()
            except TimeoutError:
                logger.error(
                    "API worker %d has not responded for %g s; ending it", number, patience
                )
                worker.kill()
                break
            if not line:
                break
            if line == READY_LINE:
                ready.set()
            patience = SILENCE_SECONDS
        return await ended

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            *python_command("quire.server.process.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._fds,
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
            env={**os.environ, MULTIPROCESS: str(self._metrics)},
        )
        self._workers.add(worker)
        if worker.stdin is not None:
            worker.stdin.write(msgspec.json.encode(self._config) + b"\n")
        return worker


async def _wait_for_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
