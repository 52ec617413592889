"""The runner's side: logits of rows that ask for more than graphs hold, to tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.config import EngineConfig
from quire.ops.reference import truncate
from quire.plan import Admit, StepPlan
from quire.runner import Hook
from quire.runner.hooks import Level
from quire.runner.hooks.hook import HeadContext
from quire.runner.readback import logit_starts
from quire.runner.state import BatchState
from quire.runner.upload import Upload
from quire.samplers.distributions import dry_penalty, typical_p, without_top_choices
from quire.sampling_params import SamplingParams

logger = logging.getLogger("quire.engine")


@dataclass(slots=True)
class _Rows:
    """The logit rows of requests that have samplers: K of them.

    place: int64 [K], where they are. lanes, lengths: int32 [K]. params: of each.
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


class Samplers(Hook):
    """Draws the tokens of rows with DRY, XTC, typical-p or functions of the caller's.

    Their steps' heads run op by op; others have nothing to do with it. The order is: functions,
    DRY, temperature, typical-p, min-p, top-k and top-p, XTC. The noise is that of other rows, so
    that a seed gives the same token where nothing is left out. Drafts ahead of a row are text.
    """

    draws = True

    def bind(self, state: BatchState) -> None:
        self._state = state
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
        """Applies functions of the caller's. A row whose function fails becomes NaN, which ends its
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
        """Returns logits that leave one token: the drawn one of rows with a temperature."""
        random = rows.where([not params.greedy for params in rows.params])
        temperature = rows.column("temperature").clamp(min=1e-9).unsqueeze(1)
        kept = self._kept(x / torch.where(random.unsqueeze(1), temperature, 1.0), rows)
        masked = torch.where(random.unsqueeze(1), x.masked_fill(~kept, -torch.inf), x)
        floats, ints = (self._state.columns[f"sampling_{kind}"] for kind in ("floats", "ints"))
        # What is cut off is cut off already.
        tokens = ops.sample(
            masked,
            rows.lanes,
            rows.lengths,
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0],
            seed=ints[:, 1:3],
            sample_index=ints[:, 3],
            truncate_rows=False,
        )
        only = torch.full_like(x, -torch.inf)
        only.scatter_(1, tokens.long().clamp(min=0).unsqueeze(1), 0.0)
        # Where there was no number there is no token: the request ends by that.
        return torch.where((tokens >= 0).unsqueeze(1), only, x)

    def _kept(self, x: Tensor, rows: _Rows) -> Tensor:
        """Tells which tokens may be drawn, bool [K, vocab]. x: after temperature."""
        for name, cut in (("typical_p", typical_p), ("min_p", truncate.min_p)):
            neutral = 1.0 if name == "typical_p" else 0.0
            if any(getattr(params, name) != neutral for params in rows.params):
                x = cut(x, rows.column(name))
        top_k, top_p = rows.column("top_k").clamp(min=0), rows.column("top_p")
        if any(params.top_k > 0 or params.top_p < 1.0 for params in rows.params):
            x = truncate.top_k_top_p(x, top_k.int(), top_p)
        if any(params.xtc_probability for params in rows.params):
            own, ints = rows.lanes.long(), self._state.columns["sampling_ints"]
            x = without_top_choices(
                x,
                (ints[own, 1:3], ints[own, 3], rows.lengths),
                probability=rows.column("xtc_probability"),
                threshold=rows.column("xtc_threshold"),
            )
        return x != -torch.inf


def _most_breakers(rows: _Rows) -> int:
    return max(len(params.dry_breaker_ids) for params in rows.params)


def open_hook(config: EngineConfig) -> Samplers:
    """Returns the hook for a worker."""
    return Samplers()
