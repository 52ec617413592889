"""Log-probabilities of a prompt's own tokens: a program of its own, run in slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32, int32
from quire.models import Decoder
from quire.plan import RowFlag, StepPlan
from quire.runner.hooks.hook import Hook
from quire.runner.hooks.logprobs import WIDTH, unpack
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState

SLICE = 256
"""Logit rows at a time, so that vocabulary x prompt is never allocated."""


class PromptLogprobs(Hook):
    """Fills in num_prompt_logprobs, int32 [lanes]: alternatives asked for, -1: nothing.

    Its program reads places: int32 [3, slice], lanes (-1: none), places of hidden states, and how
    many tokens of the row follow; and states [slice, width].
    """

    def __init__(self) -> None:
        self._replay: Callable[[], None] | None = None

    def attach(self, model: Decoder) -> None:
        self._model = model

    def bind(self, state: BatchState) -> None:
        self._state = state
        self._column = state.columns["num_prompt_logprobs"]
        self._wanted = np.full(state.limits.lanes, -1, dtype=np.int32)
        self._size = size = min(SLICE, state.limits.tokens)
        model, device = self._model, state.device
        self._places = torch.full((3, size), -1, dtype=torch.int32, device=device)
        self._states = torch.zeros(size, model.spec.hidden_size, dtype=model.dtype, device=device)
        self._lines = torch.empty(size, WIDTH, dtype=torch.int32, device=device)
        self._uploaded: tuple[Upload, int] | None = None

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if admits:
            lanes = int32([admit.lane for admit in admits])
            wanted = [a.params.prompt_logprobs for a in admits]
            self._wanted[lanes] = [-1 if count is None else count for count in wanted]
            upload.put_lines(self._column, lanes, self._wanted[lanes])
        self._uploaded = None
        if (self._wanted[plan.lanes] >= 0).any():
            rows, tokens, behind = _chosen(plan, self._wanted)
            if len(rows):
                places = np.stack([plan.lanes[rows], tokens, behind])
                self._uploaded = upload, upload.add(int32(places))

    def programs(self) -> Mapping[str, Callable[[], None]]:
        return {"prompt_logprobs": lambda: self._run(self._size)}

    def capture(self, programs: Mapping[str, Callable[[], None]]) -> None:
        self._replay = programs["prompt_logprobs"]

    def _run(self, count: int) -> None:
        lanes, places, behind = self._places[:, :count]
        state = self._state
        own = lanes.clamp(min=0).long()
        # The body has moved the rows on: behind each token come those of its row that follow.
        lengths = state.position[own] - behind
        targets = state.tokens[own, lengths.clamp(min=0).long()]
        logits = self._model.logits(self._states[:count])
        rows = ops.LogitRows(lanes, places, lengths.int(), torch.zeros_like(lanes))
        ops.token_logprobs(logits, rows, targets, self._column, self._lines[:count])

    def hidden(self, step: Step, hidden: Tensor) -> None:
        if self._uploaded is None:
            return
        upload, key = self._uploaded
        places = upload[key].view(3, -1)
        total = places.shape[1]
        for number, start in enumerate(range(0, total, self._size)):
            part = places[:, start : start + self._size]
            count = part.shape[1]
            self._places[:, :count].copy_(part)
            self._places[0, count:].fill_(-1)
            self._states[:count].copy_(hidden[part[1].long()])
            if self._replay is None:
                self._run(count)
            else:
                self._replay()
            step.send(f"prompt_logprobs.{number}", self._lines[:count])
        step.notes["prompt_logprobs"] = self._wanted[step.plan.lanes]

    def read(self, step: Step) -> None:
        wanted = step.notes.get("prompt_logprobs")
        if wanted is None:
            return
        parts: list[Int32] = []
        while (part := step.arrived(f"prompt_logprobs.{len(parts)}")) is not None:
            parts.append(part.numpy())
        rows = _rows(step.plan, wanted)
        step.result.prompt_logprobs = unpack(np.concatenate(parts), rows, wanted[rows])


def _chosen(plan: StepPlan, wanted: Int32) -> tuple[Int32, Int32, Int32]:
    """Returns the tokens whose successors in the prompt are asked about, int32 [n] each: their
    rows, their places in the step, and how many tokens of the row follow. wanted: per lane."""
    rows = _rows(plan, wanted[plan.lanes])
    ends = np.cumsum(plan.q_len)
    first = np.searchsorted(rows, rows)
    place = np.arange(len(rows)) - first
    behind = plan.n_logits[rows] - 1 - place
    return rows, int32(ends[rows] - 1 - behind), int32(behind)


def _rows(plan: StepPlan, wanted: Int32) -> Int32:
    """Returns the row of each such token. wanted: per row, -1: nothing."""
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    # Behind a prompt's last token comes what is sampled.
    counts = np.where(prompt & (wanted >= 0), plan.n_logits - samples, 0)
    return int32(np.repeat(np.arange(plan.num_rows), counts))
