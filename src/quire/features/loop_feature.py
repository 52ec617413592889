"""The interface between the engine's loop and features. The loop uses nothing else of a feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

from quire.arrays import Int32
from quire.errors import QuireError
from quire.executor import Capacity, Executor
from quire.features.call import CallType, NewsType, RequestField
from quire.request import Request, RequestOptions
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Scheduler

Failure = tuple[Request, QuireError | None]
"""A request that has failed, with its error. None: it was aborted, and keeps its tokens."""


class EngineInterface(Protocol):
    """The engine, for a feature that answers a call."""

    @property
    def scheduler(self) -> Scheduler: ...

    def add(
        self,
        request_id: str,
        prompt: Int32,
        params: SamplingParams,
        *,
        max_total: int,
        **options: Unpack[RequestOptions],
    ) -> list[Request]: ...

    def load(self) -> Mapping[str, float]: ...


class LoopFeature:
    """Base of the features that take part in the engine's loop. Its methods do nothing."""

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        """Starts the feature. It is called once, before the executor runs its first step.

        Returns:
            The scheduler's part of the feature; None turns the feature off.
        """
        return None

    @property
    def waits(self) -> bool:
        """Whether requests are parked until `poll` returns news. Then a step may do nothing."""
        return False

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        """Returns the ids of requests to wake, and failed requests with their errors. Each is
        returned once. If news is expected, it waits for up to `patience` seconds."""
        return (), ()

    def before_submit(self) -> None:
        """Called between the planning of a step and its submission."""

    def after_update(self, step_id: int) -> None:
        """Called after the scheduler has taken in a step's result."""

    def fds(self) -> Sequence[int]:
        """Returns file descriptors that become readable when `poll` has news."""
        return ()

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        """Returns the calls that the feature takes, each with the function that answers it.

        The function gets the engine and the request. It returns the answer, a Future of it, or
        `Begun`. An error of it fails the call alone.
        """
        return {}

    def fields(self) -> Mapping[RequestField[Any], Callable[[str, Any], None]]:
        """Returns the request fields that the feature takes, each with a function.

        The function gets the id and the field's value of a request that was queued, before the next
        step. An error of it refuses the request.
        """
        return {}

    def news(self) -> Mapping[NewsType[Any], Any]:
        """Returns the news for all clients. They get it when they connect, and when a call has
        changed it."""
        return {}

    def load(self) -> Mapping[str, float]:
        """Returns what the feature adds to the engine's load, for routers."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Returns fields of `EngineStats`."""
        return {}

    def close(self, drain: Callable[[], None] | None) -> None:
        """Ends the feature, before the executor ends. Idempotent.

        Args:
            drain: runs the engine until it has no work or its time is up; None after a failed
                step.
        """


@dataclass(frozen=True, slots=True)
class RequestedFeature:
    """A feature that the first request or call that needs it turns on.

    Attributes:
        requested: whether a request asks for it.
        open: makes the feature.
        takes: whether it takes a call.
    """

    requested: Callable[[SamplingParams, RequestOptions], bool]
    open: Callable[[], LoopFeature]
    takes: Callable[[CallType[Any, Any]], bool] = lambda call: False
