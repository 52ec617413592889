"""Updates and sleep of an `LLM`, whose engine runs in the caller's process."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.features.call import CallType
from quire.features.weight_updates.calls import (
    SLEEP,
    STATE,
    UPDATE,
    WAKE_UP,
    Mode,
    Sleep,
    Tag,
    UpdateWeights,
    WakeUp,
    WeightsState,
)
from quire.features.weight_updates.feature import HOLD
from quire.features.weight_updates.payloads import FolderSource, LocalSource, Source
from quire.features.weight_updates.trainer import SharedWeights


class Loop(Protocol):
    """The parts of the engine's loop that a call needs."""

    config: EngineConfig

    def call(self, call: CallType[Any, Any], request: Any) -> Any: ...
    def step(self) -> object: ...


def run_call(core: Loop, call: CallType[Any, Any], request: Any) -> Any:
    """Makes a call, and steps until it is answered. The first one turns the feature on."""
    answer: Future[Any] = core.call(call, request)
    while not answer.done():
        core.step()
    return answer.result()


def update_weights(
    core: Loop,
    source: str | Path | Source | Iterable[tuple[str, Tensor]],
    *,
    mode: Mode,
    label: str,
    id: str,
) -> int:
    """Updates the weights, and returns their version; see `LLM.update_weights`."""
    core.call(STATE, None)
    if isinstance(source, str | Path):
        return _update(core, FolderSource(str(source)), mode, label, id)
    if isinstance(source, Source):
        return _update(core, source, mode, label, id)
    tensors = list(source)
    for each in tensors:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Tensor)):
            raise RequestError("an update yields pairs of a name and a tensor", "source")
    if core.config.args.ranks > 1:
        shared = SharedWeights(tensors)
        try:
            return _update(core, shared.source, mode, label, id)
        finally:
            shared.close()
    with_names = dict(tensors)
    if len(with_names) < len(tensors):
        raise RequestError("an update yields each name once", "source")
    number = core.call(HOLD, with_names)
    try:
        return _update(core, LocalSource(number), mode, label, id)
    finally:
        core.call(HOLD, number)


def _update(core: Loop, source: Source, mode: Mode, label: str, id: str) -> int:
    state: WeightsState = run_call(core, UPDATE, UpdateWeights(source, mode, label, id))
    return state.version


def sleep(core: Loop, level: int, tags: tuple[Tag, ...]) -> None:
    """Gives memory up; see `LLM.sleep`."""
    run_call(core, SLEEP, Sleep(level, tags))


def wake_up(core: Loop, tags: tuple[Tag, ...]) -> None:
    """Takes memory again; see `LLM.wake_up`."""
    run_call(core, WAKE_UP, WakeUp(tags))
