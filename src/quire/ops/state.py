"""Recurrent states as ops read and write them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateLayer(NamedTuple):
    """One layer's recurrent states by slot, as views of the cache.

    `mixed`, `gates` and `base` are None where rows have no drafts. With up to D drafts a row, a
    state stands after the row's last token that was not a draft. These tensors then hold enough to
    continue from any draft of the last step.

    Attributes:
        recurrent: float32 [slots, Hv, Dk, Dv], a matrix per value head.
        conv: [slots, K - 1 + D, C], the last K - 1 inputs of the short convolution, then the inputs
            of the drafts.
        mixed: [slots, 2, D, C], the drafts' inputs of the rule, without queries.
        gates: [slots, 2, D, 2 Hv], the drafts' a, then their b.
        base: int32 [slots, C + Hv Dv], twice the number of tokens that the state has seen, in each
            entry; the channels of `conv` come first. Its odd bit selects the half of `mixed` and
            `gates` of the last step, so that a kernel reads one half and writes the other.
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

    Attributes:
        ids: int32 [T], -1 for padding; a row's real tokens come first.
        lanes: int32 [R], -1 for rows of padding.
        query_start: int32 [R + 1].
        seq_lens: int32 [R].
        table: int32 [lanes, 1 + 2 S], a lane's slot, then pairs (position, slot). When a row
            computes the token before such a position, the state after it is copied to that slot.
        q_lens: the rows' lengths if the host can read them without waiting, else empty.
        max_q_len: upper bound of the rows' lengths.
        flags: int32 [R], as in `StepRows`. In a row without PROMPT all tokens but the first are
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
