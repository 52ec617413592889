"""What changes logits before a token is drawn: penalties, biases, and ends that come too early."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.plan import Admit
from quire.runner.batch_state import BatchState, ColumnSpec
from quire.runner.staging import Array, Upload
from quire.sampling_params import MAX_BIAS_ENTRIES


class Adjustments:
    """Columns of every lane, brought up to date for the lanes that use them.

    counts: int32 [lanes, vocab], twice the times a token was generated, plus one if the prompt has
    it. Rebuilt from an admission's tokens, so that preemption need not save them.
    num_bias: int32 [lanes]; bias_ids int32 and bias_values float32 [lanes, MAX_BIAS_ENTRIES], of
    which that many hold.
    """

    def __init__(self, state: BatchState, vocab_size: int) -> None:
        self.state = state
        self.counts = state.add(ColumnSpec("token_counts", (vocab_size,)))
        self.num_bias = state.add(ColumnSpec("num_bias"))
        self.bias_ids = state.add(ColumnSpec("bias_ids", (MAX_BIAS_ENTRIES,), fill=-1))
        self.bias_values = state.add(ColumnSpec("bias_values", (MAX_BIAS_ENTRIES,), torch.float32))

    # -- parameters ----------------------------------------------------------------------------

    def stage(self, admits: Sequence[Admit], upload: Upload) -> None:
        lanes = int32([admit.lane for admit in admits])
        upload.put(self.num_bias, lanes, int32([len(a.params.logit_bias or ()) for a in admits]))
        for admit in admits:
            if admit.params.logit_bias:
                places = admit.lane * MAX_BIAS_ENTRIES + np.arange(len(admit.params.logit_bias))
                upload.put(self.bias_ids, places, int32(list(admit.params.logit_bias)))
                values = np.asarray(list(admit.params.logit_bias.values()), dtype=np.float32)
                upload.put(self.bias_values, places, values)
            if admit.params.penalizes:
                # Before the upload's writes, on the same stream.
                self.counts[admit.lane].zero_()
                ids, counts = _counted(admit)
                upload.put(self.counts, admit.lane * self.counts.shape[1] + ids, counts)

    # -- logits, op by op ----------------------------------------------------------------------

    def penalize(self, logits: Tensor, rows: Tensor, lanes: Tensor, floats: Tensor) -> None:
        """logits float32 [N, V], changed in place; of its `rows` int64 [n] with their lanes int64
        [n] and repetition, presence and frequency penalties float32 [n, 3]."""
        counts = self.counts.index_select(0, lanes)
        repetition, presence, frequency = floats.unsqueeze(-1).unbind(1)
        x = logits[rows]
        x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        generated = counts >> 1
        logits[rows] = x - presence * (generated > 0) - frequency * generated

    def add_bias(self, logits: Tensor, rows: Tensor, lanes: Tensor) -> None:
        """In place, for `rows` int64 [n] of lanes int64 [n]."""
        ids = self.bias_ids[lanes]
        entry = torch.arange(ids.shape[1], device=ids.device)
        # Places behind the last add nothing to token 0.
        held = entry < self.num_bias[lanes].unsqueeze(1)
        values = torch.where(held, self.bias_values[lanes], 0.0)
        logits[rows] = logits[rows].scatter_add(1, torch.where(held, ids, 0).long(), values)

    def mask_ends(self, logits: Tensor, lanes: Tensor, length: Tensor, stops: Tensor) -> None:
        """In place: rows with fewer tokens, `length` int32 [N], than they must have cannot get one
        of their `stops` int32 [lanes, S]."""
        early = (length < self.state.min_total[lanes]).unsqueeze(1)
        ids = stops[lanes]
        # -1 marks unused places: those add nothing to token 0.
        penalty = torch.where((ids >= 0) & early, -torch.inf, 0.0)
        logits.scatter_add_(1, ids.clamp(min=0).long(), penalty)

    def count(self, lanes: Tensor, tokens: Tensor) -> None:
        """One more of `tokens` [n] for each of `lanes` int64 [n], which differ."""
        place = lanes, tokens.long()
        self.counts[place] = self.counts[place] + 2


def _counted(admit: Admit) -> tuple[Array, Int32]:
    """The distinct tokens of a request, and their entries in `Adjustments.counts`."""
    ids, where = np.unique(admit.tokens, return_inverse=True)
    counts = np.zeros(len(ids), dtype=np.int32)
    counts[where[: admit.prompt_len]] = 1
    np.add.at(counts, where[admit.prompt_len :], 2)
    return ids.astype(np.int64), counts
