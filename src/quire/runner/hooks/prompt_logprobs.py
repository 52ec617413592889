"""Log-probabilities of a prompt's own tokens: a program of its own, run in slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32, int32
from quire.config import EngineArgs
from quire.models import Decoder
from quire.plan import RowFlag, StepPlan
from quire.runner.hooks.hook import HostHook, ProgramHook
from quire.runner.hooks.logprobs import WIDTH, unpack
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec

SLICE = 256
"""Most logit rows at a time, so that a matrix of vocabulary x prompt is never allocated."""


class PromptLogprobs(ProgramHook, HostHook):
    """Computes the log-probabilities of prompts, by a program of its own.

    The program reads hidden states [slice, width] and places, int32 [3, slice]: the lane (or -1),
    the place of the hidden state in the step, and the number of the row's tokens that follow.

    Columns:
        num_prompt_logprobs: int32 [lanes], number of alternatives to return; -1 for no logprobs.

    Attributes:
        name: the parameter that asks for the hook.
    """

    name = "prompt_logprobs"

    @classmethod
    def rare_columns(cls) -> Sequence[ColumnSpec]:
        """Returns columns that the batch state has before the first request needs the hook."""
        return (ColumnSpec(f"num_{cls.name}", fill=-1),)

    @classmethod
    def made_for(cls, args: EngineArgs) -> Self:
        """Returns the hook for an engine's settings."""
        return cls()

    def __init__(self) -> None:
        self._replay: Callable[[], None] | None = None

    def attach(self, model: Decoder) -> None:
        self._model = model

    def bind(self, state: BatchState) -> None:
        self._state = state
        self._column = state.columns["num_prompt_logprobs"]
        self._alternatives = np.full(state.limits.lanes, -1, dtype=np.int32)
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
            alternatives = [a.params.prompt_logprobs for a in admits]
            self._alternatives[lanes] = [-1 if count is None else count for count in alternatives]
            upload.put_lines(self._column, lanes, self._alternatives[lanes])
        self._uploaded = None
        if (self._alternatives[plan.lanes] >= 0).any():
            rows, tokens, following = _chosen(plan, self._alternatives)
            if len(rows):
                places = np.stack([plan.lanes[rows], tokens, following])
                self._uploaded = upload, upload.add(int32(places))

    def programs(self) -> Mapping[str, Callable[[], None]]:
        return {"prompt_logprobs": lambda: self._run(self._size)}

    def capture(self, programs: Mapping[str, Callable[[], None]]) -> None:
        self._replay = programs["prompt_logprobs"]

    def _run(self, count: int) -> None:
        lanes, places, following = self._places[:, :count]
        state = self._state
        own = lanes.clamp(min=0).long()
        # The body has advanced the lane past all tokens of the row. So a token's position is the
        # lane's position less the number of tokens that follow.
        lengths = state.position[own] - following
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
        step.notes["prompt_logprobs"] = self._alternatives[step.plan.lanes]

    def read(self, step: Step) -> None:
        alternatives = step.notes.get("prompt_logprobs")
        if alternatives is None:
            return
        parts: list[Int32] = []
        while (part := step.arrived(f"prompt_logprobs.{len(parts)}")) is not None:
            parts.append(part.numpy())
        rows = _rows(step.plan, alternatives)
        step.result.prompt_logprobs = unpack(np.concatenate(parts), rows, alternatives[rows])


def _chosen(plan: StepPlan, alternatives: Int32) -> tuple[Int32, Int32, Int32]:
    """Returns the tokens whose successors in the prompt need log-probabilities.

    Returns three arrays, int32 [n]: their rows, their places in the step, and the number of tokens
    that follow each in its row.

    Args:
        alternatives: number of alternatives by lane, or -1.
    """
    rows = _rows(plan, alternatives[plan.lanes])
    ends = np.cumsum(plan.q_len)
    first = np.searchsorted(rows, rows)
    place = np.arange(len(rows)) - first
    following = plan.n_logits[rows] - 1 - place
    return rows, int32(ends[rows] - 1 - following), int32(following)


def _rows(plan: StepPlan, alternatives: Int32) -> Int32:
    """Returns the row of each token of `_chosen`.

    Args:
        alternatives: number of alternatives by row, or -1.
    """
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    # The successor of a prompt's last token is sampled, so it is not part of the prompt.
    counts = np.where(prompt & (alternatives >= 0), plan.n_logits - samples, 0)
    return int32(np.repeat(np.arange(plan.num_rows), counts))
