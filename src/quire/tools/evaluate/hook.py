"""A hook that scores a prompt's own tokens, and compares them with a second model's scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.models import Decoder
from quire.runner.hooks import HostHook
from quire.runner.readback import Step
from quire.tools.evaluate.text import Window

_SLICE = 256
"""Logit rows that are computed at once, because all logits of a window would take much memory."""


class Base:
    """The last hidden states of a model, [scored tokens, width] on the host, and the model's head.

    A hidden state is about a hundred times smaller than its logits. So the states are kept for the
    comparison with another model, and the model's layers are freed.
    """

    def __init__(self, model: Decoder, states: Tensor) -> None:
        model.layers = torch.nn.ModuleList()
        self._model = model
        self._states = states

    def logits(self, places: slice) -> Tensor:
        """Returns the logits [n, vocab] of the states at `places`."""
        return self._model.logits(self._states[places].to(self._model.device))


class TokenScores(HostHook):
    """Scores the tokens of windows. A request's id is the index of its window.

    Attributes:
        nats: float32 [scored tokens], each token's negative log-probability.
        divergence: float32 [scored tokens], the Kullback-Leibler divergence of each token's
            distribution from the base's; None without a base.
        states: the hidden states of the scored tokens on the host, or None if they are not kept.
    """

    def __init__(self, windows: Sequence[Window], base: Base | None, *, keep: bool) -> None:
        self._windows = windows
        self._base = base
        self._keep = keep
        self._at: dict[int, tuple[int, int]] = {}

    def attach(self, model: Decoder) -> None:
        """Sets the model that computes the hidden states."""
        count = sum(window.counted for window in self._windows)
        self._model = model
        self.nats = torch.full((count,), torch.nan, device=model.device)
        self.divergence = None if self._base is None else torch.full_like(self.nats, torch.nan)
        self.states: Tensor | None = None
        if self._keep:
            self.states = torch.empty(count, model.spec.hidden_size, dtype=model.dtype)

    def hidden(self, step: Step, hidden: Tensor) -> None:
        plan = step.plan
        for admit in plan.admits:
            number = int(admit.request_id.rpartition("/")[0])
            self._at[admit.lane] = number, admit.computed
        start = 0
        for lane, length in zip(plan.lanes.tolist(), plan.q_len.tolist(), strict=True):
            number, at = self._at[lane]
            window = self._windows[number]
            # The logits of a window's last token predict a token outside of it.
            low = max(at, window.first - 1)
            high = min(at + length, len(window.tokens) - 1)
            if low < high:
                self._score(hidden[start + low - at : start + high - at], window, low)
            self._at[lane] = number, at + length
            start += length

    def _score(self, states: Tensor, window: Window, low: int) -> None:
        """Scores the successors of a window's tokens from token `low` on."""
        targets = torch.from_numpy(window.tokens[low + 1 : low + 1 + len(states)].copy())
        targets = targets.to(states.device, torch.int64)
        place = window.place + low + 1 - window.first
        if self.states is not None:
            self.states[place : place + len(states)].copy_(states)
        bounds = [*range(0, len(states), _SLICE), len(states)]
        for begin, end in itertools.pairwise(bounds):
            scores = self._model.logits(states[begin:end]).float().log_softmax(-1)
            own = slice(place + begin, place + end)
            self.nats[own] = -scores.gather(1, targets[begin:end, None]).squeeze(1)
            if self._base is not None and self.divergence is not None:
                base = self._base.logits(own).float().log_softmax(-1)
                self.divergence[own] = (base.exp() * (base - scores)).sum(-1)
