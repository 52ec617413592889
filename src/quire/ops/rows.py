"""The rows of a step as the ops of a step program read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

PROMPT = 1
SAMPLE = 2
GATED = 4
HELD = 8
"""Bits of `StepRows.flags`; the values are those of `quire.plan.RowFlag`."""


class StepRows(NamedTuple):
    """A step's R rows, int32 on the device.

    Attributes:
        lanes: [R], the row's lane. Padding rows have lane -1 and come last.
        query_start: [R + 1], the first token of each row.
        logit_start: [R + 1], the first logit row of each row.
        flags: [R], a sum of bits. PROMPT: the host knows the row's tokens. GATED: the head needs
            inputs from the host. HELD: the head continues from the lane's stored hidden state.
    """

    lanes: Tensor
    query_start: Tensor
    logit_start: Tensor
    flags: Tensor

    @property
    def device(self) -> torch.device:
        return self.lanes.device

    def first(self, count: int) -> StepRows:
        """Returns the first `count` rows, as views."""
        lanes, query_start, logit_start, flags = self
        return StepRows(
            lanes[:count], query_start[: count + 1], logit_start[: count + 1], flags[:count]
        )


class LogitRows(NamedTuple):
    """The places at which logits are computed, int32 [L] each, on the device.

    Attributes:
        lanes: the lane; -1 for an unused place.
        tokens: index of the hidden state among the step's tokens; -1 for the lane's stored one.
        lengths: position of the token that the logits predict.
        ahead: number of the row's drafts before this place.
    """

    lanes: Tensor
    tokens: Tensor
    lengths: Tensor
    ahead: Tensor

    @property
    def device(self) -> torch.device:
        return self.lanes.device

    def first(self, count: int) -> LogitRows:
        """Returns the first `count` rows, as views."""
        return LogitRows(*(part[:count] for part in self))


class ProcessedLogits(NamedTuple):
    """The logits from which tokens were drawn, for log-probabilities of other kinds than the
    model's own.

    A mode is a sum of bits. PROCESSED: the values are of the distribution from which the token was
    drawn, after penalties, masks, temperature, min-p, top-k and top-p. Rows without a temperature
    take 1 and keep all tokens. LOGITS: the values are logits in place of log-probabilities.

    Attributes:
        logits: [L, vocab], after penalties and masks.
        modes: int32 [M], each lane's mode.
        temperature: float32 [M], of any stride.
        cuts: int32 [at least L, 2], which tokens truncation keeps; see `ops.sample`.
        sizes: int32 [at least L], output: number of tokens with a probability above 0.
    """

    logits: Tensor
    modes: Tensor
    temperature: Tensor
    cuts: Tensor
    sizes: Tensor


PROCESSED = 1
LOGITS = 2
"""Bits of `ProcessedLogits.modes`."""


class Drafts(NamedTuple):
    """Drafts: guesses at each lane's next tokens.

    Attributes:
        ids: int32 [lanes, W], guessed tokens, -1 for none.
        start: int32 [lanes], the absolute position of the first guess.
        used: int32 [lanes], the number of a row's drafts that the step computes; `place_drafts`
            writes it.
    """

    ids: Tensor
    start: Tensor
    used: Tensor


class ResultRing(NamedTuple):
    """Results of the last steps in host memory, which the device writes itself.

    Attributes:
        lines: int32 [slots, lanes, W], pinned for a GPU. A step's results are in one slot, by row.
        turn: int32 [1], on the device: the slot of the current step. `collect_rows` advances it.
    """

    lines: Tensor
    turn: Tensor


class ExpandedGroup(NamedTuple):
    """The inputs of one KV group.

    Attributes:
        slots: int64 [T].
        block_table: int32 [R, blocks].
    """

    slots: Tensor
    block_table: Tensor


class DecodeInputs(NamedTuple):
    """The inputs of a forward pass over rows of one token each.

    Attributes:
        expanded: as from `expand_rows`.
        embedded: [R, width], the tokens' embeddings; zeros for padding.
        schedule: the result of `attention_schedule`.
    """

    expanded: Expanded
    embedded: Tensor
    schedule: Any


class Expanded(NamedTuple):
    """The inputs of a forward pass over T tokens in R rows.

    Attributes:
        ids: int32 [T], -1 for padding.
        positions: int32 [T], 0 for padding.
        seq_lens: int32 [R].
        groups: the inputs of each KV group.
        q_lens: number of tokens of each row if the host can read it without waiting, else empty.
        max_seq_len: upper bound of the rows' lengths after the step.
    """

    ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    groups: tuple[ExpandedGroup, ...]
    q_lens: tuple[int, ...]
    max_seq_len: int
