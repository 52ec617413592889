"""Waiting for several engines to load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.engine.loop.messages import Failed, Failure, Ready, Resolved
from quire.engine.process.remote_engine import RemoteEngine
from quire.engine.process.replicas import Replicas
from quire.errors import ConfigError


class LoadingEngine:
    def __init__(self) -> None:
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def loaded(self) -> Any:
        return await self.ready


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_replica_that_fails_to_load_is_reported_at_once(
    failing: tuple[int, ...],
) -> None:
    said: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: said.append(what))
        engines = [LoadingEngine(), LoadingEngine()]
        waiting = asyncio.create_task(Replicas(cast(Any, engines)).loaded())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for index in failing:
            engines[index].ready.set_exception(ConfigError("wrong"))
        with pytest.raises(ConfigError, match="wrong"):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(main())
    assert not said


def test_settings_of_the_first_replica_are_returned() -> None:
    async def main() -> Any:
        engines = [LoadingEngine(), LoadingEngine()]
        for engine, config in zip(engines, "ab", strict=True):
            engine.ready.set_result(config)
        return await Replicas(cast(Any, engines)).loaded()

    assert asyncio.run(main()) == "a"


def test_settings_are_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = resolve(EngineArgs(device="cpu", kv_cache_gb=0.1))

    async def main() -> None:
        first, second, third = (RemoteEngine(str(tmp_path / f"{i}.sock")) for i in range(3))
        loading = asyncio.create_task(first.loaded())
        first._dispatch(Resolved(config))
        assert await first.resolved() is config
        assert not loading.done()
        first._dispatch(Ready(config))
        assert await loading is config
        # Clients that connect later get the settings with the engine's first answer.
        second._dispatch(Ready(config))
        assert await second.resolved() is config
        third._dispatch(Failed(Failure.of(ConfigError("wrong"))))
        with pytest.raises(ConfigError, match="wrong"):
            await third.resolved()
        for engine in (first, second, third):
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 20))
