"""Recurrent states as ops read and write them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateLayer(NamedTuple):
    """One layer's states, by slot; views of the cache.

    recurrent: float32 [slots, Hv, Dk, Dv], a matrix per value head.
    conv: [slots, K - 1 + D, C], the last inputs of the short convolution.
    mixed, gates, base: None where rows have no drafts, else what it takes to go on from any of a
        row's up to D drafts. A state is that behind the row's last token that was no draft; `base`,
        int32 [slots, C + Hv Dv], has twice the number of tokens that it has seen, for each of its
        entries alike, the channels of `conv` first. Behind the K - 1 last inputs `conv` has those
        of the drafts. mixed [slots, 2, D, C] and gates [slots, 2, D, 2 Hv], a then b, are what the
        rule took of the drafts, without queries; the odd bit of `base` says which of the two is the
        last row's, so that a kernel can read one while it writes the other.
    """

    recurrent: Tensor
    conv: Tensor
    mixed: Tensor | None = None
    gates: Tensor | None = None
    base: Tensor | None = None

    @property
    def drafts(self) -> int:
        """The most drafts of a row."""
        return 0 if self.mixed is None else self.mixed.shape[2]


class StateRows(NamedTuple):
    """The rows of a step, as ops over states read them.

    ids: int32 [T], -1 for padding; a row's real tokens come first.
    lanes: int32 [R], -1 for rows of padding. query_start: int32 [R + 1]. seq_lens: int32 [R].
    table: int32 [lanes, 1 + 2 S]: a lane's slot, then pairs (position, slot). When a row computes
        the token before that position, what the state then is goes to that slot, too.
    q_lens: the rows' lengths where the host can read them at no cost, else empty.
    max_q_len: a bound of the rows' lengths.
    flags: int32 [R], as in `StepRows`: of a row that is no PROMPT all tokens but the first are
        drafts. None: all rows are PROMPT.
    """

    ids: Tensor
    lanes: Tensor
    query_start: Tensor
    seq_lens: Tensor
    table: Tensor
    q_lens: tuple[int, ...]
    max_q_len: int
    flags: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.lanes.device
