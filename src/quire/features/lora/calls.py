"""The calls about adapters, and their use by API processes."""

from __future__ import annotations

import msgspec

from quire.errors import EngineDeadError, QuireError, RequestError
from quire.features.call import Callers, CallType, NewsType, RequestField


class LoadAdapter(msgspec.Struct, frozen=True):
    """Gives a name to an adapter.

    Attributes:
        path: the adapter's folder, or its id on the hub.
        in_place: whether a known name may be given to this adapter.
        known: whether it is no error if an adapter has this name and path already.
    """

    name: str
    path: str
    in_place: bool = False
    known: bool = False


def _no_adapters() -> RequestError:
    return RequestError("this server takes no adapters (--enable-lora)", "lora_name")


LOAD: CallType[LoadAdapter, None] = CallType(
    "lora.load", LoadAdapter, type(None), refusal=_no_adapters
)
"""Gives a name to an adapter. The answer comes when the adapter was read."""
UNLOAD: CallType[str, None] = CallType("lora.unload", str, type(None), refusal=_no_adapters)
"""Forgets a name, and cancels its running loads."""
CALLS = (LOAD, UNLOAD)

ADAPTER: RequestField[str] = RequestField("lora.adapter", str, option="adapter", separates=True)
"""The name of the adapter that a request runs with, "" for none."""
FIELDS = (ADAPTER,)

NAMES: NewsType[tuple[str, ...]] = NewsType("lora.names", tuple[str, ...], ())
"""The names of the adapters."""


def adapter_names(client: Callers) -> tuple[str, ...]:
    """Returns the names of the adapters that every live engine has."""
    alive = [engine.news(NAMES) for engine in client.replicas if engine.alive]
    return tuple(name for name in (alive or [()])[0] if all(name in names for names in alive))


async def load_adapter(client: Callers, name: str, path: str, *, in_place: bool = False) -> None:
    """Gives a name to an adapter, once the engines have read it.

    Args:
        in_place: whether a known name may be given to this adapter. Running requests keep the
            adapter that they began with.

    Raises:
        RequestError: the name is known, or the adapter cannot be used.
        EngineDeadError: the engine is gone.
    """
    client.check_alive()
    for engine in client.replicas:
        if engine.alive:
            # One refusal is enough. If two clients load one name, the first engine refuses one.
            await engine.call(LOAD, LoadAdapter(name, path, in_place))


async def unload_adapter(client: Callers, name: str) -> None:
    """Forgets a name. Running requests keep its adapter.

    Raises:
        RequestError: there is no such name.
        EngineDeadError: the engine is gone.
    """
    client.check_alive()
    engines = [engine for engine in client.replicas if engine.alive]
    refusals: list[QuireError] = []
    for engine in engines:
        try:
            await engine.call(UNLOAD, name)
        except EngineDeadError:
            raise
        except QuireError as error:
            refusals.append(error)
    # A cancelled load may not have reached all engines, so some refusals are no error.
    if refusals and len(refusals) == len(engines):
        raise refusals[0]
