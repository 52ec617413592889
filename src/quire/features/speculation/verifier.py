"""The verification of drafts from any source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quire.executor import StepSeconds
from quire.features.speculation.draft_count import measure_steps
from quire.features.speculation.settings import SpeculationSettings
from quire.models import Decoder, load_config
from quire.models.draft_heads.eagle3 import eagle3_spec
from quire.models.stages import StageDecoder
from quire.runner.hooks import HeadContext, ProgramHook
from quire.runner.program import CapturedPrograms, StepProgram
from quire.runner.state import BatchState

_SHARES = 1 << 16


class Verifier(ProgramHook):
    """Lets rows verify drafts from the host or from another hook."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self.drafts = settings.most
        self._simulated = settings.simulated
        self.changes_tokens = settings.simulated is not None

    def bind(self, state: BatchState) -> None:
        self._state = state
        # It is on the device because captured heads read it there, and benchmarks change it.
        self._shares = torch.zeros(1, dtype=torch.int64, device=state.device)
        self.simulate(self._simulated or 0.0)

    def simulate(self, acceptance: float) -> None:
        """Sets the probability of accepting a draft, if acceptance is simulated."""
        self._shares.fill_(int(acceptance * _SHARES))

    def passes(self) -> Mapping[str, Mapping[int, Callable[[], None]]]:
        """Returns the functions that make drafts on the device, by name and size, for
        measurements."""
        return {}

    def seconds(self, program: StepProgram, graphs: CapturedPrograms | None) -> StepSeconds:
        return measure_steps(program, graphs, self.passes()) if self.drafts else {}

    def tokens(self, ctx: HeadContext) -> None:
        """Simulates acceptance: with the set probability a row's token becomes its draft, and
        otherwise another token. Only for benchmarks, because the tokens are not the model's."""
        drawn = ctx.tokens
        if self._simulated is None or drawn is None or not self._state.limits.drafts:
            return
        rows, state = ctx.logit_rows, self._state
        lanes = rows.lanes.clamp(min=0).long()
        draft = state.tokens[lanes, rows.lengths.clamp(0, state.tokens.shape[1] - 1).long()]
        drafted = rows.ahead < state.columns["drafts_used"][lanes]
        mixed = (rows.lengths.long() * 2654435761 + lanes * 40503) & 0xFFFFFFFF
        share = ((mixed ^ (mixed >> 15)) * 2246822519 >> 13) % _SHARES
        other = torch.where(drawn == draft, (draft + 1) % ctx.logits.shape[-1], drawn)
        chosen = torch.where(share < self._shares, draft, other)
        ctx.tokens = torch.where(drafted & (drawn >= 0), chosen, drawn).int()


class EarlierVerifier(Verifier):
    """Lets rows verify drafts in a pipeline stage before the last. The stage passes on the hidden
    states that a draft head needs."""

    def __init__(self, settings: SpeculationSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def attach(self, model: Decoder) -> None:
        folder = self._settings.model
        if self._settings.source != "eagle3" or folder is None or not self.drafts:
            return
        if isinstance(model, StageDecoder):
            model.tap(eagle3_spec(load_config(folder), model.spec).taps, lambda *stream: None)
