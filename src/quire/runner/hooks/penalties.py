"""Penalties, biases, and `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire import ops
from quire.arrays import Int32, int32
from quire.errors import MAX_BIAS_ENTRIES
from quire.plan import Admit, StepPlan
from quire.runner.hooks.hook import HeadContext, HostHook, Level, ProgramHook
from quire.runner.readback import Array, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits


class Penalties(ProgramHook, HostHook):
    """Adjusts logits by penalties and biases, and bars stop tokens before `min_tokens`.

    Columns:
        penalties: float32 [lanes, 3]: repetition, presence, frequency.
        token_counts: int32 [lanes, vocab], twice the number of times that a token was generated,
            plus one if the prompt has it. An admission counts its tokens again, so that preemption
            need not save the counts.
        num_bias: int32 [lanes], number of biases.
        bias_ids: int32 [lanes, MAX_BIAS_ENTRIES], tokens with a bias.
        bias_values: float32 [lanes, MAX_BIAS_ENTRIES], their biases.

    Attributes:
        counts: the column `token_counts`.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return (
            ColumnSpec("penalties", (3,), torch.float32),
            ColumnSpec("token_counts", (self._vocab_size,)),
            ColumnSpec("num_bias"),
            ColumnSpec("bias_ids", (MAX_BIAS_ENTRIES,), fill=-1),
            ColumnSpec("bias_values", (MAX_BIAS_ENTRIES,), torch.float32),
        )

    def bind(self, state: BatchState) -> None:
        self._state = state
        self._penalties = state.columns["penalties"]
        self.counts = state.columns["token_counts"]
        self._num_bias = state.columns["num_bias"]
        self._bias_ids = state.columns["bias_ids"]
        self._bias_values = state.columns["bias_values"]

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if not admits:
            return
        lanes = int32([admit.lane for admit in admits])
        params = [admit.params for admit in admits]
        factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        upload.put_lines(self._penalties, lanes, np.asarray(factors, dtype=np.float32))
        upload.put_lines(self._num_bias, lanes, int32([len(p.logit_bias or ()) for p in params]))
        for admit in admits:
            p = admit.params
            if p.logit_bias:
                start, count = [admit.lane * MAX_BIAS_ENTRIES], [len(p.logit_bias)]
                values = np.asarray(list(p.logit_bias.values()), dtype=np.float32)
                upload.put(self._bias_ids, start, count, int32(list(p.logit_bias)))
                upload.put(self._bias_values, start, count, values)
            if p.penalizes:
                # This runs on the same stream, and therefore before the upload's writes.
                self.counts[admit.lane].zero_()
                ids, counts = _counted(admit)
                starts = admit.lane * self._vocab_size + ids
                upload.put(self.counts, starts, np.ones(len(ids), dtype=np.int64), counts)

    def lane_level(self, admit: Admit) -> Level:
        p = admit.params
        return Level.FULL if p.penalizes or p.logit_bias or p.min_tokens > 0 else Level.PLAIN

    def logits(self, ctx: HeadContext) -> None:
        if ctx.level < Level.FULL:
            return
        columns = self._state.columns
        ctx.logits = ops.adjust(
            ctx.logits,
            ctx.logit_rows,
            self._state.tokens,
            penalties=self._penalties,
            counts=self.counts,
            num_bias=self._num_bias,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            num_stops=columns["num_stops"],
            stops=columns["stops"],
            min_total=self._state.min_total,
        )


def _counted(admit: Admit) -> tuple[Array, Int32]:
    """Returns the distinct tokens of a request, and their `token_counts`."""
    ids, where = np.unique(admit.tokens, return_inverse=True)
    counts = np.zeros(len(ids), dtype=np.int32)
    counts[where[: admit.prompt_len]] = 1
    np.add.at(counts, where[admit.prompt_len :], 2)
    return ids.astype(np.int64), counts
