"""The interface between the engine's loop and features. The loop knows features by it only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError
from quire.executor import Capacity, Executor
from quire.request import Request, RequestOptions
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature

Failure = tuple[Request, QuireError]


class LoopFeature:
    """Does nothing: the base of features that take part in the engine's loop."""

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        """Begins, once, with an executor that has started and run nothing yet. Returns the
        scheduler's part of the feature; None turns the feature off."""
        return None

    def check(self, params: Sequence[SamplingParams]) -> None:
        """Raises RequestError if a request may not have one of these. It may wait for long, so the
        loop does not call it."""

    @property
    def waits(self) -> bool:
        """Whether requests are parked until `poll` brings news: a step may bring nothing."""
        return False

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        """Returns the ids of requests to wake and requests that must end by an error of their own,
        each once. Waits for news up to `patience` seconds if any is expected."""
        return (), ()

    def may_launch(self) -> bool:
        """Whether another step may be planned now."""
        return True

    def before_submit(self) -> None:
        """Called between the planning of a step and its submission."""

    def after_update(self) -> None:
        """Called after the scheduler has taken in a result."""

    def fds(self) -> Sequence[int]:
        """Returns file descriptors that become readable when `poll` has news."""
        return ()

    def on_control(self, message: dict[str, Any]) -> Any:
        """Answers a message from outside of the loop. None: it is for others."""
        return None

    def stats(self) -> dict[str, Any]:
        """Returns fields of `EngineStats`."""
        return {}

    def close(self, drain: Callable[[], None] | None) -> None:
        """Ends, before the executor does. Idempotent.

        drain: runs the engine until it has no work or its time is up; None after a failed step.
        """


@dataclass(frozen=True, slots=True)
class OnDemand:
    """A feature that the first request to ask for it turns on.

    asked: whether a request does. open: makes the feature.
    """

    asked: Callable[[SamplingParams, RequestOptions], bool]
    open: Callable[[], LoopFeature]
