"""Several engines of one model with one client. Each has its own process, devices and cache."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from quire.arrays import Int32
from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.calls import RESET_PREFIX_CACHE, STATS
from quire.engine.loop.stats import EngineStats, added
from quire.engine.process.host import EngineHost
from quire.engine.process.placement import Placement, ReplicaRouter
from quire.engine.process.remote_engine import RemoteEngine
from quire.errors import ConfigError, EngineDeadError
from quire.executor import OnProgress
from quire.system import visible_devices

_PARAM = "data_parallel_size"


class Replicas:
    """One or more engines. A router chooses among those that are alive for each request."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = list(engines)
        self._router = ReplicaRouter(len(self.engines))
        self._lost = [0] * len(self.engines)

    @classmethod
    def start(
        cls,
        args: EngineArgs,
        count: int,
        restarts: int,
        on_progress: OnProgress | None,
        stuck_timeout: float | None,
    ) -> Replicas:
        """Starts the engines' processes.

        Args:
            count: number of engines.
            on_progress: receives the progress of the first engine's loading.
            restarts, stuck_timeout: see `EngineClient.launch`.

        Raises:
            ConfigError: the engines need more GPUs than there are, or a setting is for one engine
                only.
        """
        engines = []
        for index, environment in enumerate(environments(args, count)):
            host = EngineHost(restarts, environment)
            told = on_progress if index == 0 else None
            engines.append(RemoteEngine(host.address, args, told, host, stuck_timeout))
        return cls(engines)

    async def loaded(self) -> EngineConfig:
        """Waits until all engines are loaded. Raises the errors of `RemoteEngine.loaded`."""
        loading = [asyncio.ensure_future(engine.loaded()) for engine in self.engines]
        try:
            return (await asyncio.gather(*loading))[0]
        finally:
            for each in loading:
                each.cancel()

    async def open(self) -> None:
        """Begins to take requests."""
        for engine in self.engines:
            engine.open()
        if len(self.engines) > 1:
            for engine, replica in zip(self.engines, self._router.replicas, strict=True):
                config = await engine.loaded()
                stats = await engine.call(STATS, None)
                replica.has_room(min(stats.blocks_total) * config.block_size)

    async def close(self) -> None:
        """Stops the engines that this client started, and disconnects. Idempotent."""
        for engine in self.engines:
            await engine.close()

    @property
    def alive(self) -> bool:
        """Whether at least one engine takes requests."""
        return any(engine.alive for engine in self.engines)

    @property
    def end(self) -> str:
        """The errors that dead engines have reported, joined by "; "."""
        return "; ".join(engine.end for engine in self.engines if engine.end)

    @property
    def silence(self) -> float:
        """Seconds since any engine's loop last answered."""
        return min(engine.silence for engine in self.engines)

    def check_alive(self) -> None:
        """Raises EngineDeadError if no engine is alive."""
        if not self.alive:
            raise EngineDeadError("the engine has stopped")

    def place(self, tokens: Int32, namespace: str) -> Placement:
        """Chooses an engine for a request, `engines[placement.index]`.

        Raises:
            EngineDeadError: no engine is alive.
        """
        self.check_alive()
        if len(self.engines) == 1:
            return self._router.place(tokens[:0], namespace, (0,))
        for index, engine in enumerate(self.engines):
            if engine.losses != self._lost[index]:
                self._lost[index] = engine.losses
                self._router.replicas[index].forget()
        able = [index for index, engine in enumerate(self.engines) if engine.alive]
        responsive = [index for index in able if self.engines[index].responsive]
        return self._router.place(tokens, namespace, responsive or able)

    async def stats(self) -> EngineStats:
        """Returns the sums of the counts of all engines that are alive.

        Raises:
            EngineDeadError: no engine is alive.
        """
        self.check_alive()
        found: list[EngineStats] = []
        for engine in self.engines:
            try:
                found.append(await engine.call(STATS, None))
            except EngineDeadError:
                continue
        if not found:
            raise EngineDeadError("the engine has stopped")
        return added(found)

    async def reset_prefix_cache(self) -> bool:
        """Clears the prefix caches of all engines that are alive. Returns False if running
        requests keep some prefixes.

        Raises:
            EngineDeadError: no engine is alive, or one dies meanwhile.
        """
        self.check_alive()
        whole = True
        for index, engine in enumerate(self.engines):
            if engine.alive:
                whole &= await engine.call(RESET_PREFIX_CACHE, None)
                self._router.replicas[index].forget()
        return whole

    @property
    def first_alive(self) -> RemoteEngine:
        """The first engine that is alive.

        Raises:
            EngineDeadError: no engine is alive.
        """
        self.check_alive()
        return next(engine for engine in self.engines if engine.alive)


def environments(args: EngineArgs, count: int) -> list[dict[str, str]]:
    """Returns additional environment variables for each engine's process: its visible GPUs.

    Raises:
        ConfigError: there are too few GPUs, or a setting is for one engine only.
    """
    if count == 1:
        return [{}]
    if args.nnodes > 1:
        raise ConfigError(f"nnodes is for one engine, not {_PARAM}={count}", "nnodes")
    if args.distributed_executor == "ray":
        raise ConfigError(f"Ray places the ranks of one engine, not {_PARAM}={count}", _PARAM)
    for field in dataclasses.fields(args):
        if field.metadata.get("one_engine") and getattr(args, field.name) is not None:
            raise ConfigError(f"{field.name} is for one engine, not {_PARAM}={count}", field.name)
    import torch

    if args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available()):
        return [{}] * count
    if args.device not in ("auto", "cuda"):
        raise ConfigError(
            f"{_PARAM}={count} divides all visible GPUs among the engines; device={args.device!r} "
            "names only one",
            "device",
        )
    number, visible = torch.cuda.device_count(), visible_devices()
    names = list(map(str, range(number))) if visible is None else visible[:number]
    each = args.ranks
    if count * each > len(names):
        raise ConfigError(
            f"{_PARAM}={count} engines on {each} GPUs each need {count * each}, but {len(names)} "
            "are visible",
            _PARAM,
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[index * each : (index + 1) * each])}
        for index in range(count)
    ]
