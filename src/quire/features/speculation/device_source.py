"""The part of plans for the source of drafts on the device: the rows to draft for, and its other
computations.

The source drafts just before the step that verifies the drafts. In a pipeline it drafts ahead,
after the previous step (see `quire.features.speculation.drafter`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.arrays import Int32, int32
from quire.features.speculation.draft_count import Flags
from quire.features.speculation.draft_head import DRAFT_PAIRS
from quire.features.speculation.draft_model import DRAFT_CHUNKS
from quire.features.speculation.drafter import DRAFT_ROWS
from quire.scheduler import PlanBuilder

_SHORT_ROW = 8
"""Longest row of the kernels for short rows, in tokens."""
_CHUNK = 256
"""Most tokens per step that a draft model computes to catch up with a text."""


class DeviceSource(Protocol):
    """Follows the progress of a source of drafts on the device, by lane."""

    def admit(self, lanes: Int32) -> None:
        """Resets lanes that got another request."""
        ...

    def ready(self, lanes: Int32, wanted: Flags) -> Flags:
        """Returns the rows that the source can draft for in the next step, bool [n].

        Args:
            lanes: lanes of the rows, int32 [n].
            wanted: rows whose drafts would be used, bool [n]. The source gets ready for them.
        """
        ...

    def passed(self, lanes: Int32, q_len: Int32) -> None:
        """Records a step's generating rows, before the drafts after this step are planned.

        Args:
            lanes: lanes of the rows, int32 [n].
            q_len: tokens of each row, int32 [n].
        """
        ...

    def plan(self, builder: PlanBuilder, drafts: Int32, follows: Flags, pays: bool) -> None:
        """Adds the source's entries to a step's plan.

        Args:
            drafts: number of drafts to make for each row, int32 [R].
            follows: lanes whose texts the source must follow, bool [lanes].
            pays: whether drafts could make the step faster.
        """
        ...

    def verified(self, lanes: Int32, drafts: Int32, accepted: Int32) -> None:
        """Takes in the results of rows that verified drafts of other sources, or no drafts; see
        `Feature.verified`."""
        ...

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        """Records rows that gave no token: see `Feature.late`."""
        ...


class DraftModelSource:
    """A draft model. It may lag behind a text, and catches up.

    It keeps by lane:
        `_least_lag`, `_most_lag`: Bounds of its lag, in tokens.
        `_behind`: Whether its drafts are wanted, but the lag is too large for a first pass.
        `_drafted`: Whether drafts for the next row were made ahead.
    """

    def __init__(self, lanes: int, budget: int, ahead: bool) -> None:
        self._budget = budget
        self._ahead = ahead
        self._drafted = np.zeros(lanes, dtype=bool)
        self._least_lag = np.zeros(lanes, dtype=np.int32)
        self._most_lag = np.zeros(lanes, dtype=np.int32)
        self._behind = np.zeros(lanes, dtype=bool)

    def admit(self, lanes: Int32) -> None:
        self._least_lag[lanes] = self._most_lag[lanes] = 0
        self._drafted[lanes] = False

    def ready(self, lanes: Int32, wanted: Flags) -> Flags:
        found: Flags = self._most_lag[lanes] < _SHORT_ROW
        self._behind[lanes] = wanted & ~found
        return found

    def passed(self, lanes: Int32, q_len: Int32) -> None:
        least, most, drafted = self._least_lag, self._most_lag, self._drafted[lanes]
        least[lanes] = np.where(drafted, 0, least[lanes] + 1)
        most[lanes] = np.where(drafted, 1, most[lanes] + q_len)

    def plan(self, builder: PlanBuilder, drafts: Int32, follows: Flags, pays: bool) -> None:
        least, most = self._least_lag, self._most_lag
        prompt, drafting = (builder.flags & 1) != 0, drafts > 0
        lanes, q_len = builder.lanes, builder.q_len
        own = lanes[drafting]
        if len(own):
            first = np.maximum(most[own] + 1, 2)
            builder.write(DRAFT_ROWS, own, np.stack([first, drafts[drafting]], axis=1))
        self._drafted[lanes] = drafting & self._ahead
        if not self._ahead:
            least[own], most[own] = 0, 1
        fed = prompt & follows[lanes]
        chunk_lanes, chunk_lengths = [lanes[fed]], [q_len[fed]]
        others = lanes[~prompt & ~drafting]
        # If the model runs for some rows, the others will probably want its drafts soon.
        soon = follows[others] & (least[others] >= _SHORT_ROW // 2) & (len(own) > 0)
        behind = others[(soon | self._behind[others]) & (least[others] > 0)]
        if len(behind):
            left = min(self._budget - int(chunk_lengths[0].sum()), _CHUNK)
            behind = behind[np.cumsum(np.minimum(least[behind], _CHUNK)) <= left]
            chunk = np.minimum(least[behind], _CHUNK)
            chunk_lanes.append(behind)
            chunk_lengths.append(chunk)
            least[behind] -= chunk
            most[behind] -= chunk
        self._behind[:] = False
        if not self._ahead:
            least[others] += 1
            most[others] += q_len[~prompt & ~drafting]
        chunks = np.concatenate(chunk_lanes)
        if len(chunks):
            builder.write(DRAFT_CHUNKS, chunks, np.concatenate(chunk_lengths))

    def verified(self, lanes: Int32, drafts: Int32, accepted: Int32) -> None:
        self._least_lag[lanes] += np.maximum(accepted - 1, 0)
        self._most_lag[lanes] -= drafts + 1 - np.maximum(accepted, 1)

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        # Rows with drafts of the model keep their bounds: the lag is at most one token.
        self._least_lag[lanes] = np.maximum(self._least_lag[lanes] - rows, 0)
        self._most_lag[lanes] = np.maximum(self._most_lag[lanes] - tokens, 1)


class DraftHeadSource:
    """A draft head. It computes a position's pair in the target's step, or never.

    It keeps by lane:
        `_whole`: Whether it has the pairs of the whole text so far.
    """

    def __init__(self, lanes: int) -> None:
        self._whole = np.zeros(lanes, dtype=bool)

    def admit(self, lanes: Int32) -> None:
        self._whole[lanes] = True

    def ready(self, lanes: Int32, wanted: Flags) -> Flags:
        found: Flags = self._whole[lanes]
        return found

    def passed(self, lanes: Int32, q_len: Int32) -> None:
        pass

    def plan(self, builder: PlanBuilder, drafts: Int32, follows: Flags, pays: bool) -> None:
        lanes, drafts = builder.lanes[drafts > 0], drafts[drafts > 0]
        if len(lanes):
            builder.write(DRAFT_ROWS, lanes, np.stack([np.ones_like(drafts), drafts], axis=1))
        kept = follows[builder.lanes] & self._whole[builder.lanes]
        if len(lanes) or (pays and kept.any()):
            builder.write(DRAFT_PAIRS, int32([0]), int32([1]))
        else:
            self._whole[builder.lanes] = False

    def verified(self, lanes: Int32, drafts: Int32, accepted: Int32) -> None:
        pass

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        pass  # The pair of the last position has a wrong token, which costs acceptance only.
