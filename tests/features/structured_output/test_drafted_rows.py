"""Rows with a grammar that verify drafts: masks, one per draft, are built once all earlier tokens
are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.arrays import Int32, int32
from quire.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.features.structured_output.feature import GrammarFeature
from quire.features.structured_output.masks import MaskRow
from quire.plan import DRAFT_IDS, DRAFT_START, KVGroup, RowFlag, StepPlan
from quire.request import Request
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.scheduler import Feature, PlanBuilder
from tests.fakes import FakeExecutor, expected_output

_WIDTH = 40


class AnyText:
    """A matcher that accepts every token."""

    def deep_copy(self) -> AnyText:
        return self

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True


class StubCompiler:
    vocab_size, tokenizer_vocab, eos_token_ids = 32, 32, (0,)
    config = SimpleNamespace(timeout=10.0)

    def acquire(self, params: StructuredOutputsParams) -> tuple[Future[Any], int]:
        done: Future[Any] = Future()
        done.set_result(AnyText())
        return done, 0

    def release(self, params: StructuredOutputsParams, copy: int) -> None:
        pass

    def walk(self, params: StructuredOutputsParams) -> None:
        return None

    def shutdown(self) -> None:
        pass


class Recorder:
    """Records the rows of built masks, in step order."""

    def __init__(self) -> None:
        self.built: list[list[tuple[int, int, list[int]]]] = []

    def build(
        self, rows: Sequence[MaskRow], masks: Int32, vocab: int, entered: Callable[[], None]
    ) -> None:
        entered()
        assert all(len(masks) >= row.line + row.lines for row in rows)
        self.built.append(
            [(row.state.position, row.lines, list(row.drafts)) for row in rows if row.state]
        )

    def consume(self, rows: Sequence[MaskRow]) -> None:
        pass

    def settle(self, rows: Sequence[MaskRow]) -> None:
        pass


class Claims(Feature):
    """Drafts the text of each request, which is wrong from its ninth token on."""

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        return int32([3] * len(lanes))

    def plan(self, builder: PlanBuilder) -> None:
        for row, request in enumerate(builder.requests):
            if builder.flags[row] & RowFlag.PROMPT:
                ids = text_of(request)[:8] + [1] * (_WIDTH - 8)
                lane = builder.lanes[row : row + 1]
                builder.write(DRAFT_IDS, lane, int32([ids]))
                builder.write(DRAFT_START, lane, int32([request.prompt_len]))


class Gated(FakeExecutor):
    """Waits for the masks of a step, as a device does."""

    def __init__(self) -> None:
        group = KVGroup(layers=(0,), tokens_per_block=4)
        super().__init__([group], [80], logit_rows=40)
        self.plans: list[StepPlan] = []
        self.ready: dict[int, set[int]] = {}
        self.copies: dict[int, tuple[Int32, Int32]] = {}
        self._ids, self._start = int32([[-1] * _WIDTH] * 4), int32([0] * 4)
        self._more = threading.Condition()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for column, values in ((DRAFT_IDS, self._ids), (DRAFT_START, self._start)):
            if column in plan.writes:
                lanes, written = plan.writes[column]
                values[lanes] = written
        with self._more:
            self.copies[plan.step_id] = self._ids.copy(), self._start.copy()
            self._more.notify_all()
        super().submit(plan)

    def claimed(self, step_id: int, *, wait: bool) -> tuple[Int32, Int32] | None:
        with self._more:
            if wait:
                assert self._more.wait_for(lambda: step_id in self.copies, 20)
            return self.copies.get(step_id)

    def submit_inputs(self, step_id: int, lanes: Int32) -> None:
        with self._more:
            self.ready.setdefault(step_id, set()).update(lanes.tolist())
            self._more.notify_all()

    def collect(self) -> Any:
        plan = self._queue[0]
        if plan.gated:
            with self._more:
                lanes = set(plan.lanes[(plan.flags & RowFlag.GATED) != 0].tolist())
                ready = self.ready.setdefault(plan.step_id, set())
                assert self._more.wait_for(lambda: ready == lanes, 20)
        return super().collect()


def text_of(request: Request) -> list[int]:
    return expected_output(request, 50, None)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_draft_of_a_gated_row_has_a_mask(depth: int) -> None:
    executor, recorder = Gated(), Recorder()
    grammars = GrammarFeature(StubCompiler(), 4)  # type: ignore[arg-type]
    grammars._masks = recorder  # type: ignore[assignment]
    scheduler = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, steps_in_flight=depth
    )
    config = SimpleNamespace(args=SimpleNamespace(seed=0, trace_dir=None), scheduler=scheduler)
    core = EngineCore(config, executor, [Claims()], [grammars])  # type: ignore[arg-type]
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a*"))
    (gated,) = core.add("gated", int32(range(6)), asked, max_total=26)
    (plain,) = core.add("plain", int32(range(7)), SamplingParams(), max_total=27)
    while core.has_work():
        core.step()
    text = text_of(gated)
    assert gated.output.tolist() == text
    assert plain.output.tolist() == text_of(plain)
    assert core.take_failures() == []
    lane = executor.plans[0].admits[0].lane
    n_logits = [
        int(plan.n_logits[np.flatnonzero(plan.lanes == lane)[0]])
        for plan in executor.plans
        if plan.gated
    ]
    claim = [*text[:8], *[1] * (_WIDTH - 8)]
    positions = []
    for (row,), lines in zip(recorder.built, n_logits, strict=True):
        position, asked_lines, drafts = row
        done = position - 6
        positions.append(done)
        assert asked_lines == lines
        right = text[:done] == claim[:done]
        assert drafts == (claim[done : done + lines - 1] if right else [])
    # Every mask was built for all tokens before it, and accepted drafts were passed over.
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert len(positions) < len(text)
    core.shutdown()
