"""Recurrent states as ops read and write them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateLayer(NamedTuple):
    """One layer's states, by slot; views of the cache.

    recurrent: float32 [slots, Hv, Dk, Dv], a matrix per value head.
    conv: [slots, K - 1, C], the last inputs of the short convolution.
    """

    recurrent: Tensor
    conv: Tensor


class StateRows(NamedTuple):
    """The rows of a step, as ops over states read them.

    ids: int32 [T], -1 for padding; a row's real tokens come first.
    lanes: int32 [R], -1 for rows of padding. query_start: int32 [R + 1]. seq_lens: int32 [R].
    table: int32 [lanes, 1 + 2 S]: a lane's slot, then pairs (position, slot). When a row computes
        the token before that position, what the state then is goes to that slot, too.
    q_lens: the rows' lengths where the host can read them at no cost, else empty.
    max_q_len: a bound of the rows' lengths.
    """

    ids: Tensor
    lanes: Tensor
    query_start: Tensor
    seq_lens: Tensor
    table: Tensor
    q_lens: tuple[int, ...]
    max_q_len: int

    @property
    def device(self) -> torch.device:
        return self.lanes.device
