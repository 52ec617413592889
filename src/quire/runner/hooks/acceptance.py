"""Accepts drawn tokens: drafts that agree, and the token after them, up to a stop token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire import ops
from quire.arrays import int32
from quire.errors import MAX_STOP_TOKENS
from quire.plan import NO_CLAIM, StepPlan, claim_width
from quire.runner.hooks.hook import HeadContext, HostHook, Level, ProgramHook
from quire.runner.hooks.penalties import Penalties
from quire.runner.hooks.sampling import sampling_columns
from quire.runner.readback import Upload, ragged
from quire.runner.state import BatchState, ColumnSpec, Limits
from quire.sampling_params import SamplingParams


class Acceptance(ProgramHook, HostHook):
    """Ends each row's run of tokens, and keeps the columns of stop tokens and drafts.

    Verification is sampling: every logit row draws with its own position's noise, and the longest
    run of drafts that were drawn is accepted (see `ops.finish_rows`).

    Columns:
        num_stops: int32 [lanes], number of stop tokens.
        stops: int32 [lanes, S], the stop tokens.
        draft_ids: int32 [lanes, W], a claim (see `StepPlan`), from a plan or from the device. This
            column and the next two exist only if rows may have drafts.
        draft_start: int32 [lanes], the claim's first position.
        drafts_used: int32 [lanes], number of drafts that the lane's row verifies.

    Attributes:
        claims: the columns of drafts, or None.
    """

    def __init__(self, eos_token_ids: Sequence[int], penalties: Penalties) -> None:
        self._eos = tuple(eos_token_ids)
        self._penalties = penalties
        self.claims: ops.Drafts | None = None

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        width = MAX_STOP_TOKENS + len(self._eos)
        stops = (ColumnSpec("num_stops"), ColumnSpec("stops", (width,), fill=-1))
        if not limits.drafts:
            return stops
        return (
            *stops,
            ColumnSpec("draft_ids", (claim_width(limits.drafts),), fill=-1),
            ColumnSpec("draft_start", fill=NO_CLAIM),
            ColumnSpec("drafts_used"),
        )

    def bind(self, state: BatchState) -> None:
        self._num_stops = state.columns["num_stops"]
        self._stops = state.columns["stops"]
        if state.limits.drafts:
            names = "draft_ids", "draft_start", "drafts_used"
            self.claims = ops.Drafts(*(state.columns[name] for name in names))

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if not admits:
            return
        lanes = int32([admit.lane for admit in admits])
        ends = [self._stop_ids(admit.params) for admit in admits]
        counts = int32([len(ids) for ids in ends])
        upload.put_lines(self._num_stops, lanes, counts)
        if counts.any():
            starts = ragged(lanes, np.zeros_like(lanes), self._stops.shape[1])
            nonempty = counts > 0
            values = int32([token for ids in ends for token in ids])
            upload.put(self._stops, starts[nonempty], counts[nonempty], values)
        if self.claims is not None:
            # A claim for the lane's previous request must not count for this request.
            claimed = plan.writes.get("draft_start", (lanes[:0], lanes[:0]))[0]
            stale = lanes[~np.isin(lanes, claimed)]
            upload.put_lines(self.claims.start, stale, np.full_like(stale, NO_CLAIM))

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        eos = () if params.ignore_eos else self._eos
        return sorted({*eos, *params.stop_token_ids})

    def tokens(self, ctx: HeadContext) -> None:
        state = ctx.state
        columns = {
            "position": state.position,
            "tokens": state.tokens,
            "max_total": state.max_total,
            "min_total": state.min_total,
            "num_stops": self._num_stops,
            "stops": self._stops,
        }
        if ctx.fused:
            ops.sample_and_finish(
                ctx.logits,
                ctx.rows,
                ctx.logit_rows,
                state.results,
                sampling=sampling_columns(state),
                **columns,
                ring=state.ring,
            )
            return
        if ctx.tokens is None:
            ctx.tokens = torch.empty(0, dtype=torch.int32, device=state.device)
        counts = self._penalties.counts if ctx.level >= Level.FULL else None
        ops.finish_rows(
            ctx.rows,
            ctx.logit_rows,
            ctx.tokens,
            state.results,
            **columns,
            counts=counts,
            ring=state.ring,
        )
