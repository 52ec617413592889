"""The rows of a step as the ops of a step program read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PROMPT = 1
SAMPLE = 2
"""Bits of `StepRows.flags`; the values are those of `quire.plan.RowFlag`."""


class StepRows(NamedTuple):
    """A step's R rows, int32 on the device.

    lanes: [R], -1 for rows of padding, which come last.
    query_start: [R + 1], where the tokens of each row begin.
    logit_start: [R + 1], where the logit rows of each row begin.
    flags: [R], PROMPT where the host knows the row's tokens.
    """

    lanes: Tensor
    query_start: Tensor
    logit_start: Tensor
    flags: Tensor

    @property
    def device(self) -> torch.device:
        return self.lanes.device

    def first(self, count: int) -> StepRows:
        """Returns the first `count` of them, as views."""
        lanes, query_start, logit_start, flags = self
        return StepRows(
            lanes[:count], query_start[: count + 1], logit_start[: count + 1], flags[:count]
        )


class LogitRows(NamedTuple):
    """The places at which logits are computed, int32 [L] each, on the device.

    lanes: -1 where there is none.
    tokens: the place of the hidden state among the step's tokens.
    lengths: the position of the token that the logits give.
    ahead: how many drafts of the same row come before it.
    """

    lanes: Tensor
    tokens: Tensor
    lengths: Tensor
    ahead: Tensor

    @property
    def device(self) -> torch.device:
        return self.lanes.device

    def first(self, count: int) -> LogitRows:
        """Returns the first `count` of them, as views."""
        return LogitRows(*(part[:count] for part in self))


class Drafts(NamedTuple):
    """Claims about text that is still to come, per lane.

    ids: int32 [lanes, W], tokens claimed, -1 where there is none.
    start: int32 [lanes], the absolute position of the first of them.
    used: int32 [lanes], how many of a row's drafts the step computes; written by `place_drafts`.
    """

    ids: Tensor
    start: Tensor
    used: Tensor


class ExpandedGroup(NamedTuple):
    """One KV group's share. slots: int64 [T]. block_table: int32 [R, blocks]."""

    slots: Tensor
    block_table: Tensor


class Expanded(NamedTuple):
    """The inputs of a forward pass over T tokens in R rows.

    ids, positions: int32 [T]; -1 and 0 for padding. seq_lens: int32 [R].
    q_lens: the rows' lengths where the host can read them at no cost, else empty.
    max_seq_len: a bound of the rows' lengths after the step.
    """

    ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    groups: tuple[ExpandedGroup, ...]
    q_lens: tuple[int, ...]
    max_seq_len: int
