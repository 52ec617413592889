"""Requests with adapters: the scheduler's part and the engine loop's part.

At its arrival a request is bound to the current version of its adapter. It is parked until that
version is in a slot. A thread reads adapters, and a thread of each rank (`AdapterPool`) copies them
to slots, one after the other. Requests without adapters never wait. An entry of a plan fills a
slot, so all ranks fill it between the same steps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.arrays import int32
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError, RequestError
from quire.executor import Capacity, Executor
from quire.features.call import CallType, NewsType
from quire.features.loop_feature import EngineInterface, Failure, LoopFeature
from quire.features.lora.adapter_pool import AdapterPool
from quire.features.lora.calls import LOAD, NAMES, UNLOAD, LoadAdapter
from quire.features.lora.hook import ADAPTER_POOL, COLUMN, LOADS, load_entry
from quire.features.lora.peft import fetch, fetch_now, on_the_hub
from quire.features.lora.registry import Registry, SlotTable, Version, parse_setting, valid_name
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder


@dataclass(slots=True)
class _SlotLoad:
    """The load of an adapter into a slot.

    Attributes:
        number: Number of the load.
        slot: The slot to fill.
        version: The adapter's version.
        began: Start, as `time.monotonic()`.
        sent: Whether a plan has carried it to the ranks.
    """

    number: int
    slot: int
    version: Version
    began: float
    sent: bool = False


@dataclass(slots=True)
class _AdapterRead:
    """The read of an adapter's files, to set a name or to serve requests.

    Attributes:
        version: The adapter's version.
        digest: Gets the digest of the adapter.
        answer: Answers the caller who sets the name; None: requests wait for the adapter.
    """

    version: Version
    digest: Future[str]
    answer: Future[None] | None = None


@dataclass(slots=True)
class _HubDownload:
    """The download of an adapter from the hub.

    Attributes:
        version: The adapter's version.
        folder: Gets the path of the adapter's folder.
        answer: Answers the caller who sets the name.
    """

    version: Version
    folder: Future[str]
    answer: Future[None]


@dataclass(slots=True)
class _Counts:
    """Counts since the start.

    Attributes:
        loads: Filled slots.
        seconds: Total time to fill them, from `_SlotLoad.began` to the end.
        failures: Adapters that could not be read or copied.
    """

    loads: int = 0
    seconds: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class _ParkedRequests:
    """Requests parked for one version's slot, in order of arrival."""

    version: Version
    requests: dict[str, Request] = field(default_factory=dict)


class AdapterFeature(Feature, LoopFeature):
    """Binds requests to adapters. Belongs to the engine's thread, like the scheduler."""

    waits_for = "adapter"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._registry = Registry(config.args.lora_dir)
        self._slots = SlotTable(config.args.max_loras)
        self._lane_slots = np.full(config.scheduler.max_num_seqs, -1, dtype=np.int32)
        self._bound: dict[str, Version] = {}
        """Versions by the ids of unfinished requests."""
        self._waiting: OrderedDict[int, _ParkedRequests] = OrderedDict()
        """Parked requests by the id of their version, in order of arrival."""
        self._readings: list[_AdapterRead] = []
        self._fetching: list[_HubDownload] = []
        self._load: _SlotLoad | None = None
        self._news = False
        """Whether the last poll woke or ended requests, and the loop has not handled that yet."""
        self._numbers = 0
        self._counts = _Counts()
        self._pool: AdapterPool

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        """Reads the adapters that the settings name.

        Raises:
            ConfigError: one of them cannot be used.
        """
        self._pool = executor.call(ADAPTER_POOL, None)
        for setting in self._config.args.lora:
            name, path = parse_setting(setting)
            if name in self._registry:
                raise ConfigError(f"lora: the name {name!r} is given twice", "lora")
            hub_id = path if on_the_hub(path) else ""
            try:
                path = fetch_now(path) if hub_id else path
                digest = self._pool.read(path).result()
            except RequestError as error:
                raise ConfigError(f"lora {name!r}: {error}", "lora") from None
            self._registry.set(Version(name, path, digest, hub_id))
        return self

    # -- the scheduler's part ------------------------------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        if not request.adapter:
            return None
        leader = None if request.leader is None else self._bound.get(request.leader.request_id)
        version = leader or self._registry.find(request.adapter)
        if version is None:
            return unknown(request.adapter)
        self._bound[request.request_id] = version
        return None

    def ready(self, request: Request) -> bool:
        if not request.adapter:
            return True
        version = self._bound[request.request_id]
        if version.digest and self._slots.enter(version.digest, request.request_id):
            request.lora_id = version.key
            return True
        waiting = self._waiting.setdefault(id(version), _ParkedRequests(version))
        waiting.requests[request.request_id] = request
        return False

    def plan(self, builder: PlanBuilder) -> None:
        changed = []
        for admit in builder.admits:
            version = self._bound.get(admit.request_id)
            slot = -1 if version is None else self._slots.place(version.digest)
            if self._lane_slots[admit.lane] != slot:
                self._lane_slots[admit.lane] = slot
                changed.append(admit.lane)
        if changed:
            builder.write(COLUMN, int32(changed), self._lane_slots[changed])
        load = self._load
        if load is not None and not load.sent:
            load.sent = True
            entry = load_entry(load.number, load.version.path, load.version.digest)
            builder.write(LOADS, int32([load.slot]), entry)

    def pending(self, idle: bool) -> bool:
        return self._load is not None and not self._load.sent

    def finish(self, request: Request) -> None:
        version = self._bound.pop(request.request_id, None)
        if version is None:
            return
        self._slots.leave(version.digest, request.request_id)
        waiting = self._waiting.get(id(version))
        if waiting is not None:
            waiting.requests.pop(request.request_id, None)
            if not waiting.requests:
                del self._waiting[id(version)]

    # -- the engine loop's part ----------------------------------------------------------------

    @property
    def waits(self) -> bool:
        asked = self._fetching or self._readings
        return bool(self._waiting or asked or self._load or self._news)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        if not self.waits:
            return (), ()
        patience, self._news = 0.0 if self._news else patience, False
        if patience:
            time.sleep(patience / 5)
        self._take_fetched()
        failed = self._take_read()
        woken: list[str] = []
        self._take_load(failed)
        self._begin(woken)
        self._news = bool(woken or failed)
        return woken, failed

    def _take_fetched(self) -> None:
        """Starts reading the adapters that were downloaded from the hub."""
        for fetching in [fetching for fetching in self._fetching if fetching.folder.done()]:
            self._fetching.remove(fetching)
            version, error = fetching.version, fetching.folder.exception()
            if error is not None:
                self._counts.failures += 1
                fetching.answer.set_exception(
                    error if isinstance(error, QuireError) else _broken(version)
                )
                continue
            version.path = fetching.folder.result()
            digest = self._pool.read(version.path)
            self._readings.append(_AdapterRead(version, digest, fetching.answer))

    def _take_read(self) -> list[Failure]:
        """Takes in adapters that were read. Returns the requests whose adapter cannot be used."""
        failed: list[Failure] = []
        for reading in [reading for reading in self._readings if reading.digest.done()]:
            self._readings.remove(reading)
            version, error = reading.version, reading.digest.exception()
            if error is None:
                version.digest = reading.digest.result()
            else:
                self._counts.failures += 1
                refusal = error if isinstance(error, QuireError) else _broken(version)
                failed += self._failures(version, refusal)
                if reading.answer is not None:
                    reading.answer.set_exception(refusal)
                continue
            if reading.answer is not None:
                self._registry.set(version)
                reading.answer.set_result(None)
        return failed

    def _take_load(self, failed: list[Failure]) -> None:
        """Takes in the running load, if it has ended."""
        load = self._load
        if load is None or not load.sent:
            return
        done = self._pool.done(load.number)
        if done is False:
            return
        self._load = None
        if done:
            self._slots.fill(load.slot, load.version.digest)
            self._counts.loads += 1
            self._counts.seconds += time.monotonic() - load.began
        else:
            self._counts.failures += 1
            self._registry.renew(load.version)
            failed += self._failures(load.version, _broken(load.version))

    def _begin(self, woken: list[str]) -> None:
        """Starts reading unread adapters, and filling a slot for the request that has waited
        longest."""
        reading = {id(reading.version) for reading in self._readings}
        lacking = []
        for waiting in list(self._waiting.values()):
            version = waiting.version
            if version.digest and self._slots.place(version.digest) < 0:
                lacking.append(version)
            elif not version.digest and id(version) not in reading:
                self._readings.append(_AdapterRead(version, self._pool.read(version.path)))
        if not lacking:
            self._slots.reopen()
        for waiting in list(self._waiting.values()):
            woken += self._wake(waiting)
        if lacking and self._load is None:
            slot = self._slots.take()
            if slot >= 0:
                self._numbers += 1
                self._load = _SlotLoad(self._numbers, slot, lacking[0], time.monotonic())

    def _wake(self, waiting: _ParkedRequests) -> list[str]:
        """Gives a version's slot to its waiting requests, if it has an open one. Returns the ids of
        these requests, which wakes them."""
        digest = waiting.version.digest
        if not all(self._slots.enter(digest, name) for name in waiting.requests):
            return []
        self._waiting.pop(id(waiting.version), None)
        return list(waiting.requests)

    def _failures(self, version: Version, error: QuireError) -> list[Failure]:
        waiting = self._waiting.pop(id(version), None)
        return [] if waiting is None else [(r, error) for r in waiting.requests.values()]

    # -- names ---------------------------------------------------------------------------------

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        return {
            LOAD: lambda _, asked: self._add(asked),
            UNLOAD: lambda _, name: self._remove(name),
        }

    def news(self) -> Mapping[NewsType[Any], Any]:
        return {NAMES: self._registry.names()}

    def _add(self, asked: LoadAdapter) -> Future[None]:
        answer: Future[None] = Future()
        name, path = asked.name, asked.path
        known = self._registry.find(name) if name in self._registry else None
        pending = self._pending(name)
        if known is not None and asked.known and _stands_for(known, path):
            answer.set_result(None)
        elif asked.known and (same := [w for v, w in pending if _stands_for(v, path)]):
            answer = same[-1]
        elif not valid_name(name):
            answer.set_exception(
                RequestError(
                    "An adapter's name has 1 to 256 characters, and does not begin with a dot, "
                    "slash or space.",
                    "lora_name",
                )
            )
        elif (known is not None or pending) and not asked.in_place:
            answer.set_exception(
                RequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    "lora_name",
                )
            )
        elif on_the_hub(path):
            version = Version(name, "", hub_id=path)
            self._fetching.append(_HubDownload(version, fetch(path), answer))
        else:
            version = Version(name, path)
            self._readings.append(_AdapterRead(version, self._pool.read(path), answer))
        return answer

    def _pending(self, name: str) -> list[tuple[Version, Future[None]]]:
        """Returns the versions that are being read for a name, with their callers' answers."""
        loads: list[_HubDownload | _AdapterRead] = [*self._fetching, *self._readings]
        asked = [(load.version, load.answer) for load in loads]
        return [(v, answer) for v, answer in asked if answer is not None and v.name == name]

    def _remove(self, name: str) -> Future[None]:
        """Forgets a name, and cancels its unfinished loads."""
        answer: Future[None] = Future()
        pending = self._pending(name)
        for version, waits in pending:
            # A read or a download that has begun goes on, but its result is not used.
            self._fetching = [each for each in self._fetching if each.version is not version]
            self._readings = [each for each in self._readings if each.version is not version]
            waits.set_exception(_unloaded(name))
        if self._registry.remove(name) or pending:
            answer.set_result(None)
        else:
            answer.set_exception(not_loaded(name))
        return answer

    def stats(self) -> dict[str, Any]:
        return {
            "adapters": {
                "known": float(len(self._registry)),
                "cached": float(len(self._pool.cache)),
                "cached_bytes": float(self._pool.cache.nbytes),
                "resident": float(self._slots.resident),
                "waiting": float(sum(len(each.requests) for each in self._waiting.values())),
                "loads": float(self._counts.loads),
                "load_seconds": self._counts.seconds,
                "failures": float(self._counts.failures),
            }
        }

    def close(self, drain: Any) -> None:
        for reading in self._readings:
            reading.digest.cancel()
        fetched = [fetching.answer for fetching in self._fetching]
        for answer in (*fetched, *(reading.answer for reading in self._readings)):
            if answer is not None and not answer.done():
                answer.set_exception(QuireError("the engine was shut down"))
        self._fetching.clear()
        self._readings.clear()


def unknown(name: str) -> RequestError:
    return RequestError(f"The model '{name[:200]}' does not exist.", "model", "model_not_found")


def not_loaded(name: str) -> RequestError:
    return RequestError(
        f"The lora adapter '{name[:200]}' cannot be found.", "lora_name", "adapter_not_found"
    )


def _unloaded(name: str) -> RequestError:
    return RequestError(
        f"The lora adapter '{name[:200]}' was unloaded before it had been loaded.",
        "lora_name",
        "adapter_unloaded",
    )


def _stands_for(version: Version, path: str) -> bool:
    """Returns whether a version is the adapter at a path."""
    return path in (version.path, version.hub_id)


def _broken(version: Version) -> RequestError:
    return RequestError(
        f"The adapter '{version.name}' could not be loaded: its files have changed or are gone.",
        "model",
        "adapter_broken",
    )
