"""Changes the distributions of all rows at once, without waiting for the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.config import EngineConfig
from quire.ops.reference import random, truncate
from quire.plan import Admit, StepPlan
from quire.runner.hooks import HeadContext, HostHook, Level, ProgramHook
from quire.runner.hooks.sampling import sampling_columns
from quire.runner.readback import Upload, logit_starts
from quire.runner.state import BatchState
from quire.sampling_params import SamplingParams

LONGEST_MATCH = 50
"""Longest repeated sequence that counts, in tokens. Penalties do not grow beyond it."""

_XTC = 17
"""Number of the draw that decides whether top choices are left out. No other draw at a position
uses it."""

_MOST = 1e9

Counter = tuple[Tensor, Tensor, Tensor]
"""seed int32 [K, 2], sample index int32 [K], position int32 [K]."""


def dry_penalty(
    tokens: Tensor,
    lengths: Tensor,
    vocab_size: int,
    *,
    multiplier: Tensor,
    base: Tensor,
    allowed: Tensor,
    last: Tensor,
    breakers: Tensor,
) -> Tensor:
    """Returns the penalty that DRY ("don't repeat yourself") subtracts from the logits.

    If a token would repeat a sequence of the text, let `n` be the length of the longest sequence
    before the token that is also the end of the text. The penalty is multiplier * base ** (n -
    allowed) if `n` is at least `allowed`. A sequence cannot contain a breaker, and breakers have
    no penalty.

    Args:
        tokens: int32 [K, max_len].
        lengths: Number of tokens in each row, int32 [K].
        vocab_size: Tokens of the vocabulary.
        multiplier: float32 [K].
        base: float32 [K].
        allowed: float32 [K].
        last: Number of last tokens to look at, float32 [K]; -1: all.
        breakers: int32 [K, B], padded with -1.

    Returns:
        float32 [K, vocab].
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    end = lengths.long().unsqueeze(1)
    first = torch.where(last < 0, 0, lengths - last).clamp(min=0).long().unsqueeze(1)
    text = (places >= first) & (places < end)
    breaks = _in_rows(tokens, breakers)
    alive = text & ~breaks
    longest = torch.zeros_like(tokens)
    for back in range(1, LONGEST_MATCH + 1):
        earlier = (places - back).clamp(min=0).expand_as(tokens)
        token = tokens.gather(1, earlier)
        ending = tokens.gather(1, (end - back).clamp(min=0))
        alive = alive & (token == ending) & (places - back >= first)
        alive &= ~breaks.gather(1, (end - back).clamp(min=0))
        longest += alive
    matched = longest.float()
    weight = multiplier.unsqueeze(1) * base.unsqueeze(1) ** (matched - allowed.unsqueeze(1))
    weight = torch.where((matched >= allowed.unsqueeze(1)) & (matched > 0), weight, 0.0)
    found = torch.zeros(len(tokens), vocab_size, device=tokens.device)
    own = tokens.long().clamp(0, vocab_size - 1)
    return found.scatter_reduce(1, own, weight.clamp(max=_MOST), "amax", include_self=True)


def _in_rows(tokens: Tensor, breakers: Tensor) -> Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for column in breakers.unbind(1):
        found |= tokens == column.unsqueeze(1)
    return found


def typical_p(logits: Tensor, mass: Tensor) -> Tensor:
    """Keeps the tokens whose surprise is closest to the distribution's entropy, as few as have the
    probability `mass` [K] together. The logits of all others become -inf (Meister et al., 2023,
    "Locally Typical Sampling").

    Args:
        logits: float32 [K, vocab], after temperature.
    """
    logs = logits.log_softmax(dim=-1)
    probs = logs.exp()
    entropy = -(probs * logs).nansum(dim=-1, keepdim=True)
    distance = (-logs - entropy).abs()
    order = distance.sort(dim=-1, stable=True).indices
    reached = probs.double().gather(1, order).cumsum(dim=-1)
    before = reached - probs.double().gather(1, order)
    kept = (before < mass.double().unsqueeze(1)) | (mass >= 1.0).unsqueeze(1)
    kept[:, 0] = True
    return logits.masked_fill(~torch.empty_like(kept).scatter_(1, order, kept), -torch.inf)


def without_top_choices(
    logits: Tensor, counter: Counter, *, probability: Tensor, threshold: Tensor
) -> Tensor:
    """Leaves out the top choices of some rows (XTC, "exclude top choices").

    The top choices are all tokens with a probability of at least `threshold`, except the least
    likely of them. Their logits become -inf.

    Args:
        logits: float32 [K, vocab], after temperature and truncation.
        counter: the row's position in the random sequence that decides whether it is changed.
        probability: probability that a row is changed, [K].
        threshold: [K].
    """
    none = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    # The distribution function of Gumbel noise turns the noise into a uniform number.
    drawn = torch.exp(-torch.exp(-random.gumbel_at(*counter, none, draw=_XTC)))
    probs = logits.softmax(dim=-1)
    choices = probs >= threshold.unsqueeze(1)
    least = torch.where(choices, probs, torch.inf).amin(dim=-1, keepdim=True)
    left_out = choices & (probs > least) & (drawn < probability.unsqueeze(1))
    return logits.masked_fill(left_out, -torch.inf)


_CUTS = {
    "typical_p": typical_p,
    "min_p": truncate.min_p,
}
"""Functions that drop tokens, by the parameter that they use, in the order of their use."""

_NEUTRAL = SamplingParams()
"""Parameters that change nothing."""

# The runner's side: it draws tokens for rows that need more than the captured graphs compute.

logger = logging.getLogger("quire.engine")


@dataclass(slots=True)
class _Rows:
    """The K logit rows of requests with these samplers.

    Attributes:
        place: int64 [K], their places among the step's logit rows.
        lanes: int32 [K].
        lengths: int32 [K], number of tokens.
        params: parameters of each row.
    """

    place: Tensor
    lanes: Tensor
    lengths: Tensor
    params: list[SamplingParams]

    def column(self, name: str) -> Tensor:
        """Returns a parameter of each row, float32 [K]."""
        values = [float(getattr(p, name)) for p in self.params]
        return torch.tensor(values, dtype=torch.float32, device=self.place.device)

    def where(self, wanted: list[bool]) -> Tensor:
        return torch.tensor(wanted, device=self.place.device)


class Samplers(ProgramHook, HostHook):
    """Draws the tokens of rows with DRY, XTC, typical-p or the caller's own functions.

    The heads of their steps run op by op; other steps are not affected. The order is: functions,
    DRY, temperature, typical-p, min-p, top-k and top-p, XTC. The noise is the same as for other
    rows. So a seed gives the same token if no token is left out. For a row after drafts, the drafts
    count as text.
    """

    draws = True

    def bind(self, state: BatchState) -> None:
        self._state = state
        self._columns = sampling_columns(state)
        self._admits: dict[int, Admit] = {}
        self._plan: StepPlan | None = None

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        self._plan = plan
        for admit in plan.admits:
            if admit.params.reshapes:
                self._admits[admit.lane] = admit
            else:
                self._admits.pop(admit.lane, None)

    def lane_level(self, admit: Admit) -> Level:
        return Level.UNCAPTURED if admit.params.reshapes else Level.PLAIN

    def logits(self, ctx: HeadContext) -> None:
        if ctx.level < Level.UNCAPTURED or self._plan is None:
            return
        rows = self._rows(self._plan, ctx)
        if rows is None:
            return
        own = ctx.own_logits()
        x = own[rows.place].float()
        x = self._with_functions(x, rows)
        x = self._without_repeats(x, rows)
        ctx.logits = own.float() if own.dtype != torch.float32 else own
        ctx.logits[rows.place] = self._drawn(x, rows)

    def _rows(self, plan: StepPlan, ctx: HeadContext) -> _Rows | None:
        starts = logit_starts(plan)
        lanes = np.repeat(plan.lanes, np.diff(starts))
        places = [place for place, lane in enumerate(lanes.tolist()) if lane in self._admits]
        if not places:
            return None
        place = torch.tensor(places, device=ctx.logits.device)
        found = [int(lanes[each]) for each in places]
        return _Rows(
            place,
            torch.tensor(found, dtype=torch.int32, device=place.device),
            ctx.logit_rows.lengths[place],
            [self._admits[lane].params for lane in found],
        )

    def _with_functions(self, x: Tensor, rows: _Rows) -> Tensor:
        """Applies the caller's functions. If a function fails, its row becomes NaN, which ends the
        request."""
        if not any(params.logits_processors for params in rows.params):
            return x
        lengths, x = rows.lengths.tolist(), x.clone()
        for place, params in enumerate(rows.params):
            if not params.logits_processors:
                continue
            lane = int(rows.lanes[place])
            begin = self._admits[lane].prompt_len
            said = self._state.tokens[lane, begin : lengths[place]].tolist()
            try:
                row = x[place]
                for function in params.logits_processors:
                    row = function(said, row)
                x[place] = row
            except Exception:
                logger.exception("a logits processor failed")
                x[place] = torch.nan
        return x

    def _without_repeats(self, x: Tensor, rows: _Rows) -> Tensor:
        if not any(params.dry_multiplier for params in rows.params):
            return x
        breakers = torch.full((len(x), 1 + _most_breakers(rows)), -1, dtype=torch.int32)
        for place, params in enumerate(rows.params):
            ids = params.dry_breaker_ids
            breakers[place, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return x - dry_penalty(
            self._state.tokens[rows.lanes.long()],
            rows.lengths,
            x.shape[1],
            multiplier=rows.column("dry_multiplier"),
            base=rows.column("dry_base"),
            allowed=rows.column("dry_allowed_length"),
            last=rows.column("dry_penalty_last_n"),
            breakers=breakers.to(x.device),
        )

    def _drawn(self, x: Tensor, rows: _Rows) -> Tensor:
        """Returns logits that leave only one token of each row. For rows with a temperature it is
        drawn at random."""
        random = rows.where([not params.greedy for params in rows.params])
        temperature = rows.column("temperature").clamp(min=1e-9).unsqueeze(1)
        kept = self._kept(x / torch.where(random.unsqueeze(1), temperature, 1.0), rows)
        masked = torch.where(random.unsqueeze(1), x.masked_fill(~kept, -torch.inf), x)
        # No truncation here, because the tokens to drop are already -inf.
        tokens = ops.sample(
            masked,
            rows.lanes,
            rows.lengths,
            **self._columns,
            truncate_rows=False,
        )
        only = torch.full_like(x, -torch.inf)
        only.scatter_(1, tokens.long().clamp(min=0).unsqueeze(1), 0.0)
        # Rows with NaN get no token, which ends their requests.
        return torch.where((tokens >= 0).unsqueeze(1), only, x)

    def _kept(self, x: Tensor, rows: _Rows) -> Tensor:
        """Tells which tokens may be drawn, bool [K, vocab]. x: after temperature."""
        for name, cut in _CUTS.items():
            neutral = getattr(_NEUTRAL, name)
            if any(getattr(params, name) != neutral for params in rows.params):
                x = cut(x, rows.column(name))
        top_k, top_p = rows.column("top_k").clamp(min=0), rows.column("top_p")
        if any(params.top_k > 0 or params.top_p < 1.0 for params in rows.params):
            x = truncate.top_k_top_p(x, top_k.int(), top_p)
        if any(params.xtc_probability for params in rows.params):
            own, columns = rows.lanes.long(), self._columns
            x = without_top_choices(
                x,
                (columns["seed"][own], columns["sample_index"][own], rows.lengths),
                probability=rows.column("xtc_probability"),
                threshold=rows.column("xtc_threshold"),
            )
        return x != -torch.inf


def _most_breakers(rows: _Rows) -> int:
    return max(len(params.dry_breaker_ids) for params in rows.params)


def open_hook(config: EngineConfig) -> Samplers:
    """Returns the hook for a worker."""
    return Samplers()
