"""The runner's part: the head masks all tokens except the repeated one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.runner.hooks import HeadContext, ProgramHook
from quire.runner.state import BatchState, ColumnSpec, Limits
from tests.features.constant_token.args import NONE
from tests.features.constant_token.feature import COLUMN


class ConstantTokenHook(ProgramHook):
    """Masks all tokens except one, which each row's column holds on the device."""

    def __init__(self, config: EngineConfig) -> None:
        self._ids = torch.arange(config.vocab_size)

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return (ColumnSpec(COLUMN, fill=NONE),)

    def bind(self, state: BatchState) -> None:
        self._column = state.columns[COLUMN]
        self._ids = self._ids.to(state.device)

    def logits(self, ctx: HeadContext) -> None:
        lanes = ctx.logit_rows.lanes.long()
        tokens = torch.where(lanes >= 0, self._column[lanes.clamp(min=0)], NONE).unsqueeze(1)
        barred = (tokens != NONE) & (self._ids != tokens)
        ctx.logits = ctx.logits.masked_fill(barred, -torch.inf)
