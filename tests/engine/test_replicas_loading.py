"""Waiting for several engines to load."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

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
