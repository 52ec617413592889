"""The head of a step, op by op, where no graph does: on a CPU, and for what few requests want."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32
from quire.errors import QuireError
from quire.models import Decoder
from quire.plan import RowFlag
from quire.runner.batch_state import BatchState
from quire.runner.hook import Hook
from quire.runner.sampling import Sampler
from quire.runner.sampling.logprobs import token_logprobs
from quire.runner.step import DeviceLogprobs, Step, row_mask_lines

HEAD_ELEMENTS = 1 << 26
"""Logits computed at once for a prompt's log-probabilities."""


def index_on(device: torch.device, places: Int32) -> Tensor:
    """int64, without a wait for the device."""
    index = torch.from_numpy(places.astype(np.int64))
    if device.type == "cuda":
        return index.pin_memory().to(device, non_blocking=True)
    return index


def sampled_logprobs(
    step: Step, rows: Int32, raw: Tensor, tokens: Tensor, length: Tensor, wanted: Int32
) -> None:
    """Of `rows` that all asked, with their logits [n, V], tokens and lengths [n]."""
    ids, values, ranks = token_logprobs(raw, tokens, int(wanted.max()))
    part = DeviceLogprobs(rows, wanted, length.int(), ids, values, ranks)
    step.logprobs.append(part)


class EagerHead:
    """Logits, masks, hooks, sampling and log-probabilities of one runner's steps."""

    def __init__(
        self, model: Decoder, state: BatchState, sampler: Sampler, hooks: Sequence[Hook]
    ) -> None:
        self.model = model
        self.state = state
        self.sampler = sampler
        self.hooks = hooks
        self.device = state.device

    def run(self, step: Step, masks: Tensor | None) -> None:
        """The head of all rows; a step may have none. masks: int32 [gated rows, words]."""
        plan = step.plan
        step.results = torch.zeros(2, plan.num_rows, dtype=torch.int32, device=self.device)
        step.tokens.fill_(-1)
        if not plan.num_rows:
            return
        for hook in self.hooks:
            hook.after_body(step)
        self._prompt_head(step)
        self._head(step, step.sampled_rows, masks)
        # Rows in mid-prompt only move on; the others do so with their token.
        silent = np.flatnonzero((plan.flags & RowFlag.SAMPLE) == 0).astype(np.int32)
        if len(silent):
            self.state.advance(step, silent, None)

    def _head(self, step: Step, rows: Int32, masks: Tensor | None) -> None:
        """Samples `rows`, int32 on the host, and moves their lanes on."""
        if not len(rows):
            return
        places = step.logit_rows.token[step.logit_rows.last[rows]]
        logits = self._logits(step, places)
        where = index_on(self.device, rows)
        host_lanes = step.plan.lanes[rows]
        lanes, length = step.lanes[where], step.position[where]
        wanted = self.sampler.logprobs[host_lanes]
        raw = logits.clone() if (wanted >= 0).any() else None
        if masks is not None:
            lines = row_mask_lines(step.plan)[rows]
            ops.mask_logits(logits, masks, index_on(self.device, lines).int())
        for hook in self.hooks:
            logits = hook.head(step, logits, where)
        tokens = self.sampler.sample(logits, lanes, host_lanes, length)
        step.tokens[where] = tokens
        step.stop_reason[where] = self.sampler.stop_reason(tokens, lanes, host_lanes, length)
        self.state.advance(step, rows, tokens)
        if raw is not None:
            asked = np.flatnonzero(wanted >= 0).astype(np.int32)
            pick = index_on(self.device, asked)
            sampled_logprobs(
                step, rows[asked], raw[pick], tokens[pick], length[pick], wanted[asked]
            )
        for hook in self.hooks:
            hook.after_head(step, where, tokens)

    def _prompt_head(self, step: Step) -> None:
        """Log-probabilities of the prompt's own tokens, a slice of logit rows at a time, so that
        vocabulary x prompt is never allocated."""
        plan, logit_rows = step.plan, step.logit_rows
        wanted = self.sampler.prompt_logprobs[plan.lanes]
        row = logit_rows.row
        prompt = (plan.flags[row] & RowFlag.PROMPT) != 0
        samples = (plan.flags[row] & RowFlag.SAMPLE) != 0
        is_last = np.zeros(len(row), dtype=bool)
        is_last[logit_rows.last[plan.n_logits > 0]] = True
        chosen = np.flatnonzero(prompt & (wanted[row] >= 0) & ~(samples & is_last))
        chunk = max(1, HEAD_ELEMENTS // self.model.spec.vocab_size)
        for start in range(0, len(chosen), chunk):
            part = chosen[start : start + chunk]
            self._prompt_logprobs(step, row[part], logit_rows.token[part], wanted[row[part]])

    def _prompt_logprobs(self, step: Step, row: Int32, token: Int32, wanted: Int32) -> None:
        logits = self._logits(step, token)
        lanes = step.lanes[index_on(self.device, row)]
        position = step.batch.positions[index_on(self.device, token)] + 1
        targets = self.state.tokens[lanes, position.long()]
        ids, values, ranks = token_logprobs(logits, targets, int(wanted.max()))
        part = DeviceLogprobs(row, wanted, position.int(), ids, values, ranks)
        step.prompt_logprobs.append(part)

    def _logits(self, step: Step, tokens: Int32) -> Tensor:
        """float32 [n, vocab] of the hidden states at places `tokens` of the batch."""
        if step.hidden is None:
            raise QuireError("the head runs after the body")
        return self.model.logits(step.hidden[index_on(self.device, tokens)])
