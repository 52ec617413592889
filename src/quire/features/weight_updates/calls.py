"""The calls about weights, pauses and sleep, and what the engine tells its clients of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.errors import RequestError
from quire.features.call import CallType
from quire.features.weight_updates.payloads import JoinGroup, Source

Mode = Literal["wait", "keep", "abort", "retract"]
"""The fate of running requests.

wait: they end first, with the weights that they began with. New requests wait.
keep: they go on with their KV, under the new weights.
abort: all requests end, with the finish reason "abort".
retract: they go on under the new weights, which compute the KV of all their tokens again.
"""
PauseMode = Literal["keep", "wait", "abort", "retract"]
"""The same, for a pause. keep: requests stand still, and hold their KV."""
Tag = Literal["weights", "kv"]


_TAGS: dict[str, Tag | None] = {
    "weights": "weights",
    "kv": "kv",
    "kv_cache": "kv",
    "cuda_graph": None,
}
"""Names of tags. Captured graphs always stay, so their tag asks for nothing."""


def known_tags(names: Sequence[str] | None) -> tuple[Tag, ...]:
    """Returns the tags that names stand for; None stands for all. Raises RequestError."""
    for name in names or ():
        if name not in _TAGS:
            raise RequestError(
                f"'tags' has '{name[:100]}', but the memory's tags are weights and kv", "tags"
            )
    found = (_TAGS[name] for name in (("weights", "kv") if names is None else names))
    return tuple(dict.fromkeys(tag for tag in found if tag is not None))


class UpdateWeights(msgspec.Struct, frozen=True):
    """Writes new weights between two steps.

    Attributes:
        source: where the tensors are.
        mode: what happens to running requests.
        label: the caller's name for the new version, "" for none.
        id: 32 hexadecimal digits that name the update, "" for a random id. KV is shared only
            between engines whose weights have the same id.
        whole: whether the source must have all tensors of the checkpoint.
    """

    source: Source
    mode: Mode = "wait"
    label: str = ""
    id: str = ""
    whole: bool = False


class Pause(msgspec.Struct, frozen=True):
    """Stops the planning of rows. mode: what happens to running requests."""

    mode: PauseMode = "keep"


class Sleep(msgspec.Struct, frozen=True):
    """Gives memory up.

    Attributes:
        level: 1 copies weights to host memory, 2 drops them.
        tags: what to give up.
        mode: what happens to running requests. None: they are an error.
    """

    level: int = 1
    tags: tuple[Tag, ...] = ("weights", "kv")
    mode: PauseMode | None = None


class WakeUp(msgspec.Struct, frozen=True):
    """Takes memory again. tags: what to take; () stands for all that was given up."""

    tags: tuple[Tag, ...] = ()


class WeightsState(msgspec.Struct, frozen=True):
    """The state of an engine's weights.

    Attributes:
        version: number of updates since the start.
        label: the caller's name for the version.
        id: the update's id, "" before the first.
        paused: whether steps have no rows.
        asleep: what was given up.
        level: the level of the sleep, 0 if awake.
        incomplete: whether an update has failed after its first byte.
        labels: labels of the last versions, by version.
    """

    version: int = 0
    label: str = ""
    id: str = ""
    paused: bool = False
    asleep: tuple[Tag, ...] = ()
    level: int = 0
    incomplete: bool = False
    labels: dict[int, str] = {}


UPDATE: CallType[UpdateWeights, WeightsState] = CallType(
    "weights.update", UpdateWeights, WeightsState
)
PAUSE: CallType[Pause, WeightsState] = CallType("weights.pause", Pause, WeightsState)
RESUME: CallType[None, WeightsState] = CallType("weights.resume", type(None), WeightsState)
SLEEP: CallType[Sleep, WeightsState] = CallType("weights.sleep", Sleep, WeightsState)
WAKE_UP: CallType[WakeUp, WeightsState] = CallType("weights.wake_up", WakeUp, WeightsState)
STATE: CallType[None, WeightsState] = CallType("weights.state", type(None), WeightsState)
JOIN: CallType[JoinGroup, None] = CallType("weights.join_group", JoinGroup, type(None))
LEAVE: CallType[str, None] = CallType("weights.leave_group", str, type(None))
ABORT_ALL: CallType[None, int] = CallType("weights.abort_all", type(None), int)
"""Ends all requests, with the finish reason "abort". Returns their number."""
CALLS = (UPDATE, PAUSE, RESUME, SLEEP, WAKE_UP, STATE, JOIN, LEAVE, ABORT_ALL)
