"""The sampler: per-lane parameters on the device, and the stages a batch's rows need.

The order is vLLM's: penalties, bias, mask of ends that come too early, temperature, min-p, top-k,
top-p. A stage that no row of a batch uses is skipped; the host knows from the parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.plan import Admit, StepPlan, StopReason
from quire.runner.batch_state import BatchState, ColumnSpec
from quire.runner.sampling import random, truncate
from quire.runner.sampling.adjust import Adjustments
from quire.runner.staging import Upload
from quire.sampling_params import SamplingParams

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTS = ("top_k", "seed_low", "seed_high", "sample_index")
_STAGES = ("random", "penalty", "bias", "truncate", "min_p", "min_tokens", "stops")
_MORE = [_STAGES.index(name) for name in ("penalty", "bias", "min_tokens")]
_CUTS = [_STAGES.index(name) for name in ("truncate", "min_p")]


class HeadKind(enum.IntEnum):
    """What a captured head can do; each includes those before it.

    TRUNCATE: top-k, top-p and min-p. ADJUST: penalties, biases and minimum lengths; keeps the
    logits, for log-probabilities.
    """

    PLAIN = 0
    TRUNCATE = 1
    ADJUST = 2


class Sampler:
    """Samples a token for each of a step's rows.

    Logits are float32 [N, V]; `rows` are places of the plan's rows, on the host.
    """

    def __init__(self, state: BatchState, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.state = state
        self.vocab_size = vocab_size
        self.eos = tuple(eos_token_ids)
        self.floats = state.add(ColumnSpec("floats", (len(_FLOATS),), torch.float32))
        self.ints = state.add(ColumnSpec("ints", (len(_INTS),)))
        self.stops = state.add(ColumnSpec("stops", (max(8, len(self.eos)),), fill=-1))
        self.adjust = Adjustments(state, vocab_size)
        # What each lane uses, for skipping stages; and how many alternatives it asked for, or -1.
        self.uses = np.zeros((state.num_lanes, len(_STAGES)), dtype=bool)
        self.logprobs = np.full(state.num_lanes, -1, dtype=np.int32)
        self.prompt_logprobs = np.full(state.num_lanes, -1, dtype=np.int32)

    # -- parameters ----------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        """Adds the parameters of admitted requests to the upload."""
        admits = plan.admits
        if not admits:
            return
        stops = [self._stop_ids(admit.params) for admit in admits]
        self._widen(max(len(ids) for ids in stops))
        width = self.stops.shape[1]
        lanes = int32([admit.lane for admit in admits])
        floats = np.asarray([_floats(a.params) for a in admits], dtype=np.float32)
        self.state.put(upload, self.floats, lanes, floats)
        self.state.put(upload, self.ints, lanes, int32([_ints(admit) for admit in admits]))
        ends = int32([ids + [-1] * (width - len(ids)) for ids in stops])
        self.state.put(upload, self.stops, lanes, ends)
        self.adjust.stage(admits, upload)
        for admit, ids in zip(admits, stops, strict=True):
            self._note(admit, bool(ids))

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        eos = () if params.ignore_eos else self.eos
        return sorted({*eos, *params.stop_token_ids})

    def _widen(self, width: int) -> None:
        have = self.stops.shape[1]
        if width > have:
            grown = 1 << (width - 1).bit_length()
            self.stops = torch.nn.functional.pad(self.stops, (0, grown - have), value=-1)

    def _note(self, admit: Admit, stops: bool) -> None:
        p = admit.params
        self.uses[admit.lane] = (
            not p.greedy,
            p.penalizes,
            bool(p.logit_bias),
            (p.top_k > 0 or p.top_p < 1.0) and not p.greedy,
            p.min_p > 0.0 and not p.greedy,
            p.min_tokens > 0,
            stops,
        )
        self.logprobs[admit.lane] = -1 if p.logprobs is None else p.logprobs
        self.prompt_logprobs[admit.lane] = -1 if p.prompt_logprobs is None else p.prompt_logprobs

    def head_kind(self, lanes: Int32) -> HeadKind:
        """What a head must be able to do for rows of these lanes."""
        uses = self.uses[lanes]
        if uses[:, _MORE].any() or (self.logprobs[lanes] >= 0).any():
            return HeadKind.ADJUST
        return HeadKind.TRUNCATE if uses[:, _CUTS].any() else HeadKind.PLAIN

    # -- sampling ------------------------------------------------------------------------------

    def sample(self, logits: Tensor, lanes: Tensor, host_lanes: Int32, length: Tensor) -> Tensor:
        """A token for each row, int32 [N].

        lanes: int64 [N], on the device; `host_lanes` the same on the host. length: int32 [N], the
        tokens each lane has so far, which is the new token's position. `logits` may be changed.
        """
        uses = self.uses[host_lanes]
        stage = {name: bool(uses[:, i].any()) for i, name in enumerate(_STAGES)}
        penalized = self._users("penalty", host_lanes)
        if stage["penalty"]:
            own = lanes[penalized]
            self.adjust.penalize(logits, penalized, own, self.floats[own, 3:6])
        if stage["bias"]:
            biased = self._users("bias", host_lanes)
            self.adjust.add_bias(logits, biased, lanes[biased])
        if stage["min_tokens"]:
            self.adjust.mask_ends(logits, lanes, length, self.stops)
        greedy = logits.argmax(dim=-1)
        if stage["random"]:
            rows = np.flatnonzero(uses[:, 0])
            picked = self._draw(logits, lanes, length, rows, uses)
            greedy[_device(rows, logits.device)] = picked
        tokens = greedy.int()
        if stage["penalty"]:
            self.adjust.count(lanes[penalized], tokens[penalized])
        return tokens

    def _users(self, stage: str, host_lanes: Int32) -> Tensor:
        """Rows that use a stage, int64 [n]."""
        rows = np.flatnonzero(self.uses[host_lanes, _STAGES.index(stage)])
        return _device(rows, self.state.device)

    def _draw(
        self,
        logits: Tensor,
        lanes: Tensor,
        length: Tensor,
        rows: np.ndarray[Any, Any],
        uses: np.ndarray[Any, Any],
    ) -> Tensor:
        """Tokens int64 of `rows`, which are not greedy; `uses` [n, stages] of all N."""
        if len(rows) < len(logits):
            pick = _device(rows, logits.device)
            logits, lanes, length = logits[pick], lanes[pick], length[pick]
            uses = uses[rows]
        floats, ints = self.floats[lanes], self.ints[lanes]
        logits = logits / floats[:, 0:1]
        if uses[:, _STAGES.index("min_p")].any():
            logits = truncate.min_p(logits, floats[:, 2])
        counter = ints[:, 1:3], ints[:, 3], length
        cut = uses[:, _STAGES.index("truncate")]
        top_k, top_p = ints[:, 0], floats[:, 1]
        if not cut.any():
            return _perturbed(logits, counter)
        if logits.device.type != "cpu":
            # Looking at less than the whole would need the host to wait for what was found.
            return _perturbed(truncate.top_k_top_p(logits, top_k, top_p), counter)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        some, others = (torch.from_numpy(np.flatnonzero(x)) for x in (cut, ~cut))
        own = _select(counter, some)
        tokens[some], sure = truncate.pick_likely(
            logits[some], top_k[some], top_p[some], lambda entries: random.gumbel_at(*own, entries)
        )
        wide = some[~sure]
        if len(wide):
            kept = truncate.top_k_top_p(logits[wide], top_k[wide], top_p[wide])
            tokens[wide] = _perturbed(kept, _select(counter, wide))
        if len(others):
            tokens[others] = _perturbed(logits[others], _select(counter, others))
        return tokens

    # -- ends ----------------------------------------------------------------------------------

    def stop_reason(
        self, tokens: Tensor, lanes: Tensor, host_lanes: Int32, length: Tensor
    ) -> Tensor:
        """A `StopReason` for each row, int32 [N]; `length` as for `sample`."""
        state = self.state
        total = length + 1
        reason = (total >= state.max_total[lanes]).int() * int(StopReason.LENGTH)
        if self.uses[host_lanes, _STAGES.index("stops")].any():
            hit = (self.stops[lanes] == tokens.unsqueeze(1)).any(dim=1)
            hit &= total > state.min_total[lanes]
            reason = torch.where(hit, int(StopReason.STOP_TOKEN), reason)
        return reason.int()


Counter = tuple[Tensor, Tensor, Tensor]
"""seed int32 [N, 2], sample index int32 [N], position int32 [N]."""


def _select(counter: Counter, rows: Tensor) -> Counter:
    seed, index, position = counter
    return seed[rows], index[rows], position[rows]


def _perturbed(logits: Tensor, counter: Counter) -> Tensor:
    """The place of each row's largest logit plus noise, int64 [N]."""
    return random.gumbel(*counter, logits.shape[-1]).add_(logits).argmax(dim=-1)


def _floats(p: SamplingParams) -> tuple[float, ...]:
    return (
        p.temperature,
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
    )


def _ints(admit: Admit) -> tuple[int, ...]:
    seed = admit.seed & 0xFFFFFFFFFFFFFFFF
    low, high = _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)
    return max(0, admit.params.top_k), low, high, admit.sample_index


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _device(x: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
