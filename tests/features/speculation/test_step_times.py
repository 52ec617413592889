"""The cost of drafts is measured with the graphs that steps replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quire.features.speculation.draft_count import measure_steps
from quire.runner.graphs import Buckets
from quire.runner.hooks.hook import Level
from quire.runner.program import BodyShape, HeadShape, StepProgram
from quire.runner.state import Limits


class Captured:
    """Captured programs for the given limits; a replay does nothing."""

    def __init__(self, limits: Limits, heads: bool) -> None:
        self.buckets = Buckets(limits)
        self.heads = heads
        self.replayed: list[Any] = []

    def body(self, step: BodyShape) -> BodyShape | None:
        return self.buckets.body(step.tokens, step.rows, step.longest)

    def head(self, logit_rows: int, level: Level) -> HeadShape | None:
        return self.buckets.head(logit_rows, level) if self.heads else None

    def replay(self, key: Any) -> None:
        self.replayed.append(key)


@pytest.mark.parametrize(("lanes", "drafts"), [(1, 8), (3, 5), (64, 4)])
def test_every_size_is_replayed(lanes: int, drafts: int) -> None:
    limits = Limits(lanes, tokens=2048, logit_rows=lanes * (1 + drafts), length=4096, drafts=drafts)

    def run(*args: Any, **keywords: Any) -> None:
        pytest.fail("a step ran without its captured program")

    state = SimpleNamespace(limits=limits, device=torch.device("cpu"))
    bodies = []
    for heads in (True, False):
        lanes_of, model = SimpleNamespace(state=state), SimpleNamespace(gives_logits=heads)
        program = SimpleNamespace(bound=lanes_of, model=model, body=run, head=run)
        captured = Captured(limits, heads)
        found = measure_steps(cast(StepProgram, program), captured, {})
        assert max(found["verify"]) == min(limits.logit_rows, 16)
        bodies.append([key for key in captured.replayed if isinstance(key, BodyShape)])
    # A stage without a head runs the same bodies.
    assert bodies[0] == bodies[1]
