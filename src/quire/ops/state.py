"""Recurrent states as ops read and write them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateLayer(NamedTuple):
    """One layer's recurrent states by slot, as views of the cache.

    With up to D drafts per row, the stored state is the state before the row's drafts. `mixed`,
    `gates` and `base` hold the inputs that are needed to continue after any draft of the last step.
    They are None if rows have no drafts.

    Attributes:
        recurrent: float32 [slots, Hv, Dk, Dv], a matrix per value head.
        conv: [slots, K - 1 + D, C], the last K - 1 inputs of the short convolution, then the inputs
            of the drafts.
        mixed: [slots, 2, D, C], the rule's inputs for the drafts, without queries.
        gates: [slots, 2, D, 2 Hv], a of the drafts, then b.
        base: int32 [slots, C + Hv Dv], with an entry for each channel of `conv`, then for each
            column of the state. An entry is twice the number of tokens that this part of the state
            includes. Its lowest bit selects the last step's half of `mixed` and `gates`, so that a
            kernel reads one half and writes the other.
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
    """The rows of a step, for the ops of recurrent layers.

    Attributes:
        ids: int32 [T], -1 for padding, which follows a row's real tokens.
        lanes: int32 [R], -1 for padding rows.
        query_start: int32 [R + 1].
        seq_lens: int32 [R].
        table: int32 [lanes, 1 + 2 S], a lane's slot, then pairs (position, slot). When a row
            computes the token before such a position, the state after the token is copied to the
            slot.
        q_lens: number of tokens of each row if the host can read it without waiting, else empty.
        max_q_len: upper bound of the rows' numbers of tokens.
        flags: int32 [R], as in `StepRows`. In a row without PROMPT all tokens but the first are
            drafts. None means that all rows are PROMPT.
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
